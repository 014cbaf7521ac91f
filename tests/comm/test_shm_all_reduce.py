"""Ranks that add their buckets up in shared memory: the same numbers as over the wire, and as one process has."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsync_fx.comm import shared_memory
from gradsync_fx.comm.flat_buffers import allocate, contiguous_view
from gradsync_fx.comm.shared_memory import Address, MappedFiles, address, open_room
from tests.mortals import mortals
from tests.reference import Window, accumulation, regression
from tests.scenarios import neighbours
from tests.workers import Ranks


def may_share() -> bool:
    """Whether this system lets one process open a file without a name of another one; asked without our code."""
    if not hasattr(os, "memfd_create"):
        return False
    file = os.memfd_create("trial")
    path = f"/proc/{os.getpid()}/fd/{file}"
    opens = "import os, sys; os.open(sys.argv[1], os.O_RDWR)"
    tried = subprocess.run([sys.executable, "-c", opens, path], capture_output=True, check=False)
    os.close(file)
    return tried.returncode == 0


where_shared = pytest.mark.skipif(
    not may_share(),
    reason="this system does not let one process open another's file without a name",
)

K = 2
APART = {"without": ("shared_memory",)}


def data() -> list[list[Window]]:
    """Four windows of each rank; the last one is short."""
    found = [regression(4, K, seed=rank) for rank in range(2)]
    for windows in found:
        windows[-1] = windows[-1][:1]
    return found


def one_process(given: list[list[Window]], branches: list[list[bool]]) -> list[list[Tensor]]:
    """The windows of all ranks on one model, eagerly: the mean over all micro-batches."""
    together: list[Any] = [
        [(*batch, branch) for mine, branch in zip(windows, other, strict=True) for batch in mine]
        for *windows, other in zip(*given, branches, strict=True)
    ]
    run = accumulation(*neighbours.fresh(), together, neighbours.loss_of)
    return [list(update.values()) for update in run.updates]


def check(
    answers: list[dict[str, Any]], given: list[list[Window]], branches: list[list[bool]]
) -> None:
    for one, two, wanted in zip(
        *(answer["parameters"] for answer in answers), one_process(given, branches), strict=True
    ):
        for ours, others, theirs in zip(one, two, wanted, strict=True):
            assert torch.equal(ours, others)
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


@where_shared
@pytest.mark.gloo
@pytest.mark.inductor
@pytest.mark.captured
def test_whole_windows(ranks: Ranks) -> None:
    """Two micro-steps, and a short window at the end; nothing but meetings goes over the wire."""
    given, branches = data(), [[False, False]] * 4
    shared = ranks(neighbours.windows, given, branches, {})
    check(shared, given, branches)
    apart = ranks(neighbours.windows, given, branches, APART)
    for beside, over_the_wire in zip(shared, apart, strict=True):
        assert [set(sizes) for sizes in beside["sent"]] == [{1}] * 4
        assert all(sum(sizes) >= 512 * 512 for sizes in over_the_wire["sent"])
        for ours, theirs in zip(beside["parameters"], over_the_wire["parameters"], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@where_shared
@pytest.mark.gloo
@pytest.mark.inductor
@pytest.mark.captured
def test_branches_that_differ_among_ranks(ranks: Ranks) -> None:
    """Each rank captures the branches in its own order; where they differ the wire reduces."""
    given = data()
    branches = [[False, True], [False, False], [True, True], [True, False]]
    answers = ranks(neighbours.windows, given, branches, {})
    check(answers, given, branches)
    for answer in answers:
        met = [1 in sizes for sizes in answer["sent"]]
        assert met == [False, True, True, False]  # the bucket of the head lies otherwise on rank 1


@pytest.mark.gloo
@pytest.mark.inductor
@pytest.mark.captured
@pytest.mark.parametrize(
    "options", [{"only_rank": 1, **APART}, {"reduce_dtype": torch.bfloat16}], ids=["one", "wire"]
)
def test_what_is_not_shared(ranks: Ranks, options: dict[str, Any]) -> None:
    """A rank that was told not to, and a wire of another dtype: all ranks send."""
    given, branches = data(), [[False, False]] * 4
    answers = ranks(neighbours.windows, given, branches, options)
    for sent in answers[0]["sent"]:
        assert sum(sent) >= 512 * 512
    for one, two in zip(*(answer["parameters"] for answer in answers), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    if "reduce_dtype" not in options:
        check(answers, given, branches)


@where_shared
@pytest.mark.gloo
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_three_ranks(own: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """Also where one rank's buckets lie in memory of its own."""
    thirds = [torch.tensor((1 + rank) / 3, dtype=dtype) for rank in range(3)]
    for answer in mortals(3, neighbours.added_up, dtype, own, folder=tmp_path):
        assert answer["shared"] == (2 if own else 0)
        assert set(answer["sent"]) == {1} if own else 1 not in answer["sent"]
        for sums in answer["sums"]:
            for form, total in zip(neighbours.FORMS, sums, strict=True):
                wanted = (thirds[0] + thirds[1] + thirds[2]).expand(form.shape)
                torch.testing.assert_close(total, wanted, atol=0, rtol=1e-6)


