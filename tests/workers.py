"""Two processes that talk over gloo, started once and kept: importing torch for each test would take too long."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any


WORLD = 2
PATIENCE = 60.0  # seconds for one scenario


class RanksFailed(AssertionError):
    """A scenario raised, or did not end in time. The text has every rank's traceback."""


def serve(rank: int, store: str, pipe: Connection) -> None:
    """The body of a rank: runs what it is told by name until the pipe closes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("error", UserWarning)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=PATIENCE / 2),
    )
    while True:
        try:
            module, name, kwargs = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            scenario = getattr(importlib.import_module(module), name)
            answer = (True, scenario(rank, **kwargs))
        except Exception:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))


class Pair:
    """The two processes. `run` starts them when they are needed, anew after a failure."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, scenario: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """What the scenario, a top-level function that takes the rank first, returns on each rank.

        A scenario that fails on any rank fails here, and costs the pair: its ranks may stand at different places.
        """
        if not self._processes:
            self._start()
        order = pickle.dumps((scenario.__module__, scenario.__name__, kwargs))
        for pipe in self._pipes:
            pipe.send_bytes(order)
        end = time.monotonic() + PATIENCE
        answers = [self._answer(pipe, end) for pipe in self._pipes]
        if not all(good for good, _ in answers):
            self.stop()
            raise RanksFailed("\n".join(f"rank {r}: {text}" for r, (_, text) in enumerate(answers)))
        return [value for _, value in answers]

    def _answer(self, pipe: Connection, end: float) -> tuple[bool, Any]:
        try:
            if pipe.poll(max(0.0, end - time.monotonic())):
                answer: tuple[bool, Any] = pickle.loads(pipe.recv_bytes())
                return answer
        except EOFError:
            return False, "the process is gone"
        return False, f"no answer within {PATIENCE:.0f} s"

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(WORLD):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(rank, f"{self._folder.name}/store", theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)

    def stop(self) -> None:
        """Ends both processes, whatever they are doing."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None
