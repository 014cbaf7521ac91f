"""Ranks that may die: forked for one scenario each, from a process that has imported and traced everything once.

Those that live answer, and stay until all have answered or died: no rank learns of a fault only because another one
ended after it.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any


TIMEOUT = 12.0  # seconds that gloo waits
PATIENCE = 90.0  # seconds for one scenario, on a busy machine

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.warmed"])


def mortals(
    world: int, scenario: Callable[..., Any], *args: Any, store: str = "file", folder: Path
) -> list[Any]:
    """What `scenario(rank, *args)` gives on each rank; None for a rank that died. Fails when any takes too long.

    store: where ranks meet; "tcp": in rank 0's process, and gone with it.
    """
    if store == "tcp":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            where = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    else:
        where = f"file://{folder / f'store{time.monotonic_ns()}'}"
    order = (scenario.__module__, scenario.__name__, args)
    processes, pipes = [], []
    for rank in range(world):
        mine, theirs = _context.Pipe()
        process = _context.Process(
            target=_body, args=(rank, world, where, theirs, order), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(mine)
    answers: dict[int, Any] = {}
    end = time.monotonic() + PATIENCE
    try:
        while len(answers) < world:
            waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
            ready = wait(waiting, timeout=max(0.0, end - time.monotonic()))
            assert ready, f"only ranks {sorted(answers)} answered in {PATIENCE:g} s: {answers}"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    answers[pipes.index(pipe)] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    answers[pipes.index(pipe)] = None
    finally:
        for process in processes:
            process.kill()
            process.join()
    for rank, answer in answers.items():
        assert not isinstance(answer, str), f"rank {rank}: {answer}"
    return [answers[rank] for rank in range(world)]


def _body(rank: int, world: int, where: str, pipe: Connection, order: Any) -> None:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    module, name, args = order
    try:
        dist.init_process_group(
            "gloo", init_method=where, rank=rank, world_size=world,
            timeout=timedelta(seconds=TIMEOUT),
        )  # fmt: skip
        answer = getattr(importlib.import_module(module), name)(rank, *args)
    except BaseException:
        answer = traceback.format_exc()
    pipe.send_bytes(pickle.dumps(answer))
    if isinstance(answer, dict) and answer.get("leaves"):
        os._exit(0)
    time.sleep(PATIENCE)
