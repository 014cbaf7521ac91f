"""`torch.compile(train_step, backend="gradsync", options={...})`: the same step as `gradsync_fx.optimize` makes.

torch finds this module by its entry point, without an import of the user's. By the time that a backend is handed a
graph, Dynamo has cut the step at `backward` and at the optimizer: too late. So the name is looked up anew for every
`torch.compile`, and each lookup takes the one call that follows it there:

torch.compile -> lookup: `gradsync` of this module -> torch._dynamo.optimize(backend) -> a `BackendStep`

The patch lives from the lookup to that call. Whoever else loads the entry point, as a tool that lists plugins, patches
nothing.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar
from unittest import mock

import torch
from torch import nn

from gradsync_fx._torch import compile_fx, dynamo, dynamo_backends, dynamo_compilers, lookup_backend
from gradsync_fx.errors import NoBackwardError, OptionError, WindowError
from gradsync_fx.optimized_step import OptimizedStep
from gradsync_fx.options import Options
from gradsync_fx.user_lines import warn_user


NAME = "gradsync"
P = ParamSpec("P")
R = TypeVar("R")


class BackendStep(OptimizedStep[..., Any]):
    """What `torch.compile` returns with this backend: an `OptimizedStep`, or plain Inductor where there is no step."""

    def __init__(self, train_step: Callable[..., Any], options: Options) -> None:
        super().__init__(train_step, options)
        self._plain: Callable[..., Any] | None = None

    def __repr__(self) -> str:
        whole = super().__repr__()
        return whole if self._plain is None else f"<{self._name}, no training step: by Inductor>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One micro-step; or the function compiled by Inductor, where nothing in it calls `backward`."""
        if self._plain is not None:
            return self._plain(*args, **kwargs)
        try:
            return super().__call__(*args, **kwargs)
        except NoBackwardError:
            if self.micro_step:
                raise
        self._plain = _plain(self._train_step, self._executor.options.dynamic)
        return self._plain(*args, **kwargs)


def window(compiled: Callable[P, R]) -> OptimizedStep[P, R]:
    """The window controls (`flush`, `skip`, ...) of what `torch.compile(..., backend="gradsync")` returned.

    What `gradsync_fx.optimize` returned has its own, and is given back. Raises `WindowError` for anything else.

    >>> options: gradsync_fx.BackendOptions = {"gradient_accumulation_steps": 2}
    >>> compiled = torch.compile(train_step, backend="gradsync", options=options)
    >>> loss = compiled(model, optimizer, x, y)
    >>> gradsync_fx.window(compiled).pending
    1
    """
    if isinstance(compiled, OptimizedStep):
        return compiled
    raise WindowError(
        f"window({type(compiled).__name__})",
        seen="it holds no window",
        wanted='what torch.compile(train_step, backend="gradsync") or gradsync_fx.optimize returned',
        fix="compile the whole training step: forward, backward and optimizer.step()",
    )


def __getattr__(name: str) -> Any:
    """The backend, for torch's lookup of the entry point; see the module's text."""
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    backend = _Backend()
    if _torch_is_looking():
        _take_the_next_compilation(backend)
    return backend


def _torch_is_looking() -> bool:
    return any(f.f_code is lookup_backend.__code__ for f, _ in traceback.walk_stack(None))


class _Backend:
    """One lookup of the name. Called with a graph, it was reached in another way than by `torch.compile`."""

    __name__ = NAME

    def __call__(self, module: Any, inputs: Any, **options: Any) -> Any:
        _warn()
        return compile_fx(module, inputs)


def _take_the_next_compilation(backend: _Backend) -> None:
    plain, entry = dynamo.optimize, dynamo_backends.get(NAME)

    def optimize(*args: Any, **kwargs: Any) -> Any:
        patch.stop()
        # torch keeps what it has looked up; as it was, the next lookup comes here again.
        dynamo_compilers.pop(NAME, None)
        dynamo_backends[NAME] = entry
        asked: Any = kwargs.get("backend", args[0] if args else None)
        if getattr(asked, "compiler_fn", None) is not backend or kwargs.get("disable"):
            return plain(*args, **kwargs)
        dynamic = kwargs.get("dynamic")
        return lambda function: _compiled(function, dict(asked.kwargs), dynamic)

    patch = mock.patch.object(dynamo, "optimize", optimize)
    patch.start()


def _compiled(function: Any, given: dict[str, Any], dynamic: bool | None) -> Any:
    if isinstance(function, nn.Module):
        return _plain(function, dynamic)
    asked = given.get("options", {})
    if not isinstance(asked, Mapping):
        raise OptionError(
            "argument 'options'",
            seen=f"{asked!r} of type {type(asked).__name__}",
            wanted="a mapping from names of gradsync_fx.optimize's arguments to their values",
            fix='write options={"gradient_accumulation_steps": 4}, say',
        )
    options = dict(asked)
    if "mode" in given:
        options["mode"] = given["mode"]
    if dynamic is not None:
        options.setdefault("dynamic", dynamic)
    if options.get("backend") == NAME:
        raise OptionError(
            "option 'backend'",
            seen=f"{NAME!r}",
            wanted='the backend that lowers the programs: "inductor", "aot_eager", ...',
            fix='leave it out for "inductor"',
        )
    return BackendStep(function, Options.of(options))


def _plain(function: Any, dynamic: bool | None) -> Any:
    _warn()
    return torch.compile(function, dynamic=dynamic)


def _warn() -> None:
    warn_user(
        'backend="gradsync" compiles a whole training step; this has no backward in it, and is compiled by Inductor. '
        "Compile the function that calls forward, backward and optimizer.step(): torch.compile(train_step, "
        'backend="gradsync").'
    )
