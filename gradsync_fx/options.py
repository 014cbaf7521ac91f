"""One frozen `Options`: every knob of `optimize`, checked on construction, unknown names refused."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.distributed import ProcessGroup

from gradsync_fx.errors import OptionError


REDUCTIONS = ("mean", "sum")
BROADCASTS = ("window_start", "never", "every")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What `gradsync_fx.optimize` takes, with its defaults; see there for the meaning of each."""

    gradient_accumulation_steps: int = 1
    reduction: str = "mean"
    process_group: ProcessGroup | None = None
    sync_each_batch: bool = False
    bucket_cap_mb: float = 25.0
    accumulator_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    broadcast_buffers: str = "window_start"
    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    dynamic: bool | None = None
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_steps(self.gradient_accumulation_steps)
        _one_of("reduction", self.reduction, REDUCTIONS)
        _one_of("broadcast_buffers", self.broadcast_buffers, BROADCASTS)
        if not isinstance(self.sync_each_batch, bool):
            raise _bad("sync_each_batch", self.sync_each_batch, "True or False")
        cap = self.bucket_cap_mb
        if not isinstance(cap, int | float) or math.isnan(cap) or cap <= 0:
            raise _bad("bucket_cap_mb", cap, "a number of MiB above 0")
        for name in ("accumulator_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (
                isinstance(dtype, torch.dtype) and dtype.is_floating_point
            ):
                raise _bad(name, dtype, "None or a floating torch.dtype")
        if not callable(self.backend) and not isinstance(self.backend, str):
            raise _bad("backend", self.backend, "a name or a callable (GraphModule, inputs)")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Options from keyword arguments. Raises `OptionError` on a name that does not exist."""
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                raise OptionError(
                    f"argument {name!r}",
                    seen="optimize has no such argument",
                    wanted="one of " + ", ".join(known),
                    fix=f"did you mean {near[0]!r}?" if near else "remove it",
                )
        return cls(**given)

    def with_steps(self, k: int) -> Options:
        """The same options with another window length."""
        return replace(self, gradient_accumulation_steps=k)

    @property
    def bucket_bytes(self) -> int:
        """Cap of one all-reduce, in bytes."""
        return int(self.bucket_cap_mb * 1024 * 1024)


def check_steps(k: object) -> None:
    """Raises `OptionError` unless k is an integer of at least 1."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise _bad("gradient_accumulation_steps", k, "an integer of at least 1")


def _one_of(name: str, value: object, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise _bad(name, value, "one of " + ", ".join(map(repr, legal)))


def _bad(name: str, value: object, wanted: str) -> OptionError:
    return OptionError(
        f"argument {name!r}",
        seen=f"{value!r} of type {type(value).__name__}",
        wanted=wanted,
        fix="pass a legal value, or leave it out for the default",
    )
