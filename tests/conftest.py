"""Fixtures: a fresh seed for every test, and one pair of gloo processes that lives as long as the session."""

from __future__ import annotations

import importlib
import multiprocessing as mp
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist


WORLD = 2


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _serve(rank: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    while True:
        module, name, args = pipe.recv()
        try:
            torch.manual_seed(0)
            torch.compiler.reset()
            pipe.send(("ok", getattr(importlib.import_module(module), name)(rank, *args)))
        except BaseException:  # sent to the test, which fails with it
            pipe.send(("failed", traceback.format_exc()))


class Ranks:
    """Runs a top-level function `f(rank, *args)` in both processes; returns their results in rank order."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._started = folder, 0
        self._start()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._started += 1
        store = str(self._folder / f"store{self._started}")
        self._pipes, self._workers = [], []
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(rank, store, theirs), daemon=True)
            worker.start()
            self._pipes.append(ours)
            self._workers.append(worker)

    def stop(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.join()

    def __call__(self, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__name__, args))
        answers = [pipe.recv() if pipe.poll(timeout) else ("failed", "no answer") for pipe in self._pipes]
        if any(status == "failed" for status, _ in answers):
            self.stop()
            self._start()
            pytest.fail("\n".join(f"rank {r}: {text}" for r, (s, text) in enumerate(answers) if s == "failed"))
        return [value for _, value in answers]


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    pair = Ranks(tmp_path_factory.mktemp("ranks"))
    yield pair
    pair.stop()
