"""One frozen `Options`: every argument of `optimize`, checked on construction, unknown names refused."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypedDict, get_args, get_origin

import torch
from torch.distributed import GroupMember, ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from gradsync_fx._torch import inductor_config, list_mode_options
from gradsync_fx.choices import BROADCASTS, REDUCTIONS, Broadcasts, ReductionKind
from gradsync_fx.errors import OptionError
from gradsync_fx.update_record import UpdateRecord


MANUAL = "manual"
Steps = int | Literal["manual"] | Mapping[Optimizer, int]
Unsupported = Literal["error", "eager"]
# What makes a program faster and not another one (lower.py, shareable.py, compile_lock.py, invariants.py).
Optimization = Literal[
    "overlap",
    "in_place",
    "shared_memory",
    "products",
    "updates",
    "shared_compile",
    "invariants",
    "blocks",
]
OPTIMIZATIONS: tuple[str, ...] = get_args(Optimization)
Backend = str | Callable[..., Any]
Commit = Callable[[], bool]
OnUpdate = Callable[[UpdateRecord], Any]
OURS = "gradsync"  # the backend for torch.compile: what lowers programs is another
# Names that need no look at the list of torch's, which imports all of them.
USUAL = ("inductor", "aot_eager", "eager")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What `gradsync_fx.optimize` takes, with its defaults; see there for the meaning of each."""

    gradient_accumulation_steps: Steps = 1
    reduction: ReductionKind = "mean"
    process_group: ProcessGroup | None = None
    device_mesh: DeviceMesh | None = None
    sync_each_batch: bool = False
    bucket_cap_mb: float = 25.0
    accumulator_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    broadcast_buffers: Broadcasts = "window_start"
    on_unsupported: Unsupported = "error"
    skip_nonfinite: bool = False
    rank_timeout: float | None = None
    shard_optimizer: bool = False
    overlap_param_gather: bool | None = None
    commit: Commit | None = None
    on_update: OnUpdate | None = None
    self_check: bool = False
    verbose: bool = True
    backend: Backend = "inductor"
    mode: str | None = None
    dynamic: bool | None = None
    options: Mapping[str, Any] | None = None
    artifact: str | os.PathLike[str] | None = None
    without: Collection[Optimization] = ()

    def __post_init__(self) -> None:
        check_steps(self.gradient_accumulation_steps)
        _one_of("reduction", self.reduction, REDUCTIONS)
        _one_of("broadcast_buffers", self.broadcast_buffers, BROADCASTS)
        _one_of("on_unsupported", self.on_unsupported, get_args(Unsupported))
        switches = ("sync_each_batch", "skip_nonfinite", "shard_optimizer", "self_check", "verbose")
        for name in switches:
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, getattr(self, name), "True or False")
        if not _is_positive(self.bucket_cap_mb):
            raise _bad("bucket_cap_mb", self.bucket_cap_mb, "a number of MiB above 0")
        if self.rank_timeout is not None and not _is_positive(self.rank_timeout):
            raise _bad("rank_timeout", self.rank_timeout, "None or a number of seconds above 0")
        for name in ("accumulator_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not _has_sums(dtype):
                raise _bad(name, dtype, "None or a floating torch.dtype of 16 bits or more")
        left_out: object = self.without
        if (
            isinstance(left_out, str)
            or not isinstance(left_out, Collection)
            or any(name not in OPTIMIZATIONS for name in left_out)
        ):
            raise _bad("without", left_out, "a collection of names: " + ", ".join(OPTIMIZATIONS))
        if self.dynamic is not None and not isinstance(self.dynamic, bool):
            raise _bad("dynamic", self.dynamic, "None, True or False")
        if self.commit is not None and not callable(self.commit):
            raise _bad(
                "commit", self.commit, "None or a callable without arguments that returns a bool"
            )
        if self.on_update is not None and not callable(self.on_update):
            raise _bad("on_update", self.on_update, "None or a callable that takes a record")
        _check_group(self.process_group)
        _check_mesh(self.device_mesh)
        self._check_shards()
        _check_backend(self.backend)
        _check_inductors(self.backend, self.mode, self.options, self.artifact)

    def _check_shards(self) -> None:
        """What does not go together with `shard_optimizer`, or not without it."""
        hides = self.overlap_param_gather
        if hides is not None and not isinstance(hides, bool):
            raise _bad("overlap_param_gather", hides, "None, True or False")
        if hides and not self.shard_optimizer:
            raise OptionError(
                "argument 'overlap_param_gather'",
                seen="True without shard_optimizer=True: every rank makes the whole update, and gathers nothing",
                wanted="shard_optimizer=True beside it",
                fix="pass shard_optimizer=True, too, or leave overlap_param_gather out",
            )
        if not self.shard_optimizer:
            return
        if self.on_unsupported == "eager":
            raise _not_together(
                "on_unsupported", "windows that run eagerly divide nothing among ranks"
            )
        if self.device_mesh is not None:
            raise _not_together("device_mesh", "pieces of sums are sent in one level")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Options from keyword arguments. Raises `OptionError` on a name that does not exist."""
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                raise OptionError(
                    f"argument {name!r}",
                    seen="optimize has no such argument",
                    wanted="one of " + ", ".join(known),
                    fix=f"did you mean {near[0]!r}?" if near else "remove it",
                )
        return cls(**given)

    @property
    def manual(self) -> bool:
        """Whether the step itself decides which call is the boundary."""
        return self.gradient_accumulation_steps == MANUAL

    @property
    def steps(self) -> tuple[int, ...]:
        """Micro-steps in a window, for each part of it: one, or one for each optimizer of a mapping; 0 for manual."""
        given = self.gradient_accumulation_steps
        if isinstance(given, Mapping):
            return tuple(given.values())
        return (0,) if isinstance(given, str) else (given,)

    @property
    def accumulates(self) -> bool:
        """Whether a window may have more than one micro-step."""
        return any(k != 1 for k in self.steps)

    @property
    def several_windows(self) -> bool:
        """Whether each optimizer has a window of its own."""
        return isinstance(self.gradient_accumulation_steps, Mapping)

    def with_steps(self, k: Any) -> Options:
        """The same options with another window length."""
        return replace(self, gradient_accumulation_steps=k)

    @property
    def bucket_bytes(self) -> int:
        """Cap of one all-reduce, in bytes."""
        return int(min(self.bucket_cap_mb * 1024 * 1024, sys.maxsize))


class BackendOptions(TypedDict, total=False):
    """The same as a dict: what `torch.compile(train_step, backend="gradsync", options={...})` takes."""

    gradient_accumulation_steps: Steps
    reduction: ReductionKind
    process_group: ProcessGroup | None
    device_mesh: DeviceMesh | None
    sync_each_batch: bool
    bucket_cap_mb: float
    accumulator_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    broadcast_buffers: Broadcasts
    on_unsupported: Unsupported
    skip_nonfinite: bool
    rank_timeout: float | None
    shard_optimizer: bool
    overlap_param_gather: bool | None
    commit: Commit | None
    on_update: OnUpdate | None
    self_check: bool
    verbose: bool
    backend: Backend
    mode: str | None
    dynamic: bool | None
    options: Mapping[str, Any] | None
    artifact: str | os.PathLike[str] | None
    without: Collection[Optimization]


def check_steps(given: object) -> None:
    """Raises `OptionError` unless given an integer of at least 1, "manual", or a mapping from optimizers to those."""
    name = "gradient_accumulation_steps"
    if isinstance(given, Mapping):
        for optimizer, k in given.items():
            if not isinstance(optimizer, Optimizer) or not _is_count(k):
                raise _bad(
                    name, {optimizer: k}, "a mapping from optimizers to integers of at least 1"
                )
        if given:
            return
    if given != MANUAL and not _is_count(given):
        raise _bad(name, given, "an integer of at least 1, 'manual', or a mapping from optimizers")


def _check_group(group: object) -> None:
    if group is not None and not isinstance(group, ProcessGroup):
        outside = isinstance(group, type(GroupMember.NON_GROUP_MEMBER)) and (
            group == GroupMember.NON_GROUP_MEMBER
        )
        raise OptionError(
            "argument 'process_group'",
            seen="this rank is no member of it"
            if outside
            else f"{group!r} of type {type(group).__name__}",
            wanted="None or a torch.distributed.ProcessGroup of this rank's own",
            fix="pass what dist.new_group(...) returned, on its members only; or leave it out",
        )


def _not_together(name: str, why: str) -> OptionError:
    return OptionError(
        f"arguments 'shard_optimizer' and {name!r}",
        seen=f"both are given, and {why}",
        wanted="one of the two",
        fix=f"leave {name} out and keep shard_optimizer, or leave shard_optimizer out and keep {name}",
    )


def _check_mesh(mesh: object) -> None:
    if mesh is None or isinstance(mesh, DeviceMesh) and mesh.ndim == 2:
        return
    shape = f"a mesh of shape {tuple(mesh.shape)}" if isinstance(mesh, DeviceMesh) else repr(mesh)
    raise OptionError(
        "argument 'device_mesh'",
        seen=shape,
        wanted="None, or a torch.distributed.DeviceMesh of two dimensions: machines, and ranks in each",
        fix='init_device_mesh("cpu", (machines, ranks_per_machine))',
    )


def _check_backend(backend: object) -> None:
    if callable(backend) or isinstance(backend, str) and backend in USUAL:
        return
    if not isinstance(backend, str):
        raise _bad("backend", backend, "a name or a callable (GraphModule, inputs)")
    known = [name for name in torch.compiler.list_backends(()) if name != OURS]
    if backend not in known:
        near = difflib.get_close_matches(backend, known, n=1)
        raise OptionError(
            "argument 'backend'",
            seen=f"{backend!r}, which is {'this package' if backend == OURS else 'no backend that torch knows'}",
            wanted=f"what lowers the programs: a callable, or one of {', '.join(known)}",
            fix=f"did you mean {near[0]!r}?" if near else 'leave it out for "inductor"',
        )


def _check_inductors(backend: object, mode: object, options: object, artifact: object) -> None:
    """What only Inductor reads."""
    if mode is not None and not (isinstance(mode, str) and mode in list_mode_options()):
        raise _bad("mode", mode, "None or one of " + ", ".join(map(repr, list_mode_options())))
    if options is not None and not isinstance(options, Mapping):
        raise _bad("options", options, "None or a mapping from names of Inductor's settings")
    if artifact is not None and not isinstance(artifact, str | os.PathLike):
        raise _bad("artifact", artifact, "None or the path of a file of step.export(path)")
    given = {
        "mode": mode if mode != "default" else None,
        "options": options or None,
        "artifact": artifact,
    }
    for name, value in given.items():
        if value is not None and backend != "inductor":
            raise OptionError(
                f"arguments 'backend' and {name!r}",
                seen=f"{name}={value!r} with backend={backend!r}, which does not read it",
                wanted=f'{name} with backend="inductor" only',
                fix="leave one of them out",
            )
    settings = inductor_config.get_config_copy() if options else {}
    for name, value in (options or {}).items():
        setting = str(name).replace("-", "_")
        if setting not in settings:
            near = difflib.get_close_matches(str(name), settings, n=1)
            raise OptionError(
                "argument 'options'",
                seen=f"{name!r}, which Inductor has no setting for",
                wanted="names of torch._inductor.config",
                fix=f"did you mean {near[0]!r}?" if near else "leave it out",
            )
        kind = inductor_config.get_type(setting)  # type: ignore[attr-defined]
        if get_origin(kind) is None and not isinstance(value, kind):  # as torch.compile does
            raise _bad("options", {name: value}, f"{kind.__name__} for {setting!r}")


def _is_positive(number: object) -> bool:
    """Whether a float can hold it, too: an int may be too large."""
    known = isinstance(number, int | float) and not isinstance(number, bool)
    return known and 0 < number <= sys.float_info.max  # type: ignore[operator]


def _has_sums(dtype: object) -> bool:
    """Whether it is a dtype that torch adds in."""
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1


def _is_count(k: object) -> bool:
    return isinstance(k, int) and not isinstance(k, bool) and k >= 1


def _one_of(name: str, value: object, legal: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in legal:
        raise _bad(name, value, "one of " + ", ".join(map(repr, legal)))


def _bad(name: str, value: object, wanted: str) -> OptionError:
    return OptionError(
        f"argument {name!r}",
        seen=f"{value!r} of type {type(value).__name__}",
        wanted=wanted,
        fix="pass a legal value, or leave it out for the default",
    )
