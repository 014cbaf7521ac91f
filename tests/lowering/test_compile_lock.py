"""Ranks of one host share what they compile, whatever becomes of the one that compiles."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch.fx import GraphModule, symbolic_trace

from gradsync_fx._torch import inductor_config
from gradsync_fx.lowering.compile_lock import compile_once
from tests.scenarios import compiled
from tests.scenarios.groups import joined
from tests.workers import Ranks


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Inductor's cache is."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "gradsync_fx"


def module(factor: float = 2.0) -> GraphModule:
    return symbolic_trace(lambda x: x * factor)


def lock_of(folder: Path) -> Path:
    """The lock that `compile_once` made; the program counts as not compiled."""
    with compile_once(module(), [torch.ones(2)], {}):
        (file,) = folder.iterdir()
    (mark,) = folder.glob("*.done")
    mark.unlink()
    return file


@pytest.mark.gloo
@pytest.mark.inductor
@pytest.mark.captured
def test_each_program_is_compiled_by_one_of_two_ranks(ranks: Ranks, tmp_path: Path) -> None:
    both = ranks(compiled.from_a_cold_cache, str(tmp_path), {})
    together = {which: sum(found[which] for found in both) for which in ("miss", "hit")}
    assert together["miss"] == together["hit"] >= 2
    for found in both:
        for ours, theirs in zip(found["parameters"], joined(0, 1), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_equal_programs_wait_for_each_other_and_others_do_not(folder: Path) -> None:
    forms = [[torch.ones(2)], [torch.ones(3)], [torch.ones(2, dtype=torch.float64)], [2]]
    with compile_once(module(), forms[0], {}):
        for other in forms[1:]:
            with compile_once(module(), other, {}, patience=0):
                pass
        for factor, patches in ((3.0, {}), (2.0, {"fallback_random": True})):
            with compile_once(module(factor), forms[0], patches, patience=0):
                pass
    assert len(list(folder.glob("*.lock"))) == len(list(folder.glob("*.done"))) == 6


def test_what_is_compiled_is_loaded_side_by_side(folder: Path) -> None:
    with compile_once(module(), [torch.ones(2)], {}):
        (lock,) = folder.iterdir()
    with compile_once(module(), [torch.ones(2)], {}), FileLock(lock, timeout=0):
        pass


def test_those_who_waited_load_side_by_side(folder: Path) -> None:
    inside, same, loaded = threading.Barrier(2, timeout=60), module(), list[int]()

    def load() -> None:
        with compile_once(same, [torch.ones(2)], {}):
            loaded.append(inside.wait())

    waiting = [threading.Thread(target=load) for _ in range(2)]
    with compile_once(same, [torch.ones(2)], {}):
        for thread in waiting:
            thread.start()
        time.sleep(0.2)
        assert inside.n_waiting == 0
    for thread in waiting:
        thread.join()
    assert not inside.broken
    assert sorted(loaded) == [0, 1]


def test_a_holder_that_is_stuck_is_waited_for_only_so_long(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entered = False
    with (
        FileLock(lock_of(folder)),
        caplog.at_level(logging.WARNING, "gradsync_fx"),
        compile_once(module(), [torch.ones(2)], {}, patience=0.1),
    ):
        entered = True
    assert entered
    assert "compiling it here as well" in caplog.text


def test_a_holder_that_is_killed_holds_nobody_up(folder: Path) -> None:
    file = lock_of(folder)
    program = "import sys, filelock; filelock.FileLock(sys.argv[1]).acquire(); print('held', flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(file)], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    start = time.monotonic()
    holder.kill()
    holder.communicate()
    with compile_once(module(), [torch.ones(2)], {}, patience=60.0):
        waited = time.monotonic() - start
    assert waited < 30


def test_the_lock_is_free_after_an_error(folder: Path) -> None:
    def fail() -> None:
        with compile_once(module(), [torch.ones(2)], {}):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert not list(folder.glob("*.done"))
    with FileLock(lock_of(folder), timeout=0):
        pass


@pytest.mark.parametrize("setting", [{"fx_graph_cache": False}, {"force_disable_caches": True}])
def test_nobody_waits_where_nothing_could_be_loaded(folder: Path, setting: dict[str, Any]) -> None:
    with inductor_config.patch(setting), compile_once(module(), [torch.ones(2)], {}):
        pass
    assert not os.path.exists(folder)
