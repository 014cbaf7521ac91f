"""Exchanges of pieces that lie in memory: what becomes of the collectives, and that a fault is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

from gradsync_fx.comm.inplace_all_reduce import WAIT_SUMS
from gradsync_fx.comm.inplace_pieces import GATHER_PIECES, START_PIECES
from gradsync_fx.errors import VerificationError
from gradsync_fx.ir.journal import Journal
from gradsync_fx.ir.ops import ALL_GATHER, ALL_TO_ALL
from gradsync_fx.optimized_step import OptimizedStep
from gradsync_fx.options import Options
from gradsync_fx.passes import FOR_INDUCTOR, rewrite
from gradsync_fx.passes.check_lowered import check_lowered
from gradsync_fx.passes.rewritten import Rewritten
from tests.drive import plain_step


pytestmark = pytest.mark.captured
SLICE = torch.ops.aten.slice.Tensor


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
    )


def lowered(
    step: Callable[..., Any] = plain_step,
    *,
    beside: bool = True,
    halves: bool = False,
    model: nn.Module | None = None,
    **more: Any,
) -> Rewritten:
    """A boundary program of rank 0 of two. beside: whether ranks may share memory. halves: cut in two, or whole."""
    model = model or net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    options = Options.of(
        {
            "gradient_accumulation_steps": 2,
            "bucket_cap_mb": 1e-3,
            "shard_optimizer": True,
            "backend": "aot_eager",
            **more,
        }
    )
    planned = OptimizedStep(step, options, simulated=2)
    planned.capture(model, optimizer, torch.randn(4, 64), torch.randn(4, 3))
    (captured,) = planned._executor.catalogue.captures
    program = captured.programs.build(frozenset({0}))
    program.beside = beside
    mode = captured.facts.capture.fake_mode
    passes = [p for p in FOR_INDUCTOR if halves or p[1].__name__ != "cut_in_halves"]
    return rewrite(program, mode, Journal(), passes)


def found(rewritten: Rewritten, target: Any) -> list[Node]:
    return list(rewritten.main.graph.find_nodes(op="call_function", target=target))


def test_no_collective_is_left() -> None:
    """Each bucket is started and waited for; the last gather alone waits for the other ranks."""
    plain = lowered(beside=False)
    buckets = len(found(plain, ALL_TO_ALL))
    assert buckets > 1
    assert found(plain, START_PIECES) == found(plain, GATHER_PIECES) == []
    there = lowered()
    assert found(there, ALL_TO_ALL) == found(there, ALL_GATHER) == []
    assert len(found(there, START_PIECES)) == len(found(there, WAIT_SUMS)) == buckets
    assert [n.args[4] for n in found(there, GATHER_PIECES)] == [False] * (buckets - 1) + [True]
    names = {name for name, _ in net().named_parameters()}
    assert {*there.exchanged.sums} == {*there.exchanged.parameters} == names


def test_starts_are_in_the_first_half() -> None:
    halves = lowered(halves=True).halves
    assert halves is not None
    assert halves.second is not None

    def targets(module: Any) -> set[Any]:
        return {n.target for n in module.graph.nodes}

    assert START_PIECES in targets(halves.first)
    assert not {WAIT_SUMS, GATHER_PIECES} & targets(halves.first)
    assert {WAIT_SUMS, GATHER_PIECES} <= targets(halves.second)
    assert START_PIECES not in targets(halves.second)


def clips(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_norms_of_pieces_are_gathered_as_before() -> None:
    """One gather, of the partial norms: it stays a collective."""
    there = lowered(clips)
    assert len(found(there, ALL_GATHER)) == 1
    assert found(there, ALL_TO_ALL) == []
    assert found(there, START_PIECES)


def reads(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """The new value of the first parameter is in the result."""
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    first: Tensor = next(model.parameters()).detach().sum()
    return loss.detach() + first


def test_new_parameters_that_are_read_are_gathered_as_before() -> None:
    there = lowered(reads)
    assert len(found(there, ALL_GATHER)) == 1
    assert "0.weight" not in there.exchanged.parameters
    assert "2.weight" in there.exchanged.parameters
    assert "0.weight" in there.exchanged.sums


def test_float16_and_complex_numbers_are_sent() -> None:
    there = lowered(reduce_dtype=torch.float16)
    assert found(there, START_PIECES) == []
    assert found(there, GATHER_PIECES)


def test_channels_last() -> None:
    """A weight that does not lie in its own order is sent."""
    model = nn.Sequential(
        nn.Unflatten(1, (4, 4, 4)), nn.Conv2d(4, 16, 3), nn.Flatten(), nn.Linear(64, 3)
    ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    there = lowered(model=model, bucket_cap_mb=1e-6)
    assert "1.weight" not in there.exchanged.sums + there.exchanged.parameters
    assert "3.weight" in there.exchanged.sums


def without_a_wait(rewritten: Rewritten) -> None:
    rewritten.main.graph.erase_node(found(rewritten, WAIT_SUMS)[0])


def without_a_start(rewritten: Rewritten) -> None:
    rewritten.main.graph.erase_node(found(rewritten, START_PIECES)[0])
    rewritten.main.graph.erase_node(found(rewritten, WAIT_SUMS)[0])


def without_a_gather(rewritten: Rewritten) -> None:
    rewritten.main.graph.erase_node(found(rewritten, GATHER_PIECES)[0])


def without_an_end(rewritten: Rewritten) -> None:
    found(rewritten, GATHER_PIECES)[-1].update_arg(4, False)


def with_others_pieces(rewritten: Rewritten) -> None:
    """Read after the wait, where this rank has nothing that is reduced."""
    holder = found(rewritten, WAIT_SUMS)[0].args[0][0]  # type: ignore[index]
    (flat,) = [u for u in holder.users if u.target is torch.ops.aten.view.default]  # type: ignore[union-attr]
    (own,) = flat.users
    own.update_arg(2, own.args[2] + 16)
    own.update_arg(3, own.args[3] + 16)


def with_other_cuts(rewritten: Rewritten) -> None:
    start = found(rewritten, START_PIECES)[0]
    start.update_arg(3, [cut // 2 if cut else 0 for cut in start.args[3]])  # type: ignore[union-attr]


def of_another_rank(rewritten: Rewritten) -> None:
    found(rewritten, START_PIECES)[0].update_arg(4, 1)


def with_another_wire(rewritten: Rewritten) -> None:
    found(rewritten, START_PIECES)[0].update_arg(2, torch.bfloat16)


def with_gathers_exchanged(rewritten: Rewritten) -> None:
    """The two of the large layers: parameters and pieces of one shape."""
    one, other = (
        next(g for g in found(rewritten, GATHER_PIECES) if name in str(g.args[2]).split("\n"))
        for name in ("0.weight", "2.weight")
    )
    pieces = one.args[1], other.args[1]
    one.update_arg(1, pieces[1])
    other.update_arg(1, pieces[0])


def with_a_read_between(rewritten: Rewritten) -> None:
    """A parameter whose gather has begun is written."""
    gather = found(rewritten, GATHER_PIECES)[0]
    holder = gather.args[0][0]  # type: ignore[index]
    with rewritten.main.graph.inserting_after(gather):
        rewritten.main.graph.call_function(torch.ops.aten.copy_.default, (holder, holder))


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (without_a_wait, "under way"),
        (without_a_start, "ends as"),
        (without_a_gather, "parameter"),
        (without_an_end, "the last of them never"),
        (with_others_pieces, "ends as"),
        (with_other_cuts, "boundary program"),
        (of_another_rank, "ends as"),
        (with_another_wire, "ends as"),
        (with_gathers_exchanged, "boundary program"),
        (with_a_read_between, "before it has arrived"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_faults_are_found(fault: Callable[[Rewritten], None], seen: str) -> None:
    rewritten = lowered()
    check_lowered(rewritten)
    fault(rewritten)
    with pytest.raises(VerificationError, match=seen):
        check_lowered(rewritten)
