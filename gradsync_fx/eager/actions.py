"""Records what a step does with its gradients after `backward`, to replay it where a window closes without data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from gradsync_fx._torch import tree_leaves, tree_map_only
from gradsync_fx.capture.untouched import storage_of
from gradsync_fx.errors import CaptureError


Values = dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Action(ABC):
    """One such call: equal to itself alone. reads: the optimizers (by number) whose gradients it looks at."""

    reads: tuple[int, ...]

    @property
    def needs(self) -> set[int]:
        """Slots of what the actions before it made, and it is made of."""
        return set()

    @abstractmethod
    def repeat(self, values: Values) -> None:
        """Does it again. values: what the actions before it made, by slot."""


@dataclass(frozen=True, slots=True, eq=False)
class Clipping(Action):
    """`clip_grad_norm_` or `clip_grad_value_`, with its arguments."""

    function: Any
    parameters: tuple[torch.Tensor, ...]
    arguments: tuple[tuple[str, Any], ...]
    slot: int = 0  # of the norm that it returned

    def repeat(self, values: Values) -> None:
        found = self.function(list(self.parameters), **dict(self.arguments))
        if isinstance(found, torch.Tensor):
            values[self.slot] = found


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerStep(Action):
    """`optimizer.step(...)`."""

    optimizer: Optimizer
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    def repeat(self, values: Values) -> None:
        self.optimizer.step(*self.args, **dict(self.kwargs))


@dataclass(frozen=True, slots=True, eq=False)
class Schedule(Action):
    """`scheduler.step(...)`, or another method that runs after the update."""

    owner: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    method: str = "step"

    def repeat(self, values: Values) -> None:
        getattr(self.owner, self.method)(*self.args, **dict(self.kwargs))


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor in a storage that another action makes (where: its slot), or a parameter's gradient as it is then."""

    where: int | torch.Tensor | None
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def now(self, values: Values) -> torch.Tensor:
        if isinstance(self.where, torch.Tensor):
            held = self.where.grad
            return torch.zeros_like(self.where) if held is None else held
        assert self.where is not None
        storage = values[self.where].untyped_storage()
        empty = torch.empty(0, dtype=self.dtype, device=values[self.where].device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True, eq=False)
class Put(Action):
    """A tensor, or a container of some, into its place in an object. put: does it. pieces: of the tensors."""

    pieces: Any
    put: Callable[[Any], None]

    @property
    def needs(self) -> set[int]:
        return _slots(self.pieces)

    def repeat(self, values: Values) -> None:
        self.put(tree_map_only(Piece, lambda p: p.now(values), self.pieces))


@dataclass(frozen=True, slots=True, eq=False)
class Done(Action):
    """An operation on gradients or on what is updated. outs: slots of the storages that it makes; changes:
    of those that it writes to. writes: to what was
    there before the call. line: of a write that may be made of a value that was read on the host."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    outs: tuple[int, ...]
    changes: tuple[int, ...]
    writes: bool
    line: str

    @property
    def needs(self) -> set[int]:
        return _slots((self.args, self.kwargs))

    def repeat(self, values: Values) -> None:
        if self.line:
            raise CaptureError(
                f"write at {self.line}",
                seen="the step runs eagerly, and reads a value of gradients or updated parameters on the host "
                "before it; the window ends without a call that would read it again",
                wanted="tensors from the gradient to the write",
                fix="keep the value a tensor (no item()), or end each window with a call",
            )
        args, kwargs = tree_map_only(Piece, lambda p: p.now(values), (self.args, self.kwargs))
        with torch.no_grad():
            result = self.function(*args, **kwargs)
        for value in tree_leaves(result):
            if isinstance(value, torch.ScriptObject):  # a collective's work
                value.wait()  # type: ignore[attr-defined]
        inside = {storage_of(t) for t in tree_leaves((args, kwargs)) if _strided(t)}
        made = [t for t in tree_leaves(result) if _strided(t)]
        made = [t for t in made if storage_of(t) not in inside]
        values.update(zip(self.outs, made, strict=True))


def _strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _slots(given: Any) -> set[int]:
    found = tree_leaves(given, is_leaf=lambda v: isinstance(v, Piece))
    return {v.where for v in found if isinstance(v, Piece) and isinstance(v.where, int)}


def needed(actions: Sequence[Action]) -> list[Action]:
    """Without operations whose results go nowhere."""
    wanted: set[int] = set()
    kept: list[Action] = []
    for action in reversed(actions):
        if isinstance(action, Done) and not (
            action.writes or wanted & {*action.outs, *action.changes}
        ):
            continue
        wanted |= action.needs
        kept.append(action)
    return kept[::-1]
