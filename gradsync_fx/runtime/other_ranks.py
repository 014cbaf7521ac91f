"""An open window that was saved by another number of ranks: each of today's ranks takes over some of the old ones.

old ranks  0 1 2 3        sums, weights and counts of terms are added up: a mean over all terms of the window stays
today      0 1 0 1        exactly that, and the micro-steps that are still to come are made by today's ranks

Ranks that take over none begin with nothing summed. Where sums of ranks do not add up to the window's, it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from gradsync_fx.errors import StateError
from gradsync_fx.options import Options
from gradsync_fx.wording import number_of


_RANK = re.compile(r"rank\d+")


def ranks_in(state: Iterable[str]) -> list[str]:
    """The keys of a state under which ranks have what is their own."""
    return [key for key in state if _RANK.fullmatch(key)]


def taken_over(
    given: dict[str, Any], rank: int, world: int, options: Options, ignored: Collection[str]
) -> dict[str, Any]:
    """The state as if this many ranks had saved it, with what is this rank's. As it is, where nothing is pending or the
    ranks are as many.

    given: a state with entries of their kinds. ignored: parameters that are not reduced. Raises `StateError` where the
    ranks of the state are not all there, and where their sums cannot be put together.
    """
    old, names = given["world_size"], ranks_in(given)
    pending = max((max(given[n]["pending"]) for n in names), default=0)
    if old == world or not pending:
        return given
    _refuse(given, old, world, pending, options, ignored)
    missing = [n for n in range(old) if f"rank{n}" not in given]
    if missing:
        raise StateError(
            f"an open window of {number_of(old, 'rank')}",
            seen=f"this run has {world}, and ranks {missing} are not in what is loaded",
            wanted="what every rank has summed: this run's ranks share it out",
            fix="load it with torch.distributed.checkpoint and planner=gradsync_fx.WindowLoadPlanner(), or give "
            "step.load the files of all ranks, in order; or save at a boundary",
        )
    everyone = [given[f"rank{n}"] for n in range(old)]
    mine = [everyone[n] for n in range(rank, old, world)]
    shared = {key: value for key, value in given.items() if key not in names}
    own = _added(mine, everyone[rank if rank < old else 0])
    return {**shared, "world_size": world, f"rank{rank}": own}


def _added(mine: Sequence[dict[str, Any]], alike: dict[str, Any]) -> dict[str, Any]:
    """What some old ranks have together. alike: one whose counters and buffers are taken."""
    sums = {name: torch.zeros_like(t) for name, t in alike["accumulators"].items()}
    in_window = dict.fromkeys(alike["in_window"], 0)
    weights, summed = torch.zeros_like(alike["weights"]), [0] * len(alike["summed"])
    for one in mine:
        weights = weights + one["weights"]
        summed = [a + b for a, b in zip(summed, one["summed"], strict=True)]
        for name, term in one["accumulators"].items():
            sums[name] = sums[name] + term if name in sums else term
            in_window[name] = max(in_window.get(name, 0), one["in_window"][name])
    return {
        **alike,
        "accumulators": sums,
        "in_window": in_window,
        "weights": weights,
        "summed": summed,
    }


def _refuse(
    given: dict[str, Any],
    old: int,
    world: int,
    pending: int,
    options: Options,
    ignored: Collection[str],
) -> None:
    ranks = [given[name] for name in ranks_in(given)]
    apart = len({str(one["pending"]) for one in ranks}) > 1
    own = sorted({n for one in ranks for n in one["accumulators"] if n in ignored})
    if options.sync_each_batch:
        why = "with sync_each_batch=True each rank holds the sum of all"
    elif options.reduction == "sum":
        why = 'reduction="sum" averages over the ranks, and they were not as many at its beginning'
    elif own:
        why = f"{own[0]!r} is not reduced: each rank's sum is its own"
    elif apart:
        why = "the old ranks stand at different micro-steps"
    else:
        return
    raise StateError(
        "world_size",
        seen=f"{old} in the state, {world} here, with {number_of(pending, 'pending micro-step')}; {why}",
        wanted="equal values while a window is open",
        fix=f"resume with {number_of(old, 'rank')}, or save at a boundary",
    )
