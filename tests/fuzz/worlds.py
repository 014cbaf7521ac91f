"""Random steps: effects of the table (tests/effects.py) in random company and order, under random optimizers.

A case is played with gradsync_fx and in plain eager PyTorch, on one rank or as one of two, captured or eagerly. Right,
or refused by name: a `GradSyncError`. What became of the update is told: compiled, opaque, eager or refused.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st

import gradsync_fx
from gradsync_fx.capture.effects import Rule
from tests.eagerly import eagerly
from tests.effects import TRIED, Plain, Tried, World, step_of
from tests.fuzz.optimizers import HABITS, Generated
from tests.reference import regression


BY_NAME = {tried.name: tried for tried in TRIED}
# Inductor draws random numbers by another scheme: other masks than eager's.
SEEDED = ("random numbers of forward", "noise in gradients")
# A gradient of an input that the step changes is that of another value; `world.optimizer` is the case's own.
LEFT_OUT = ("gradient of an input", "update that no trace sees", "update")
ROWS = tuple(t.name for t in TRIED if t.effect.rule is not Rule.REFUSED and t.name not in LEFT_OUT)


@dataclass(frozen=True)
class Case:
    """rows: in their order within each place of the step. windows: calls of each, and what ends it ("": the last)."""

    rows: tuple[str, ...]
    habits: tuple[str, ...] | str
    k: int
    windows: tuple[tuple[int, str], ...]
    way: str = "captured"
    backend: str = "aot_eager"
    ranks: int = 1


@st.composite
def worlds(draw: Any, ranks: int = 1, backend: str = "aot_eager") -> Case:
    """A case that its user may write."""
    allowed = [r for r in ROWS if backend == "aot_eager" or r not in SEEDED]
    rows = draw(st.lists(st.sampled_from(allowed), unique=True, max_size=6))
    losses = [r for r in rows if BY_NAME[r].loss is not TRIED[0].loss]
    ways = [r for r in rows if BY_NAME[r].backward is not TRIED[0].backward]
    rows = [r for r in rows if r not in (*losses[1:], *ways[1:])]
    k = draw(st.integers(1, 4))
    end = st.sampled_from(("", "", "", "skip", "flush"))
    windows = []
    for _ in range(draw(st.integers(2, 4))):
        how = draw(end) if k > 1 else ""
        calls = {"": k, "skip": k - 1}.get(how, draw(st.integers(1, max(1, k - 1))))
        windows.append((calls, how))
    windows[0] = (k, "")  # before it nothing is captured, and nothing can be closed
    own = st.lists(st.sampled_from(HABITS), unique=True, max_size=5).map(tuple)
    return Case(
        rows=tuple(rows),
        habits=draw(st.one_of(own, own, st.sampled_from(("SGD", "AdamW", "Adafactor", "RMSprop")))),
        k=k,
        windows=tuple(windows),
        way=draw(st.sampled_from(("captured", "captured", "captured", "eager"))),
        backend=backend,
        ranks=ranks,
    )


def world_of(case: Case) -> World:
    world = World()
    params = world.optimizer.param_groups[0]["params"]
    if isinstance(case.habits, tuple):
        world.optimizer = Generated(world.net, params, case.habits)
    elif case.habits != "SGD":
        world.optimizer = getattr(torch.optim, case.habits)(params, lr=0.01)
    for row in _rows(case):
        row.prepare(world)
    return world


def _rows(case: Case) -> list[Tried]:
    return [BY_NAME[name] for name in case.rows]


def play(rank: int, case: Case) -> tuple[str, list[torch.Tensor]]:
    """What became of the step, and its parameters at the end. Raises `AssertionError` where it is not eager's."""
    rows = _rows(case)
    ours, theirs = world_of(case), world_of(case)
    ranks = dist.get_world_size() if case.ranks > 1 else 1
    batches = [b for (b,) in regression(sum(n for n, _ in case.windows), 1, seed=rank)]
    copies = [(x.clone(), y.clone()) for x, y in batches]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a scheduler of an optimizer that another row replaced
        wanted = _wanted(Plain(theirs, rows, ranks), case, copies)
    seen = []
    with eagerly() if case.way == "eager" else nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = gradsync_fx.optimize(
            step_of(rows),
            gradient_accumulation_steps=case.k,
            broadcast_buffers="never",
            backend=case.backend,
            on_unsupported="eager",
        )
        torch.manual_seed(3)
        try:
            for calls, end in case.windows:
                for x, y in (batches.pop(0) for _ in range(calls)):
                    loss, _ = step(ours, ours.optimizer, x, y)
                    seen.append(loss.detach())
                if end:
                    getattr(step, end)()
                seen.append(ours.observed())
        except gradsync_fx.GradSyncError as error:
            step = None
            return f"refused: {error.culprit.split(',')[0].split(' at ')[0][:40]}", []
    tolerance = 1e-5 if case.backend == "aot_eager" else 1e-4
    for i, (a, b) in enumerate(zip(seen, wanted, strict=True)):
        say = f"observation {i}: {{}}".format
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance, equal_nan=True, msg=say)
    text = "".join(step.report().warnings)
    became = "eager" if "eagerly" in text else "opaque" if "runs as it is" in text else "compiled"
    return became, [p.detach().clone() for p in ours.net.parameters() if p.requires_grad]


def _wanted(plain: Plain, case: Case, batches: list[Any]) -> list[Any]:
    found: list[Any] = []
    torch.manual_seed(3)
    for calls, _ in case.windows:
        for x, y in (batches.pop(0) for _ in range(calls)):
            found.append(plain.call(x, y))
        plain.update()
        found.append(plain.world.observed())
    return found


def same(found: list[tuple[str, list[torch.Tensor]]]) -> str:
    """What became of a case. Raises `AssertionError` where ranks differ: in what they did, or in their parameters."""
    first, *others = found
    for other in others:
        assert other[0] == first[0], f"{first[0]} on one rank, {other[0]} on another"
        for p, q in zip(first[1], other[1], strict=True):
            assert torch.equal(p, q), "parameters differ between ranks"
    return first[0]
