"""The pipelines, before lowering and in it, in the order in which they run; nothing else decides what a program is.

step -> MICRO_STEP or TAIL -> program, verified -> FOR_INDUCTOR or FOR_OTHERS -> what a compiler is handed, proved

Each file beside this one is a rewrite of graphs, before lowering or in it, or a proof that a rewrite changed no number
(verify.py, check_lowered.py).

May import: ir, comm, optim, planning.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from gradsync_fx.gc_off import gc_off
from gradsync_fx.ir.builder import Draft
from gradsync_fx.ir.journal import Journal
from gradsync_fx.ir.program import Program
from gradsync_fx.passes.accumulate import (
    accumulate_gradients,
    drop_boundary_effects,
    give_host_values,
    give_late_host_values,
    join_partial_sums,
    leave_parameters,
)
from gradsync_fx.passes.base import LoweringPass, Pass, check_graphs, run_passes
from gradsync_fx.passes.blocks import outline_blocks
from gradsync_fx.passes.check_lowered import check_lowered
from gradsync_fx.passes.device_numbers import numbers_on_device
from gradsync_fx.passes.fuse import add_products, norms_as_sums, numbers_as_tensors, write_early
from gradsync_fx.passes.halves import cut_in_halves, mark_update_writes
from gradsync_fx.passes.hide_gathers import arrive_before_use, hide_gathers
from gradsync_fx.passes.inline import inline_bodies
from gradsync_fx.passes.invariants import (
    fold_sums,
    hold_values,
    read_invariants,
    sum_early,
    work_on_sums,
)
from gradsync_fx.passes.join_updates import join_updates
from gradsync_fx.passes.mask import mask_boundary
from gradsync_fx.passes.norms import norms_of_sums
from gradsync_fx.passes.overlap import reduce_in_place, wait_late
from gradsync_fx.passes.pieces_in_place import exchange_in_place
from gradsync_fx.passes.pointwise_updates import cut_updates
from gradsync_fx.passes.reduce import (
    forget_micro_step,
    reduce_sums,
    reduce_window,
    reset_accumulators,
)
from gradsync_fx.passes.remain import keep_collectives, keep_late_collectives
from gradsync_fx.passes.rewritten import Rewritten
from gradsync_fx.passes.spread_waits import spread_waits
from gradsync_fx.passes.update import inline_updates
from gradsync_fx.passes.verify import verify
from gradsync_fx.passes.verify_once import prove_once, verify_once
from gradsync_fx.passes.weigh import weigh_terms
from gradsync_fx.planning.invariants import summing_early
from gradsync_fx.planning.kept import NOTHING
from gradsync_fx.planning.plan import Plan


# A micro-step: the accumulate program when nothing closes, the boundary program when everything does. And the tail, an
# update without a micro-step.
MICRO_STEP: list[Pass] = [
    keep_collectives,
    join_partial_sums,
    read_invariants,
    sum_early,
    work_on_sums,
    weigh_terms,
    accumulate_gradients,
    leave_parameters,
    drop_boundary_effects,
    reduce_window,
    give_host_values,
    inline_updates,
    mask_boundary,
    reset_accumulators,
    mark_update_writes,
]
TAIL: list[Pass] = [
    keep_late_collectives,
    join_partial_sums,
    forget_micro_step,
    leave_parameters,
    reduce_sums,
    give_late_host_values,
    inline_updates,
    reset_accumulators,
    mark_update_writes,
]
# What a window computes once: when it opens, and of early sums when its gradients are wanted.
PROLOGUE: list[Pass] = [hold_values]
FOLD: list[Pass] = [join_partial_sums, fold_sums]

# On the way to a compiler: each pass, and the name of the optimization that it is, by which `without` leaves it out.
ALWAYS = ""
FOR_INDUCTOR: list[tuple[str, LoweringPass]] = [
    ("overlap", wait_late),
    ("in_place", reduce_in_place),
    ("in_place", exchange_in_place),
    ("updates", cut_updates),
    ("updates", join_updates),
    (ALWAYS, inline_bodies),
    (ALWAYS, norms_of_sums),
    (ALWAYS, norms_as_sums),
    ("products", add_products),
    (ALWAYS, write_early),
    (ALWAYS, numbers_as_tensors),
    (ALWAYS, numbers_on_device),
    ("overlap", spread_waits),
    (ALWAYS, arrive_before_use),
    (ALWAYS, cut_in_halves),
    (ALWAYS, hide_gathers),
    ("blocks", outline_blocks),
]
FOR_OTHERS: list[tuple[str, LoweringPass]] = [
    (ALWAYS, inline_bodies),
    (ALWAYS, cut_in_halves),
]
# A program that runs as it is, of which only the halves are wanted.
AS_IT_IS: list[tuple[str, LoweringPass]] = [
    (ALWAYS, cut_in_halves),
]


def build(name: str, plan: Plan, fake_mode: object, journal: Journal, *, tail: bool) -> Program:
    """One program of a step, verified."""
    with gc_off():
        passes = TAIL if tail else MICRO_STEP
        early = plan if plan.closing else summing_early(plan)
        program = _draft(name, early, fake_mode, journal, passes).finish()
        program.closes, program.voted = bool(plan.closing), plan.voted
        program.arriving, program.beside = plan.arriving, plan.beside
        verify(program, early, tail=tail)
        if plan.invariants.held:
            _prove_once(program, plan, fake_mode)
    return program


def _draft(name: str, plan: Plan, fake_mode: object, journal: Journal, passes: list[Pass]) -> Draft:
    start = partial(Draft.copy_of, name, plan.step, fake_mode)
    return run_passes(passes, journal, start, plan, proof=check_graphs)


def _prove_once(program: Program, plan: Plan, fake_mode: object) -> None:
    """Beside the program without anything held, and those that hold it; none of which is compiled for that."""
    aside, early = Journal(), bool(plan.invariants.deferred and not plan.closing)
    plain = replace(plan, invariants=NOTHING)
    meant = _draft(program.name, plain, fake_mode, aside, MICRO_STEP).finish()
    prologue = build_for_window("prologue", plan, fake_mode, aside, PROLOGUE)
    fold = build_for_window("fold", plan, fake_mode, aside, FOLD) if early else None
    prove_once(program, meant, prologue, fold, plan)


def build_for_window(
    name: str, plan: Plan, fake_mode: object, journal: Journal, passes: list[Pass]
) -> Program:
    """A prologue or a fold, verified."""
    with gc_off():
        program = _draft(name, plan, fake_mode, journal, passes).finish()
        verify_once(program, plan)
    return program


def rewrite(
    program: Program,
    fake_mode: object,
    journal: Journal,
    passes: list[tuple[str, LoweringPass]],
    without: Collection[str] = (),
) -> Rewritten:
    """What a compiler is handed for a program, proved to be the program. without: disabled optimizations."""
    with gc_off():
        start = partial(Rewritten.copy_of, program, fake_mode)
        enabled = [one for name, one in passes if name not in without]
        return run_passes(enabled, journal, start, proof=check_lowered)
