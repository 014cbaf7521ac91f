"""`explain`: the report of a step for any number of ranks, without running it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist

from gradsync_fx._torch import FakeStore
from gradsync_fx.capture.meta_tensors import stand_ins
from gradsync_fx.comm.liveness import in_job
from gradsync_fx.errors import OptionError
from gradsync_fx.inspection.costs import Hardware, find_hardware
from gradsync_fx.inspection.report import Report
from gradsync_fx.lowering.target.apart import apart
from gradsync_fx.lowering.target.cards import Card, check_toolchain, find_card
from gradsync_fx.optimized_step import OptimizedStep
from gradsync_fx.options import Options


def explain(
    train_step: Callable[..., Any],
    *args: Any,
    world_size: int | None = None,
    hardware: str | Hardware | None = None,
    target: str | None = None,
    **kwargs: Any,
) -> Report:
    """The report of a step that is captured with these arguments, and not run.

    Keyword arguments that `optimize` knows are options of it, all others go to the step. world_size: ranks to plan for;
    more than the job has are simulated, without a launch. hardware: a preset's name, or a `Hardware`, for the estimate;
    by default "laptop", or the preset of the target's card. Parameters and data may lie on the meta device: nothing is
    allocated then.

    target: "cuda:sm_80", "cuda:sm_90" or "cuda:sm_100", a card that need not be there. The step is captured with all
    its tensors on it, in a copy of this process, and `report.code` has its programs as code for that card: kernels
    with Triton's source and your lines, launches, registers, what a CUDA graph can record, estimated times. It takes
    Linux, triton and g++.

    Raises what `optimize` and the first call of the step raise, `OptionError` for a world size below 1 and for an
    unknown target, and `ToolchainError` where a compiler for the target is missing. Sizes in the report are in bytes,
    times in seconds.

    >>> report = gradsync_fx.explain(
    ...     train_step, model, optimizer, x, y, gradient_accumulation_steps=4, world_size=8
    ... )
    >>> report.collectives_before, report.collectives_after
    (4, 1)
    """
    card = find_card(target) if target is not None else None
    machine = find_hardware(hardware or (card.hardware if card else "laptop"))
    if world_size is not None and (isinstance(world_size, bool) or world_size < 1):
        raise OptionError(
            "argument 'world_size'",
            seen=repr(world_size),
            wanted="a number of ranks, at least 1",
            fix="leave it out for the ranks of this job",
        )
    known = {f.name for f in fields(Options)}
    options = Options.of({name: v for name, v in kwargs.items() if name in known})
    rest = {name: v for name, v in kwargs.items() if name not in known}
    plain = inspect.unwrap(train_step) if isinstance(train_step, OptimizedStep) else train_step
    _, here = in_job(options.process_group) or (0, 1)
    ranks = world_size or here
    if card is not None:
        return _on_target(card, plain, args, rest, options, ranks, machine)
    with captured(plain, args, rest, options, ranks) as step:
        return step.report(machine)


@contextmanager
def captured(
    train_step: Callable[..., Any],
    args: Any,
    kwargs: Any,
    options: Options,
    ranks: int,
    device: torch.device | None = None,
) -> Iterator[OptimizedStep[..., Any]]:
    """A step that was captured with these arguments for so many ranks, none of which need be there. device: to have all
    its tensors on."""
    with (
        _ranks_at_hand(ranks),
        stand_ins(train_step, args, kwargs, device) as (given, named),
    ):
        step = OptimizedStep(train_step, options, simulated=ranks)
        step.capture(*given, **named)
        yield step


def _on_target(
    card: Card,
    step: Callable[..., Any],
    args: Any,
    kwargs: Any,
    options: Options,
    ranks: int,
    machine: Hardware,
) -> Report:
    """In a copy of this process: torch and Triton keep more about a device than could be put back."""
    if options.backend != "inductor":
        raise OptionError(
            "argument 'target'",
            seen=f"backend={options.backend!r}",
            wanted="code for a card, which only Inductor makes",
            fix="leave the backend out",
        )
    check_toolchain(card.target)

    def made() -> Report:
        # Triton may be missing where no target is named.
        from gradsync_fx.inspection.on_target import saved_on_target, target_code
        from gradsync_fx.lowering.target.absent import absent

        device = torch.device("cuda", 0)
        with (
            absent(card) as binaries,
            captured(step, args, kwargs, options, ranks, device) as found,
        ):
            report, captures = found.report(machine), found._executor.catalogue.captures
            if not captures:  # it runs eagerly
                return report
            code = target_code(captures, options, card, machine, binaries)
            once = report.once and saved_on_target(
                captures, report.once, code, card, machine, binaries
            )
            return replace(report, code=code, once=once)

    return apart(made, f"target {card.target!r}")


@contextmanager
def _ranks_at_hand(ranks: int) -> Iterator[None]:
    """A default group of that size, of torch's fake kind, where the job has none: for collectives in the step."""
    if ranks < 2 or not dist.is_available() or dist.is_initialized():
        yield
        return
    hook = sys.excepthook  # torch puts its own in front, for the ranks of a real job
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
