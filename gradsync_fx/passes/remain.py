"""Collectives of the step that reduce no gradient stay in its programs, whether this rank uses their results or not.

metric -> all_reduce -> wait -> (nobody)        stays, in the accumulate and the boundary program
norm of the gradients -> all_reduce -> wait     stays in the boundary and in the tail: it waits for the window's own

Another rank may print what this one throws away: without them the ranks would wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from gradsync_fx.ir import ops
from gradsync_fx.ir.builder import Draft
from gradsync_fx.planning.plan import Plan


def keep_collectives(draft: Draft, plan: Plan) -> None:
    """In a micro-step: all of them but those that wait for a part of the window that stays open."""
    for node, sources in plan.regions.collectives.items():
        if not sources or not plan.is_open(sources):
            draft.kept += _with_waits(draft.of[node])


def keep_late_collectives(draft: Draft, plan: Plan) -> None:
    """In a tail: those of gradients and updates alone. Where no micro-step runs, nothing of the forward does."""
    for node in plan.regions.tail_collectives:
        if not plan.is_open(plan.regions.collectives[node]):
            draft.kept += _with_waits(draft.of[node])


def _with_waits(started: Node) -> Iterator[Node]:
    """A collective, and the waits for it: directly, or item by item where it has several results."""
    yield started
    for user in started.users:
        if user.target is ops.WAIT:
            yield user
        else:
            yield from (waited for waited in user.users if waited.target is ops.WAIT)