@where_shared
@pytest.mark.gloo
@pytest.mark.parametrize("when", ["before", "between"])
def test_a_rank_that_dies(when: str, tmp_path: Path) -> None:
    *others, dead = mortals(3, neighbours.gone_between, when, folder=tmp_path)
    assert dead is None
    assert all(other["error"] for other in others)


@where_shared
def test_room_in_stretches() -> None:
    room = open_room([4 * 10, 8 * 3])
    assert room is not None
    one = allocate([torch.empty(2, 5)], torch.float32, room)
    two = allocate([torch.empty(()), torch.empty(2)], torch.float64, room)
    for sums in (one, two):
        flat = contiguous_view(sums)
        assert flat is not None
        assert flat.data_ptr() % shared_memory.PAGE == 0
        assert not flat.any()
    one[0].fill_(1)
    assert not two[1].any()
    # Who waits for an all-reduce waits for all that run on its storage.
    assert one[0].untyped_storage().data_ptr() != two[0].untyped_storage().data_ptr()


def seen_from_elsewhere(addresses: list[Address], pipe: Any) -> None:
    """In another process: reads what lies there, and writes a 7 in front."""
    copies = [MappedFiles().tensor(there, torch.float32) for there in addresses]
    pipe.send([None if copy is None else copy.tolist() for copy in copies])
    for copy in copies:
        if copy is not None:
            copy[0] = 7


@where_shared
def test_another_process_reaches_it() -> None:
    room = open_room([100, 4 * 5])
    assert room is not None
    room.take(25, torch.float32)
    flat = room.take(5, torch.float32).copy_(torch.arange(5.0))
    part = address(flat[1:4])
    assert part is not None
    wrong = [
        replace(part, machine="another"),
        replace(part, inode=part.inode + 1),
        replace(part, process=2**22),
    ]
    context = get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=seen_from_elsewhere, args=([part, *wrong], theirs))
    process.start()
    assert mine.recv() == [[1.0, 2.0, 3.0], None, None, None]
    process.join()
    assert flat.tolist() == [0, 7, 2, 3, 4]


@where_shared
def test_its_file_is_closed_with_its_last_stretch() -> None:
    before = len(os.listdir("/proc/self/fd"))
    room = open_room([4 * 5])
    assert room is not None
    (kept,) = allocate([torch.empty(5)], torch.float32, room)
    del room
    assert address(kept) is not None
    assert len(os.listdir("/proc/self/fd")) > before
    del kept
    assert len(os.listdir("/proc/self/fd")) == before


@where_shared
def test_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError("not here")

    assert open_room([]) is None
    monkeypatch.setattr(os, "ftruncate", refuse)
    before = len(os.listdir("/proc/self/fd"))
    assert open_room([8]) is None
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.delattr(os, "memfd_create")
    assert open_room([8]) is None
    (ordinary,) = allocate([torch.empty(5)], torch.float32, None)
    assert address(ordinary) is None
