"""Updates that are shared out on one machine: pieces of sums and of new parameters go through memory, to the same bits
as over the wire.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comm.test_shm_all_reduce import where_shared
from tests.long import some_long
from tests.mortals import mortals
from tests.scenarios import pieces, sharded
from tests.test_commit import BALLOTS
from tests.test_commit import check as check_votes
from tests.test_ranks_sharded import bitwise, close
from tests.workers import Ranks


pytestmark = [pytest.mark.gloo, where_shared]
SHARDED = "tests.scenarios.sharded"
SUMS, PARAMETERS = "add_up_share", "put"
# What is done in memory, where that is not both: a step that goes on to read new parameters gathers them as it is, and
# one that reduces every micro-step has no sums to exchange.
DONE = {"readers": {SUMS}, "each_call": set[str]()}
# Over the wire all scripts run: test_ranks_sharded.py.
SCRIPTS = ("weighted", "uneven", "branches", "several", "odd_parameters", "readers", "each_call")


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(tmp_path_factory.mktemp("four"), 4)
    yield found
    found.stop()


def both(ranks: Ranks, *scenario: Any) -> tuple[list[Any], list[Any], list[set[str]]]:
    """On each rank: what a scenario gives in memory, and over the wire; and what was done there in memory."""
    near = ranks(pieces.beside, *scenario)
    far = ranks(pieces.sent, *scenario)
    assert all(not {SUMS, PARAMETERS} & {*done} for _, done in far)
    memory = [{SUMS, PARAMETERS} & {*done} for _, done in near]
    return [given for given, _ in near], [given for given, _ in far], memory


@pytest.mark.inductor
@pytest.mark.captured
@pytest.mark.parametrize("name", some_long(SCRIPTS, len(SCRIPTS)))
def test_all_that_windows_do(ranks: Ranks, name: str) -> None:
    near = ranks(pieces.beside, SHARDED, "both_ways", name, "inductor", {})
    for (ours, plain), done in near:
        # Inductor rounds to bfloat16 where its kernels end, and they end elsewhere.
        close(ours, plain, atol=2e-4 if name == "odd_parameters" else 2e-5)
        assert {SUMS, PARAMETERS} & {*done} == DONE.get(name, {SUMS, PARAMETERS})
    assert bitwise(near[0][0][0], near[1][0][0])


@pytest.mark.inductor
@pytest.mark.captured
@pytest.mark.parametrize(
    ("name", "order"), some_long([("AdamW", None), ("AdamW", 2.0), ("Lamb", None)], 2)
)
def test_updates(ranks: Ranks, name: str, order: float | None) -> None:
    """Beside one process that has all data; without clipping to the bit what it is without shards."""
    near, far, done = both(ranks, SHARDED, "trained", name, order, True, "inductor")
    whole = sharded.joined(name, order, 2)
    for ours, sent in zip(near, far, strict=True):
        assert bitwise(ours["history"], sent["history"])
        close(ours["history"], whole["history"])
    assert bitwise(near[0]["history"], near[1]["history"])
    assert done == [{SUMS, PARAMETERS}] * 2
    if (name, order) == ("AdamW", None):
        plain = ranks(sharded.trained, name, None, False, "inductor")
        assert bitwise(near[0]["history"], plain[0]["history"])


@pytest.mark.long
@pytest.mark.inductor
@pytest.mark.captured
def test_four_ranks_train(four: Ranks) -> None:
    near, far, done = both(four, SHARDED, "trained", "AdamW", 2.0, True, "inductor")
    eager = four(sharded.trained, "AdamW", 2.0, True)
    whole = sharded.joined("AdamW", 2.0, 4)
    for ours, sent in zip(near, far, strict=True):
        assert bitwise(ours["history"], sent["history"])
        close(ours["history"], whole["history"])
        close(ours["history"], eager[0]["history"])
    assert done == [{SUMS, PARAMETERS}] * 4


@pytest.mark.inductor
@pytest.mark.captured
@pytest.mark.parametrize("dtype", some_long([torch.bfloat16, torch.float16], 2))
def test_a_narrow_wire(ranks: Ranks, dtype: torch.dtype) -> None:
    """Terms are rounded as they would be on it. float16 has its sums scaled, and is sent."""
    near, far, done = both(ranks, "tests.scenarios.pieces", "wire", dtype, True)
    exact = ranks(pieces.wire, None, False)
    for ours, sent, plain in zip(near, far, exact, strict=True):
        assert all(map(torch.equal, ours, sent))
        assert not all(map(torch.equal, ours, plain))
        for a, b in zip(ours, plain, strict=True):
            torch.testing.assert_close(a, b, atol=2e-3, rtol=0)
    assert done == [set() if dtype is torch.float16 else {SUMS, PARAMETERS}] * 2


@pytest.mark.inductor
@pytest.mark.captured
def test_votes(ranks: Ranks) -> None:
    """A refused update leaves parameters as they were; pieces that were exchanged for it are forgotten."""
    more = {"shard_optimizer": True}
    scenario = ("tests.scenarios.voted", "both", 2, "AdamW", BALLOTS, more, True)
    near, far, done = both(ranks, *scenario)
    for (found, wanted), (sent, _) in zip(near, far, strict=True):
        check_votes(found, wanted, BALLOTS, 2)
        # Kernels end elsewhere where an exchange is spelled out in the program, and sums are added up otherwise.
        torch.testing.assert_close(found["parameters"], sent["parameters"], atol=2e-6, rtol=2e-5)
    assert done == [{SUMS, PARAMETERS}] * 2


@pytest.mark.inductor
@pytest.mark.captured
def test_hidden_gathers_are_sent(ranks: Ranks) -> None:
    """Sums go through memory, new parameters over the wire, under the next forward."""
    near, far, done = both(ranks, "tests.scenarios.hidden", "trained", "AdamW", 2, True, 0.5, {})
    for ours, sent in zip(near, far, strict=True):
        assert any(ours["away"])
        torch.testing.assert_close(ours["losses"], sent["losses"], atol=2e-6, rtol=2e-5)
        torch.testing.assert_close(ours["values"], sent["values"], atol=2e-6, rtol=2e-5)
    assert done == [{SUMS}] * 2


@pytest.mark.inductor
@pytest.mark.captured
def test_the_report_tells_the_ways(ranks: Ranks) -> None:
    ways = {
        "memory": ({"shard_optimizer": True}, ("memory", "memory")),
        "hidden": ({"shard_optimizer": True, "overlap_param_gather": True}, ("memory", "wire")),
        "plain": ({}, ("memory", "")),
    }
    for options, (way, back) in ways.values():
        for found, _ in ranks(pieces.beside, "tests.scenarios.pieces", "reported", options):
            undecided = "memory or wire" if back == "memory" else back
            assert set(found["before"]) == {("memory or wire", undecided)}
            assert set(found["after"]) == {(way, back)}
    for found, _ in ranks(pieces.sent, "tests.scenarios.pieces", "reported", ways["memory"][0]):
        assert set(found["before"]) == set(found["after"]) == {("wire", "wire")}


def wanted_pieces(
    answers: list[dict[str, Any]], wire: torch.dtype, rank: int
) -> list[torch.Tensor]:
    """Of terms that are rounded once, and added in rank order in their own dtype."""
    found = []
    each = len(answers) + 1
    numbers = pieces.cuts_of(len(answers))
    for i, form in enumerate(pieces.FORMS):
        total = torch.zeros(form.shape, dtype=answers[0]["terms"][0].dtype)
        for answer in answers:
            total = total + answer["terms"][i].to(wire).to(total.dtype)
        start, end = numbers[i * each :][rank : rank + 2]
        found.append(total.reshape(-1)[start:end])
    return found


@pytest.mark.parametrize(
    ("world", "dtype", "wire"),
    [
        (2, torch.float32, torch.float32),
        (2, torch.float32, torch.bfloat16),
        (2, torch.float64, torch.float32),
        (3, torch.float32, torch.float32),
        (4, torch.float64, torch.float64),
    ],
)
def test_pieces_by_themselves(
    world: int, dtype: torch.dtype, wire: torch.dtype, tmp_path: Path
) -> None:
    """To the bit what rank order gives; also where a rank's memory is out of reach, or not all ranks run the program.
    A gather behind another one leaves a slow rank what it still reads.
    """
    for own, together in ((True, True), (False, True), (True, False)):
        answers = mortals(world, pieces.exchanged, dtype, wire, own, together, folder=tmp_path)
        for rank, answer in enumerate(answers):
            assert answer["shared"] == own
            wanted = wanted_pieces(answers, wire, rank)
            for window in answer["pieces"]:
                assert all(map(torch.equal, window, wanted))
            for factor, name in ((1.0, "once"), (2.0, "twice"), (3.0, "third")):
                assert all(map(torch.equal, answer[name], numbered(world, factor, dtype)))


def numbered(world: int, factor: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """Parameters of which the pieces of each rank are its number times the factor."""
    found, each = [], world + 1
    numbers = pieces.cuts_of(world)
    for i, form in enumerate(pieces.FORMS):
        flat = torch.zeros(form.numel(), dtype=dtype)
        for rank in range(world):
            start, end = numbers[i * each :][rank : rank + 2]
            flat[start:end] = factor * (1 + rank)
        found.append(flat.view(form.shape))
    return found


@pytest.mark.parametrize("when", ["adding", "putting"])
def test_a_rank_that_dies(when: str, tmp_path: Path) -> None:
    *others, dead = mortals(3, pieces.gone, when, folder=tmp_path)
    assert dead is None
    assert all(other["error"] for other in others)


@pytest.mark.inductor
@pytest.mark.captured
@pytest.mark.parametrize("when", ["adding", "putting"])
def test_a_rank_that_dies_in_a_step_is_named(when: str, tmp_path: Path) -> None:
    first, dead = mortals(2, pieces.lost_in_a_step, when, folder=tmp_path)
    assert dead is None
    assert first["error"].startswith("rank 1")
