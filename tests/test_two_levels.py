"""Reductions in two levels over a mesh: the numbers of one level, the same bits on all ranks, few bytes between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gradsync_fx
from examples.benchmarks.placement import Place, Unavailable, slow_link
from tests.refusals import refused
from tests.scenarios import meshed
from tests.scripts import plain
from tests.truth import Rules, Script, Slot, same
from tests.workers import Ranks


pytestmark = pytest.mark.gloo
DATA: list[Script] = [[Slot(10 * rank + n, rows=2 + n) for n in range(1, 6)] for rank in range(4)]
DATA[3] = [*DATA[3][:2], None, *DATA[3][3:4]]  # less data, and a slot without


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four processes for this file."""
    ranks = Ranks(tmp_path_factory.mktemp("four"), world=4)
    yield ranks
    ranks.stop()


@pytest.mark.parametrize(
    ("rules", "more", "atol"),
    [
        (Rules(2), {"step": "clipped", "optimizer": "adamw"}, 1e-5),
        pytest.param(
            Rules(3, "weighted", skip_nonfinite=True),
            {"step": "weighed"},
            1e-6,
            marks=pytest.mark.long,
        ),
        (Rules(2, "sum"), {"options": {"sync_each_batch": True, "self_check": True}}, 1e-6),
        (Rules(2), {"options": {"reduce_dtype": torch.bfloat16}}, 5e-3),
        pytest.param(
            Rules(2), {"options": {"reduce_dtype": torch.float16}}, 1e-3, marks=pytest.mark.long
        ),
        pytest.param(
            Rules(2), {"options": {"backend": "inductor"}}, 1e-6, marks=pytest.mark.inductor
        ),
        pytest.param(
            Rules(2),
            {"options": {"backend": "inductor", "without": ("in_place",)}},
            1e-6,
            marks=[pytest.mark.inductor, pytest.mark.long],
        ),
    ],
)
def test_the_numbers_of_one_level(
    four: Ranks, rules: Rules, more: dict[str, Any], atol: float
) -> None:
    found = four(meshed.windows, DATA, rules, more)
    for rank in found:
        same(rank["two"]["ours"], rank["two"]["truth"], atol)
        same(rank["two"]["ours"], rank["one"]["ours"], atol)
        for mine, first in zip(rank["two"]["ours"], found[0]["two"]["ours"], strict=True):
            assert all(torch.equal(mine[name], first[name]) for name in mine)


@pytest.mark.captured
def test_branches_that_differ_by_rank(four: Ranks) -> None:
    scripts: list[Script] = [
        [Slot(10 * rank + n, branch="ab"[(rank + n) % 2]) for n in range(1, 5)] for rank in range(4)
    ]
    for rank in four(meshed.windows, scripts, Rules(2), {}):
        same(rank["two"]["ours"], rank["two"]["truth"], 1e-6)


@pytest.mark.captured
def test_the_report_shows_the_levels_by_name(four: Ranks) -> None:
    """S = 44 bytes: 2 S / 2 / 2 to the other machine, 2 S / 2 inside."""
    for found in four(meshed.report):
        assert found["levels"] == [("machines", 2, 22), ("ranks", 2, 44)]
        assert "machines" in found["text"]


def test_a_mesh_of_other_ranks_is_refused_on_every_rank(four: Ranks) -> None:
    for text in four(meshed.refused, "other ranks"):
        assert text.startswith("OptionError argument 'device_mesh'")
        assert "a mesh of ranks [[0, 1], [2, 3]]" in text
        assert text.endswith("nothing changed")


def test_a_mesh_on_some_ranks_is_refused_on_every_rank(four: Ranks) -> None:
    for text in four(meshed.refused, "on some"):
        assert "device_mesh" in text
        assert text.endswith("nothing changed")


def test_a_mesh_beside_shared_updates_is_refused(four: Ranks) -> None:
    """By both names, with what each of the two ways out keeps; either alone goes."""
    for text, works in four(meshed.with_shards):
        assert text.startswith("OptionError arguments 'shard_optimizer' and 'device_mesh'")
        assert "leave device_mesh out and keep shard_optimizer" in text
        assert "leave shard_optimizer out and keep device_mesh" in text
        assert works


@pytest.mark.parametrize("given", ["cpu", (2, 2)])
def test_what_is_no_mesh_is_refused(given: object) -> None:
    refused(
        gradsync_fx.OptionError,
        "argument 'device_mesh'",
        lambda: gradsync_fx.optimize(plain, device_mesh=given),  # type: ignore[call-overload]
    )


def counted(place: Place, folder: Path, levels: int) -> list[dict[str, Any]]:
    """Two ranks in each namespace; in rank order."""
    outs = [folder / f"{levels} {rank}.json" for rank in range(4)]
    store = f"file://{folder}/store{levels}"
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": place.sockets, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.scenarios.meshed", store]
    running = [
        subprocess.Popen(
            [*place.prefixes[rank // 2], *command, str(rank), place.interface, str(levels), out],
            env=environment,
        )
        for rank, out in enumerate(map(str, outs))
    ]
    assert [process.wait(300) for process in running] == [0] * 4
    return [json.loads(out.read_text()) for out in outs]


@pytest.mark.captured
def test_each_byte_crosses_the_slow_link_once(tmp_path: Path) -> None:
    """At most S + 5 % in each direction for S bytes of sums; a ring of four ranks in block order sends 1.5 S."""
    try:
        with slow_link() as place:
            two, one = counted(place, tmp_path, 2), counted(place, tmp_path, 1)
    except Unavailable as why:
        pytest.skip(str(why))
    size = two[0]["size"]
    for found in two:
        assert found["alike"]
        assert all(size <= sent <= 1.05 * size for sent in found["sent"]), (found["sent"], size)
    assert all(sent > 1.4 * size for sent in one[0]["sent"]), one[0]["sent"]
