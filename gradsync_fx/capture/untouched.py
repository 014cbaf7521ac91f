"""Runtime check of deferred helpers: refuses one that touches what the step is made of.

They run after the program, where `.grad` is empty and parameters may be updated: a helper that reads or writes these
would see, or do, something else than in eager PyTorch.

before it runs     an op on a parameter, its `.grad`, a buffer or optimizer state, and backward: the op is not run
after it has run   torch's random generators and settings of optimizers that changed: they are set back;
                   tensors that were written past the watched ops: the step's inputs, and what the helper was given
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from gradsync_fx._torch import tree_leaves
from gradsync_fx.errors import LeftOutError
from gradsync_fx.ir.program import Kind
from gradsync_fx.optim.reached import words


# What may be read of any tensor: metadata.
_METADATA = words(
    "shape size dim ndim numel nelement dtype device layout requires_grad is_leaf grad_fn names itemsize nbytes "
    "element_size stride is_contiguous is_floating_point is_complex is_sparse is_cuda __len__ __hash__ "
    "_version retains_grad output_nr storage_offset type"
)
_BACKWARD = frozenset(("backward", "grad"))


@dataclass(slots=True)
class Around:
    """What a call of the step is made of. capture: its `Capture`. inputs: all that its program was given.

    deferred: what is to be done when there is an update.
    """

    capture: Any
    inputs: list[Any]
    deferred: list[Callable[[], None]] = field(default_factory=list)
    _memory: frozenset[int] | None = field(default=None, init=False)

    def memory(self) -> frozenset[int]:
        """The addresses of those tensors. Computed on first use: most helpers touch no tensor."""
        if self._memory is None:
            capture = self.capture
            # A buffer that its program does not have, a metric's own, is none of the step's.
            names = [s.name for s in capture.step.slots if s.kind is Kind.BUFFER]
            held = [d for o in capture.optimizers for d in (*o.state.values(), *_groups(o))]
            found = [
                *capture.parameters.values(),
                *(capture.buffers[name] for name in names),
                *tensors_in([list(d.values()) for d in held]),
            ]
            self._memory = frozenset(map(_address, found))
        return self._memory


_around = threading.local()


@contextmanager
def one_call() -> Iterator[None]:
    """One call of a step, with what its helpers are watched by."""
    before = getattr(_around, "value", None)
    _around.value = None
    try:
        yield
    finally:
        _around.value = before


def runs_now(around: Around) -> None:
    """Says what the program that runs now is made of."""
    _around.value = around


def runs() -> Around | None:
    """What `runs_now` said in this call."""
    found: Around | None = getattr(_around, "value", None)
    return found


def run_watched(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], what: str) -> None:
    """Calls a helper. what: its name and line. Raises `LeftOutError` when it touches what it may not."""
    around = runs()
    if around is None:
        function(*args, **kwargs)
        return
    given = tensors_in((args, kwargs))
    looked_at = [*given, *tensors_in(around.inputs)]
    versions = [t._version for t in looked_at]
    generators = _generators()
    settings = [[dict(g) for g in _groups(o)] for o in around.capture.optimizers]
    watch = _Watch(around, given, looked_at)
    try:
        with watch:
            function(*args, **kwargs)
    except LeftOutError:
        pass
    found = watch.found or _changed(generators, around.capture.optimizers, settings)
    if not found and versions != [t._version for t in looked_at]:
        found = "it writes a tensor of the step"
    if found:
        raise touched(what, found)


def touched(what: str, found: str) -> LeftOutError:
    """The error for a helper that touches what it may not."""
    return LeftOutError(
        what,
        seen=f"it cannot be traced, and so runs after the program; {found}",
        wanted="helpers that touch no gradient, parameter, buffer, optimizer, input or random generator",
        fix="write it so that it can be traced (torch's functions, no numbers of Python), or call it outside of the "
        "step: where step.sync_gradients is True, for once per update",
    )


class _Watch(TorchFunctionMode):
    """Stops a helper before an op that it may not run."""

    def __init__(
        self, around: Around, given: list[torch.Tensor], inputs: list[torch.Tensor]
    ) -> None:
        super().__init__()
        self._around = around
        self._given, self._inputs = (
            frozenset(map(_address, given)),
            frozenset(map(_address, inputs)),
        )
        self.found = ""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = getattr(func, "__name__", "")
        attribute = named in ("__get__", "__set__", "__delete__")
        name = getattr(getattr(func, "__self__", None), "__name__", "") if attribute else named
        if not attribute and name in _BACKWARD:
            self._stop("it computes gradients")
        if _writes(name, kwargs or {}):
            held = args[:1] if "out" not in (kwargs or {}) else (kwargs or {})["out"]
            if any(_address(t) in self._inputs for t in tensors_in(held)):
                self._stop(f"it uses {name!r} of a tensor of the step")
        if name not in _METADATA or named == "__set__":
            for value in tensors_in((args, kwargs or {})):
                if self._is_ours(value):
                    self._stop(f"it uses {name!r} of a parameter, a buffer or optimizer state")
        return func(*args, **(kwargs or {}))

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        address = _address(tensor)
        return address not in self._given and address in self._around.memory()

    def _stop(self, found: str) -> None:
        self.found = self.found or found
        raise LeftOutError("a helper", seen=found)


def tensors_in(values: Any) -> list[torch.Tensor]:
    """A tensor, or those in a container, in order."""
    return [v for v in tree_leaves(values) if isinstance(v, torch.Tensor)]


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a function of torch writes into a tensor that it is given, by its name."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or name.startswith("__i") or "out" in kwargs


def storage_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage; 0 where it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, meta, wrapped
        return 0


def _address(tensor: torch.Tensor) -> int:
    """Of a tensor's storage; where it has none, the tensor's id."""
    return storage_of(tensor) or id(tensor)


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    return list(getattr(optimizer, "param_groups", ()))


def _generators() -> list[torch.Tensor]:
    on_gpu = torch.cuda.is_initialized()
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if on_gpu else ())]


def _changed(
    generators: list[torch.Tensor],
    optimizers: tuple[Optimizer, ...],
    settings: list[list[dict[str, Any]]],
) -> str:
    """What a helper changed of these, for people; it is set back."""
    found = ""
    if not all(map(torch.equal, generators, _generators())):
        torch.set_rng_state(generators[0])
        if generators[1:]:
            torch.cuda.set_rng_state_all(generators[1:])
        found = "it sets, or draws from, a random generator"
    for optimizer, before in zip(optimizers, settings, strict=True):
        for group, was in zip(_groups(optimizer), before, strict=False):
            if group.keys() != was.keys() or any(group[k] is not was[k] for k in was):
                group.clear()
                group.update(was)
                found = found or f"it sets a hyper-parameter of {type(optimizer).__name__}"
    return found
