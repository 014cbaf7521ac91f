"""Starts the ranks of a task, follows what they are doing, and brings their results, or what they complained about."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measure import Task
from placement import Place


RANK = Path(__file__).with_name("rank.py")
PATIENCE = 1800.0  # seconds without a sign of life from rank 0: longer than any compilation


class RanksFailed(Exception):
    """A rank ended badly, or none was heard of; the text has the end of what they complained about."""


def run(
    task: Task, place: Place, tell: Callable[[str], None], environment: dict[str, str]
) -> list[dict[str, Any]]:
    """What each rank measured, in rank order. environment: added to the ranks'."""
    with tempfile.TemporaryDirectory(prefix="gradsync-bench-") as name:
        folder = Path(name)
        file = folder / "task.json"
        file.write_text(json.dumps(asdict(task) | {"store": str(folder / "store")}))
        own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": place.sockets}
        # Accelerate looks here for the ranks that it is among; the group exists by then.
        own |= {"WORLD_SIZE": str(place.world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        with _started(file, place, {**os.environ, **own, **environment}) as processes:
            _follow(processes, folder, tell)
        return [
            json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(place.world)
        ]


@contextmanager
def _started(
    file: Path, place: Place, environment: dict[str, str]
) -> Iterator[list[subprocess.Popen[str]]]:
    """The ranks' processes; none is left when the block ends, however it ends."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank, prefix in enumerate(place.prefixes):
            with file.with_name(f"stderr{rank}").open("w") as complaints:
                process = subprocess.Popen(
                    [*prefix, sys.executable, str(RANK), str(file), str(rank)],
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=complaints,
                    text=True,
                    start_new_session=True,  # Ctrl-C is for the parent, which ends them
                )
            processes.append(process)
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _follow(
    processes: list[subprocess.Popen[str]], folder: Path, tell: Callable[[str], None]
) -> None:
    heard = [time.monotonic()]

    def listen() -> None:
        assert processes[0].stdout is not None
        for line in processes[0].stdout:
            heard[0] = time.monotonic()
            tell(line.strip())

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    while any(process.poll() is None for process in processes):
        time.sleep(0.1)
        failed = [r for r, p in enumerate(processes) if p.poll()]
        if failed:
            time.sleep(1.0)  # the others may be about to say more
            raise RanksFailed(f"rank {failed[0]} ended: {_complaints(folder, failed[0])}")
        if time.monotonic() - heard[0] > PATIENCE:
            raise RanksFailed(f"nothing heard for {PATIENCE:.0f} s: {_complaints(folder, 0)}")
    listener.join()
    if failed := [r for r, p in enumerate(processes) if p.returncode]:
        raise RanksFailed(f"rank {failed[0]} ended: {_complaints(folder, failed[0])}")


def _complaints(folder: Path, rank: int) -> str:
    return (folder / f"stderr{rank}").read_text()[-3000:]
