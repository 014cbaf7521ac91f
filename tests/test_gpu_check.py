"""The check of a GPU as far as it goes without one: what it compares, what it makes of failures, what it starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.scenarios import cards
from tests.workers import Ranks


BENCHMARKS = Path(__file__).resolve().parent.parent / "examples" / "benchmarks"
CPU = torch.device("cpu")


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_checks  # type: ignore[import-not-found]

    return gpu_checks


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import verdicts  # type: ignore[import-not-found]

    return verdicts


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_check  # type: ignore[import-not-found]

    return gpu_check


def test_windows_on_the_cpu_are_those_of_the_eager_loop(checks: ModuleType) -> None:
    """What is compared on a card, here with the CPU in its place: all cases, whole and short windows."""
    lines = list(checks.compared(CPU, backend="aot_eager"))
    assert len(lines) == 6
    assert all(line.ok for line in lines), list(map(str, lines))
    assert all(line.figures["off by"] < 1e-5 for line in lines)


@pytest.mark.parametrize("fault", ["clip", "weights", "skips", "scheduler"])
def test_a_run_that_leaves_something_out_is_found(
    fault: str, checks: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = checks.Case("tiny", clip=True, weights=True, skips=True)
    wanted = checks.eager(whole, CPU)
    if fault == "scheduler":
        idle = torch.optim.lr_scheduler.ExponentialLR
        monkeypatch.setattr(idle, "step", lambda self: None)
        found = checks.eager(whole, CPU)
    else:
        found = checks.eager(replace(whole, **{fault: False}), CPU)
    line = checks.at_most("", checks.distance(found, wanted, checks.start_of(whole)), 1e-2)
    assert line.ok is False, str(line)


def test_what_lines_say(verdicts: ModuleType) -> None:
    assert str(verdicts.at_most("values", 1e-6, 1e-2)) == "OK   values: off by 1e-06, at most 0.01"
    assert not verdicts.at_most("values", float("nan"), 1e-2).ok
    assert verdicts.equal("kernels", 3, 3).ok
    assert str(verdicts.equal("kernels", 4, 3)) == "FAIL kernels: found 4, wanted 3"
    assert verdicts.near("peak", 95.0, 100.0, 0.1).ok
    assert not verdicts.near("peak", 80.0, 100.0, 0.1).ok
    assert not verdicts.near("peak", 80.0, 0.0, 0.1).ok
    assert str(verdicts.Line("times", None, {"ms": 1.23456})) == "     times: ms 1.23"


def test_distance_is_a_share_of_the_way(verdicts: ModuleType) -> None:
    start, wanted = [torch.zeros(2)], [torch.tensor([3.0, 4.0])]
    assert verdicts.distance(wanted, wanted, start) == 0
    assert verdicts.distance([torch.tensor([3.0, 4.5])], wanted, start) == pytest.approx(0.1)
    nowhere = verdicts.distance(start, start, start)
    assert nowhere != nowhere  # nothing moved: no check of anything


def test_a_check_that_breaks_off_is_a_line_of_its_own(verdicts: ModuleType) -> None:
    def broken() -> Iterator[Any]:
        yield verdicts.equal("before", 1, 1)
        raise RuntimeError("CUDA error:\nan illegal memory access")

    lines: list[str] = []
    assert not verdicts.told("launches", broken, lines.append)
    assert lines[0] == "OK   launches, before: found 1, wanted 1"
    assert lines[1].startswith("FAIL launches, broken off: RuntimeError at ")
    assert lines[1].endswith("CUDA error: an illegal memory access")


def test_events_of_a_profile_by_kind(checks: ModuleType) -> None:
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    seen = [
        ("triton_poi_fused_add_0", cuda, False),
        ("triton_red_fused_1", cuda, False),
        ("cutlass_80_simt_sgemm_128x64", cuda, False),
        ("Memcpy HtoD (Pinned -> Device)", cuda, False),
        ("Memset (Device)", cuda, False),
        ("gradsync_fx train_step: boundary", cuda, True),
        ("cudaLaunchKernel", cpu, False),
    ]
    events = [
        SimpleNamespace(name=name, device_type=kind, is_user_annotation=named)
        for name, kind, named in seen
    ]
    found = checks.kinds_of(checks.on_card(events))
    assert found == {"triton": 2, "library": 1, "copy": 2}


@pytest.mark.parametrize(
    ("script", "failed", "why"),
    [
        ("print('OK   a: 1'); print('noise')", 0, ""),
        ("print('OK   a: 1'); print('FAIL b'); raise SystemExit(1)", 1, ""),
        ("print('OK   a: 1'); import os; os.abort()", 0, "ended with -6"),
        ("raise SystemExit('no NCCL')", 0, "ended with 1: no NCCL"),
    ],
)
def test_processes_that_end_badly(
    script: str, failed: int, why: str, gpu_check: ModuleType
) -> None:
    lines, found = gpu_check.run([sys.executable, "-c", script], {})
    assert sum(line.startswith("FAIL") for line in lines) == failed
    assert found.startswith(why)
    assert bool(found) == bool(why)
    assert "noise" not in lines


def test_a_process_that_does_not_end(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "PATIENCE", 2)
    script = "import time; print('OK   a: 1', flush=True); time.sleep(60)"
    lines, why = gpu_check.run([sys.executable, "-c", script], {})
    assert (lines, why) == (["OK   a: 1"], "no end within 2 s")


@pytest.mark.parametrize(
    ("count", "groups"),
    [
        (1, ["1 over nccl", "2 over gloo"]),
        (4, ["1 over nccl", "4 over nccl", "2 over gloo"]),
    ],
)
def test_what_is_started(
    count: int, groups: list[str], gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each check by itself; ranks by torchrun, between cards where there are several."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    started = {name: (command, environment) for name, command, environment in gpu_check.commands()}
    alone = [n for n in gpu_check.CHECKS if n not in gpu_check.OF_RANKS]
    together = [f"{name}, {group}" for name in gpu_check.OF_RANKS for group in groups]
    assert list(started) == [*alone, *together]
    command, environment = started[together[-1]]
    assert "torch.distributed.run" in command
    assert environment == {gpu_check.BACKEND: "gloo"}


@pytest.mark.gloo
@pytest.mark.captured
@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("check_shares", "shard_optimizer"),
        ("check_votes", "commit"),
        ("check_hidden", ""),
    ],
)
def test_what_ranks_check_together(ranks: Ranks, name: str, without: str) -> None:
    """On two ranks, with the CPU in the card's place; a run that leaves the option out is found."""
    for lines in ranks(cards.checked, name):
        assert lines
        assert all(ok for ok, _ in lines), lines
    if without:
        for lines in ranks(cards.checked, name, without):
            assert not all(ok for ok, _ in lines)
