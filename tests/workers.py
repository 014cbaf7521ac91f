"""Processes that talk over gloo, started once and kept: importing torch for each test would take too long."""

from __future__ import annotations

import faulthandler
import importlib
import math
import multiprocessing
import os
import pickle
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


WORLD = 2
PATIENCE = 180.0  # seconds for one scenario, which may compile with Inductor


class RanksFailed(AssertionError):
    """A scenario raised, or did not end in time. The text has every rank's traceback."""


def _fate(store: str, rank: int) -> Path:
    """Where a rank leaves what it prints to stderr; one that a signal ends, or that hangs, its stacks, too."""
    return Path(f"{store}.rank{rank}")


def serve(rank: int, world: int, store: str, pipe: Connection) -> None:
    """The body of a rank: runs what it is told by name until the pipe closes."""
    os.dup2(os.open(_fate(store, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    # The ranks find each other on the loopback, whatever the machine's name resolves to.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    from gradsync_fx import progress
    from tests.eagerly import asked, eagerly

    torch.set_num_threads(1)
    progress.PATIENCE = math.inf
    warnings.simplefilter("error", UserWarning)
    warnings.filterwarnings("ignore", "the step runs eagerly")
    # Scenarios leave windows open.
    warnings.filterwarnings("ignore", ".* ended with .* pending micro-step")
    with ExitStack() as stack:
        if asked():
            stack.enter_context(eagerly())
            warnings.filterwarnings("ignore", "the step runs eagerly")
        _serve(rank, world, store, pipe)


def _serve(rank: int, world: int, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world,
        timeout=timedelta(seconds=PATIENCE / 2),
    )  # fmt: skip
    while True:
        try:
            module, name, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            scenario = getattr(importlib.import_module(module), name)
            answer = (True, scenario(rank, *args))
        except Exception:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))


class Ranks:
    """The processes, two by default: started when they are first needed, and anew after a failure."""

    def __init__(self, folder: Path, world: int = WORLD) -> None:
        self._folder, self._world, self._started = folder, world, 0
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __call__(
        self, scenario: Callable[..., Any], *args: Any, timeout: float = PATIENCE
    ) -> list[Any]:
        """What `scenario(rank, *args)`, a top-level function, returns on each rank.

        A scenario that fails on any rank fails here, and costs all of them: they may stand at different points.
        """
        if not self._processes:
            self._start()
        order = pickle.dumps((scenario.__module__, scenario.__name__, args))
        for pipe in self._pipes:
            pipe.send_bytes(order)
        end = time.monotonic() + timeout
        answers = [self._answer(rank, end) for rank in range(self._world)]
        if not all(good for good, _ in answers):
            self.stop()
            raise RanksFailed("\n".join(f"rank {r}: {text}" for r, (_, text) in enumerate(answers)))
        return [value for _, value in answers]

    def _answer(self, rank: int, end: float) -> tuple[bool, Any]:
        pipe, process = self._pipes[rank], self._processes[rank]
        try:
            if pipe.poll(max(0.0, end - time.monotonic())):
                answer: tuple[bool, Any] = pickle.loads(pipe.recv_bytes())
                return answer
        except EOFError:
            process.join()
            return False, f"the process is gone, exit code {process.exitcode}\n{self._last(rank)}"
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1.0)  # it writes its stacks
        return False, f"no answer in time\n{self._last(rank)}"

    def _last(self, rank: int) -> str:
        return _fate(self._store(), rank).read_text()[-10_000:]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._started += 1
        for rank in range(self._world):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(rank, self._world, self._store(), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)

    def _store(self) -> str:
        return str(self._folder / f"store{self._started}")

    def stop(self) -> None:
        """Ends both processes, whatever they are doing."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
