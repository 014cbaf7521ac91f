"""Two gloo ranks: replicas bitwise equal, equal to eager DDP and to the joined batch, one reduction per bucket."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync_fx
from tests.loops import Batch, batches, largest_difference, mlp, optimized, plain_step
from tests.workers import Ranks


pytestmark = pytest.mark.gloo


def equal_across_ranks(model: nn.Module) -> bool:
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    both = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(both, flat)
    return torch.equal(both[0], both[1])


@contextlib.contextmanager
def reductions_that_ran() -> Any:
    """Counts gloo's all-reduces of floating tensors, from torch's profiler: what really ran."""
    counts: dict[str, int] = {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        yield counts
    counts["all_reduce"] = sum(
        e.count for e in profiler.key_averages() if e.key in ("gloo:all_reduce", "gloo:allreduce")
    )


def eager_ddp(model: DistributedDataParallel, optimizer: Any, data: list[Batch], k: int) -> None:
    for i, (x, y) in enumerate(data):
        boundary = (i + 1) % k == 0
        context: Any = contextlib.nullcontext() if boundary else model.no_sync()
        with context:
            (F.mse_loss(model(x), y) / k).backward()
        if boundary:
            optimizer.step()
            optimizer.zero_grad()


def windows(rank: int, k: int, wrapped: bool, adamw: bool, backend: str) -> None:
    torch.manual_seed(0)
    base = mlp()
    plain = copy.deepcopy(base)
    model = DistributedDataParallel(base) if wrapped else base
    eager = DistributedDataParallel(copy.deepcopy(plain))
    count = 20 if adamw else 5
    make = (lambda p: torch.optim.AdamW(p, 1e-3)) if adamw else (lambda p: torch.optim.SGD(p, 0.1))
    optimizer, other, third = (
        make(model.parameters()),
        make(eager.parameters()),
        make(plain.parameters()),
    )
    mine = batches(count * k, seed=10 + rank)
    everyone = [batches(count * k, seed=10), batches(count * k, seed=11)]
    run = optimized(plain_step, k, backend=backend)
    for w in range(count):
        part = slice(w * k, (w + 1) * k)
        watch: Any = reductions_that_ran() if w in (0, 1) else contextlib.nullcontext({})
        with watch as counts:
            for b in mine[part]:
                run(model, optimizer, *b)
        if w in (0, 1):
            assert counts["all_reduce"] == 1, counts
        eager_ddp(eager, other, mine[part], k)
        rows = [b for rank_data in everyone for b in rank_data[part]]
        plain_step(plain, third, torch.cat([x for x, _ in rows]), torch.cat([y for _, y in rows]))
        assert equal_across_ranks(base)
        tolerance = 1e-5 if adamw else 1e-6
        assert largest_difference(base, eager.module) < tolerance
        assert largest_difference(base, plain) < tolerance
    assert run.compile_count == (1 if k == 1 else 2)
    report = run.report()
    assert (report.collectives_before, report.collectives_after, report.world_size) == (k, 1, 2)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_ddp_with_sgd(ranks: Ranks, k: int) -> None:
    ranks(windows, k, True, False, "aot_eager")


@pytest.mark.parametrize("wrapped", [True, False])
def test_twenty_updates_with_adamw(ranks: Ranks, wrapped: bool) -> None:
    ranks(windows, 3, wrapped, True, "aot_eager")


@pytest.mark.inductor
def test_inductor(ranks: Ranks) -> None:
    ranks(windows, 2, True, True, "inductor")


def buckets(rank: int) -> None:
    model = DistributedDataParallel(mlp(), static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = optimized(plain_step, 2, bucket_cap_mb=0.0003)
    for b in batches(2, seed=rank):
        with reductions_that_ran() as counts:
            run(model, optimizer, *b)
    report = run.report()
    assert counts["all_reduce"] == report.collectives_after == len(report.collectives) > 1
    assert {n for c in report.collectives for n in c.parameters} == dict(
        model.module.named_parameters()
    ).keys()
    assert any("static_graph" in text for text in report.warnings)
    assert equal_across_ranks(model)


def test_buckets_and_static_graph(ranks: Ranks) -> None:
    ranks(buckets)


def batch_statistics(rank: int, mode: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)
        )

    torch.manual_seed(0)
    base = make()
    eager = DistributedDataParallel(copy.deepcopy(base), broadcast_buffers=mode != "never")
    model = DistributedDataParallel(base)
    optimizer, other = (
        torch.optim.SGD(model.parameters(), 0.05),
        torch.optim.SGD(eager.parameters(), 0.05),
    )
    data = batches(9, rows=6, seed=rank)
    run = optimized(plain_step, 3, broadcast_buffers=mode)
    for w in range(3):
        for b in data[3 * w : 3 * w + 3]:
            run(model, optimizer, *b)
        eager_ddp(eager, other, data[3 * w : 3 * w + 3], 3)
        assert largest_difference(base, eager.module) < 1e-6
        assert equal_across_ranks(base)


@pytest.mark.parametrize("mode", ["window_start", "never"])
def test_batch_statistics_equal_eager_ddp(ranks: Ranks, mode: str) -> None:
    ranks(batch_statistics, mode)


def by_hand(rank: int, how: str) -> None:
    torch.manual_seed(0)
    model, plain = mlp(), mlp()
    plain.load_state_dict(model.state_dict())
    optimizer, other = (
        torch.optim.SGD(model.parameters(), 0.1),
        torch.optim.SGD(plain.parameters(), 0.1),
    )

    def step(x: Tensor, y: Tensor) -> None:
        F.mse_loss(model(x), y).backward()
        if how == "each":
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= 2
        elif how == "average":
            for p in model.parameters():
                p.grad = (
                    torch.distributed._functional_collectives.all_reduce(
                        p.grad, "sum", dist.group.WORLD
                    )
                    / 2
                )
        else:
            flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
            dist.all_reduce(flat)
            flat /= 2
            start = 0
            for p in model.parameters():
                p.grad.copy_(flat[start : start + p.numel()].view_as(p))
                start += p.numel()
        optimizer.step()
        optimizer.zero_grad()

    run = optimized(step, 3)
    data = [batches(6, seed=r) for r in range(2)]
    for w in range(2):
        part = slice(3 * w, 3 * w + 3)
        with reductions_that_ran() as counts:
            for b in data[rank][part]:
                run(*b)
        assert counts["all_reduce"] == 1, counts
        rows = [b for one in data for b in one[part]]
        plain_step(plain, other, torch.cat([x for x, _ in rows]), torch.cat([y for _, y in rows]))
        assert largest_difference(model, plain) < 1e-6
        assert equal_across_ranks(model)


@pytest.mark.parametrize("how", ["each", "average", "flat"])
def test_reductions_written_by_hand_are_deferred(ranks: Ranks, how: str) -> None:
    ranks(by_hand, how)


def metric_stays(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = plain_step(model, optimizer, x, y)
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        return shown / 2

    run = optimized(step, 2)
    for b in batches(4, seed=rank):
        value = run(*b)
        both = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(both, value)
        assert torch.equal(both[0], both[1])
    assert len(run.report().kept) == 1


def test_a_metric_is_reduced_in_every_micro_step(ranks: Ranks) -> None:
    ranks(metric_stays)


def uneven(rank: int) -> None:
    w = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([w], lr=1.0)

    def step(x: Tensor) -> None:
        (w * x).backward()
        optimizer.step()
        optimizer.zero_grad()

    run = optimized(step, 2)
    updates = []
    for x in [(1.0, 2.0, 3.0, 4.0, 5.0), (10.0, 20.0, 30.0)][rank]:
        run(torch.tensor(x))
    run.flush(on_update=lambda: updates.append(run.optimizer_step))
    # windows: (1, 2 | 10, 20), then (3, 4 | 30), then (5 | nothing)
    expected = -(torch.tensor(33.0) / 4) - torch.tensor(37.0) / 3 - 5.0
    torch.testing.assert_close(w.detach(), expected)
    assert run.optimizer_step == 3
    assert run.pending == 0


def test_uneven_data_neither_hangs_nor_loses_a_term(ranks: Ranks) -> None:
    ranks(uneven)


def disagree(rank: int) -> None:
    w = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([w], lr=1.0)

    def step(x: Tensor) -> None:
        (w * x).backward()
        optimizer.step()
        optimizer.zero_grad()

    run = optimized(step, 2 + rank)
    for _ in range(1 + rank):
        run(torch.ones(()))
    expected = "rank 1 is at micro-step 3/3 while rank 0 is at micro-step 2/2"
    with pytest.raises(gradsync_fx.RanksDisagreeError, match=expected):
        run(torch.ones(()))
    assert w.item() == 0


def test_ranks_that_disagree_raise_on_both(ranks: Ranks) -> None:
    ranks(disagree)


def unequal_copies(rank: int) -> None:
    torch.manual_seed(rank)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = optimized(plain_step, 2)
    with pytest.raises(gradsync_fx.ReplicaMismatchError, match=r"'0\.weight'"):
        run(model, optimizer, *batches(1)[0])


def test_copies_that_start_unequal_are_named(ranks: Ranks) -> None:
    ranks(unequal_copies)
