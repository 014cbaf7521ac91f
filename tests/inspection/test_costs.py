"""The estimate: its formulas by hand, and what it says after a calibration on two local ranks."""

from __future__ import annotations

import pytest

from gradsync_fx.inspection.costs import (
    HIDDEN,
    PRESETS,
    Hardware,
    Load,
    all_reduce_seconds,
    predict,
)
from tests.scenarios import calibration
from tests.workers import Ranks


UNIT = Hardware("unit", latency=1.0, bandwidth=2.0, flops=1.0)


def test_a_ring_all_reduce_by_hand() -> None:
    """4 ranks, 8 bytes: 6 messages of 1 s, and 6 / 4 * 8 bytes at 2 bytes a second."""
    assert all_reduce_seconds(8, 4, UNIT) == 6 + 6
    assert all_reduce_seconds(8, 1, UNIT) == 0


def test_a_window_by_hand() -> None:
    """Two ranks; 10 s of compute; buckets of 4 bytes (2 + 2 s each) ready after 6 and 10 s: 4 s are exposed."""
    load = Load(forward=4, total=10, buckets=(("a", 0.6, 4), ("b", 1.0, 4)), ranks=2)
    found = predict(load, 3, UNIT)
    assert (found.compute, found.communication, found.hidden) == (30, 8, 4)
    assert (found.window, found.window_synced) == (34, 42)
    assert dict(found.speedup)[1] == 1.0
    assert dict(found.speedup)[4] == pytest.approx(56 / 44)
    assert [(s.label, s.start, s.end) for s in found.boundary[2:]] == [("a", 6, 10), ("b", 10, 14)]
    # 4 s of (10 k + 4) s are 5 % from k = 7.6 on.
    assert found.hidden_from == 8
    assert HIDDEN == 0.05


def test_buckets_wait_for_the_wire() -> None:
    load = Load(4, 10, (("a", 0.6, 4), ("b", 0.7, 4)), 2)
    assert [(s.start, s.end) for s in predict(load, 1, UNIT).boundary[2:]] == [(6, 10), (10, 14)]


def test_shared_updates_gather_behind_the_reduction_or_under_the_next_forward() -> None:
    """Half of an all-reduce for each bucket, 1 + 1 s; then 8 bytes of parameters, 1 + 2 s, 4 s of forward over them."""
    buckets = (("a", 0.6, 4), ("b", 1.0, 4))
    seen = predict(Load(4, 10, buckets, 2, gathered=8), 3, UNIT)
    hidden = predict(Load(4, 10, buckets, 2, gathered=8, hides=True), 3, UNIT)
    assert [(s.label, s.start, s.end) for s in seen.boundary[2:]] == [
        ("a", 6, 8),
        ("b", 10, 12),
        ("new parameters", 12, 15),
    ]
    assert (seen.communication, seen.hidden, seen.window) == (7, 2, 35)
    assert (hidden.communication, hidden.hidden, hidden.window) == (7, 5, 32)


def test_syncing_each_micro_step_gains_nothing() -> None:
    load = Load(4, 10, (("a", 1.0, 4),), 2)
    found = predict(load, 4, UNIT, sync_each=True)
    assert found.window == found.window_synced
    assert {speed for _, speed in found.speedup} == {1.0}


def test_one_rank_has_nothing_to_hide() -> None:
    found = predict(Load(4, 10, (), 1), 4, "laptop")
    assert (found.communication, found.hidden, found.hidden_from) == (0, 0, 1)
    assert found.window == found.window_synced


def test_the_curve_rises_with_k_and_faster_wires_flatten_it() -> None:
    load = Load(10**12, 3 * 10**12, (("a", 1.0, 4 * 10**9),), 8)
    slow, fast = (
        [speed for _, speed in predict(load, 4, PRESETS[name]).speedup]
        for name in ("t4-10g", "h100-nvlink")
    )
    assert slow == sorted(slow)
    assert slow[-1] > fast[-1] >= 1.0


@pytest.mark.gloo
def test_an_estimate_from_a_calibration(ranks: Ranks) -> None:
    """Whatever this machine is: a model of many parameters and few FLOPs gains more than one of the reverse.

    examples/benchmarks/estimate.py measures beside it.
    """
    for found in ranks(calibration.estimated):
        assert found["wide"] > found["deep"] >= 1
        machine = found["hardware"]
        assert min(machine.latency, machine.bandwidth, machine.flops) > 0
