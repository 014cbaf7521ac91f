"""On a rank: all ways alive in one process, timed window by window in turn; or one way alone, from its cold start.

A call is timed by the host's clock. Ranks meet ahead of each window and again ahead of its last micro-step, outside of
what is timed: so no accumulate call waits for another rank, unless its way makes it, and the boundary starts on all
ranks at once.
"""

import gc
import random
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import memory
from placement import Place
from traffic import sent_bytes, traffic_of
from ways import WAYS, MicroStep, Setting
from workloads import WORKLOADS, batches


WARM = 2  # windows until everything is compiled, and the optimizer's state exists


@dataclass(frozen=True)
class Task:
    """What one start of the ranks measures. alone: the one way's cold start and memory, instead of a comparison.

    in_a_row: windows in a turn of a way. Ranks then meet ahead of the turn alone, and what a way leaves for its next
    call is waited for behind it: what is hidden under a next call is seen so.
    """

    workload: str
    ways: list[str]
    windows: int
    k: int
    backend: str
    quick: bool
    place: dict[str, Any]
    store: str
    alone: bool = False
    in_a_row: int = 1


@dataclass
class Run:
    """A way at work on this rank."""

    micro_step: MicroStep
    losses: list[float] = field(default_factory=list)
    seconds: list[list[float]] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    warm_up: float = 0.0


class Ranks:
    """This rank among the others, on a line apart from the one that is measured."""

    def __init__(self, rank: int, place: Place) -> None:
        self.rank, self.place = rank, place
        self.device = torch.device(place.device, rank if place.device == "cuda" else None)
        self._line = dist.new_group(backend="gloo")
        alone = [dist.new_group([r]) for r in range(place.world)]
        self.alone = alone[rank]

    def meet(self) -> None:
        dist.barrier(self._line)

    def failure(self, mine: str) -> str:
        """The first rank's complaint, if any has one."""
        told: list[Any] = [None] * self.place.world
        dist.all_gather_object(told, mine, group=self._line)
        return next((text for text in told if text), "")

    def finish_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


Tell = Callable[[str], None]


def measure(task: Task, ranks: Ranks, tell: Tell) -> dict[str, Any]:
    """What this rank saw, by way: seconds of each call, losses, warm-up, traffic; or why a way does not run."""
    setting = Setting(
        WORKLOADS[task.workload](task.quick), ranks.device, task.k, task.backend, ranks.alone
    )
    data = batches(setting.workload, ranks.rank, (WARM + task.windows) * task.k, ranks.device)
    before = memory.resting(ranks.device)
    runs, found = {}, {}
    for key in task.ways:
        tell(f"{WAYS[key].title}: warm-up")
        run, failure = _started(key, setting, data[: WARM * task.k], ranks)
        if run is None:
            found[key] = {"failure": failure}
        else:
            runs[key] = run
    for turn, key in _turns(list(runs), task.windows // task.in_a_row):
        windows = range(turn * task.in_a_row, (turn + 1) * task.in_a_row)
        tell(f"{WAYS[key].title}: window {windows[-1] + 1} of {task.windows}")
        firsts = [(WARM + window) * task.k for window in windows]
        if len(firsts) == 1:
            _window(runs[key], data[firsts[0] : firsts[0] + task.k], ranks, timed=True)
        else:
            _in_a_row(runs[key], [data[first : first + task.k] for first in firsts], ranks)
    for key, run in runs.items():
        tell(f"{WAYS[key].title}: counting")
        found[key] = _result(run)
        again = lambda run=run: _window(run, data[-task.k :], ranks)  # noqa: E731
        if task.alone:
            found[key] |= _memory(again, before, ranks.device)
        else:
            found[key]["traffic"] = traffic_of(again)
    parameters = sum(p.numel() for p in setting.model().parameters())
    return {"title": setting.workload.title, "parameters": parameters, "ways": found}


def _started(key: str, setting: Setting, data: list[Any], ranks: Ranks) -> tuple[Run | None, str]:
    """A way, built and warm. Every rank goes on without it where one of them cannot run it."""
    run, complaint = None, ""
    ranks.meet()
    start = time.perf_counter()
    try:
        run = Run(WAYS[key].build(setting))
        for first in range(0, len(data), setting.k):
            _window(run, data[first : first + setting.k], ranks)
        run.warm_up = time.perf_counter() - start
    except Exception as error:
        complaint = f"{type(error).__name__}: {error}".strip() or traceback.format_exc()
    complaint = ranks.failure(complaint)
    return (None if complaint else run), complaint


def _turns(ways: list[str], windows: int) -> Iterator[tuple[int, str]]:
    """Each round another order, the same on all ranks: no way always follows the same other one."""
    order = random.Random(0)
    for window in range(windows):
        for key in order.sample(ways, len(ways)):
            yield window, key


def _window(run: Run, data: list[Any], ranks: Ranks, *, timed: bool = False) -> None:
    losses: list[Tensor] = []
    seconds: list[float] = []
    interface = ranks.place.interface
    with _no_garbage_collection():
        before = 0
        for i, batch in enumerate(data):
            last = i == len(data) - 1
            if timed and (i == 0 or last):
                ranks.meet()
            if i == 0 and interface:
                before = sent_bytes(interface)
            start = time.perf_counter()
            loss = run.micro_step(batch, last)
            ranks.finish_device()
            seconds.append(time.perf_counter() - start)
            losses.append(loss.detach())
        if timed and interface:
            run.sent.append(sent_bytes(interface) - before)
    run.losses += [loss.item() for loss in losses]
    if timed:
        run.seconds.append(seconds)


def _in_a_row(run: Run, windows: list[list[Any]], ranks: Ranks) -> None:
    """Of each call of a window the mean over these windows; a boundary's with its part of what was left behind."""
    losses: list[Tensor] = []
    seconds = [0.0] * len(windows[0])
    with _no_garbage_collection():
        ranks.meet()
        for number, data in enumerate(windows):
            for i, batch in enumerate(data):
                start = time.perf_counter()
                losses.append(run.micro_step(batch, i == len(data) - 1).detach())
                ranks.finish_device()
                if number == len(windows) - 1 and i == len(data) - 1:
                    getattr(run.micro_step, "settle", lambda: None)()
                seconds[i] += (time.perf_counter() - start) / len(windows)
    run.losses += [loss.item() for loss in losses]
    run.seconds.append(seconds)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection walks all that the compilers left behind: a matter of the process, not of a way."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _result(run: Run) -> dict[str, Any]:
    return {
        "losses": list(run.losses),
        "seconds": run.seconds,
        "sent": run.sent,
        "warm_up": run.warm_up,
    }


def _memory(window: Callable[[], None], before: int | None, device: torch.device) -> dict[str, Any]:
    now = memory.resting(device)
    grown = memory.growth(window, device)
    if now is None or before is None or grown is None:
        return {"memory": None}
    sizes = {"resting": now - before, "peak": now - before + grown}
    return {"memory": {**sizes, "resident": memory.highest_resident()}}
