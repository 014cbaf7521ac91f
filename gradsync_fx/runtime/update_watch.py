"""Records of updates for `on_update`: what a window did, put together where its callback asks for nothing that waits.

    call's result, seconds -> sums of the losses -----------+
    meeting of the ranks   -> terms, rates, bytes ----------+-> UpdateRecord -> on_update
    the update             -> norms, whether there was one -+

A mean over ranks needs all of them, and a callback may be there on one rank only. So the first call finds out whether
any rank has one; from then on each window's losses are summed over the ranks, under way while the next call begins.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gradsync_fx.comm.host_group import host_group
from gradsync_fx.comm.rendezvous import Line, Meeting
from gradsync_fx.options import Options
from gradsync_fx.planning.setting import Setting
from gradsync_fx.runtime.protocol import StepProtocol
from gradsync_fx.update_record import UpdateRecord, WindowLosses


# The latest exchanges of watches that are gone. Gloo's thread lets go of an exchange a little after it is over; were it
# the last to hold the tensors, it would ask for Python, which ends the process where Python is ending itself.
_LATEST: deque[WindowLosses] = deque(maxlen=16)


@dataclass(slots=True)
class _Window:
    """A window that has closed, until its record can be made."""

    micro_step: int
    slots: int
    terms: int | None
    bytes_sent: int
    exposed: float | None
    rates: tuple[Any, ...]
    norms: tuple[torch.Tensor, ...]
    seconds: tuple[float, float] = (0.0, 0.0)
    losses: WindowLosses | None = None
    update: int | None = None


class UpdateWatch:
    """Puts records together for one executor. callback: None where only other ranks have one."""

    def __init__(self, options: Options, setting: Setting, device: torch.device) -> None:
        self._callback, self._options = options.on_update, options
        self._setting, self._device = setting, device
        self._losses = self._none_yet()
        self._seconds = 0.0
        self._rates: tuple[Any, ...] = ()
        self._waited = (0, 0.0)
        self._closed: _Window | None = None  # in the call that is going on
        self._unknown: _Window | None = None  # whether there was an update
        self._ready: list[_Window] = []
        self._sent: deque[WindowLosses] = deque(maxlen=2)
        weakref.finalize(self, _end, self._sent)

    @classmethod
    def wanted(
        cls, line: Line, options: Options, setting: Setting, parameters: Iterable[torch.Tensor]
    ) -> UpdateWatch | None:
        """Asks all ranks, once: None where none of them has a callback."""
        asks = options.on_update is not None
        if not any(asked for (asked,) in line.gather([asks])):
            return None
        devices = (p.device for p in parameters)
        return cls(options, setting, next(devices, torch.device("cpu")))

    def _none_yet(self) -> WindowLosses:
        return WindowLosses(torch.zeros(3, dtype=torch.float64, device=self._device))

    def closing(self, step: StepProtocol) -> None:
        """A window is about to be closed: rates as its update uses them."""
        groups = [g for o in step.objects.optimizers for g in getattr(o, "param_groups", ())]
        self._rates = tuple(_now(g["lr"]) for g in groups if "lr" in g)
        self._waited = step.waited

    def closed(self, step: StepProtocol, meeting: Meeting, micro_step: int) -> None:
        """The window has closed."""
        self._closed = self._unknown = _Window(
            micro_step=micro_step,
            slots=sum(p.pending for p in meeting.ranks),
            terms=None if self._options.skip_nonfinite else sum(p.fed for p in meeting.ranks),
            bytes_sent=self._bytes(step, meeting),
            exposed=self._exposed(step),
            rates=self._rates,
            norms=tuple(map(_now, step.norms)),  # later calls give NaN for them
        )

    def _bytes(self, step: StepProtocol, meeting: Meeting) -> int:
        times = meeting.pending if self._options.sync_each_batch else 1
        return times * step.bytes_sent(meeting.closing)

    def _exposed(self, step: StepProtocol) -> float | None:
        if self._setting.group is None:
            return 0.0
        (before, since), (waits, seconds) = self._waited, step.waited
        return seconds - since if waits > before else None

    def counted(self, update: int, *, updated: bool) -> None:
        """Whether the latest window that closed made an update, and its number."""
        window, self._unknown = self._unknown, None
        if window is None or not updated:
            return
        window.update = update
        self._ready.append(window)

    def called(self, step: StepProtocol | None, result: Any, seconds: float) -> None:
        """A call has ended. step: None where it added nothing."""
        if step is not None:
            self._add(loss_of(result), step.take_weight())
        self.ended(seconds)

    def ended(self, seconds: float) -> None:
        """A call, or what closes a window without one, is over."""
        if self._closed is None:
            self._seconds += seconds
            return
        window, self._closed = self._closed, None
        window.seconds, window.losses = (self._seconds, seconds), self._losses
        self._seconds, self._losses = 0.0, self._none_yet()
        group = self._setting.group
        if group is not None:
            on = host_group(group) if self._device.type == "cpu" else group
            window.losses.work = dist.all_reduce(window.losses.sums, group=on, async_op=True)
            self._sent.append(window.losses)

    def _add(self, loss: torch.Tensor | None, weight: torch.Tensor | None) -> None:
        """weight: 0 where the call does not count: then its loss does not, either."""
        sums = self._losses.sums
        counts = torch.ones_like(sums[0])
        if weight is not None:
            counts = (weight.detach().reshape(()).to(sums, non_blocking=True) > 0).to(sums.dtype)
        if loss is not None:
            value = loss.detach().to(sums, non_blocking=True)
            sums[0] += torch.where(counts > 0, value, torch.zeros_like(value))
            sums[1] += counts
        sums[2] += counts

    def discarded(self) -> None:
        """The open window is dropped, or another one takes its place."""
        self._losses, self._seconds = self._none_yet(), 0.0

    def tell(self) -> None:
        """Calls the callback for what is ready. What it raises is raised, with a note of whose it is."""
        while self._ready and self._ready[0].losses is not None:
            record = self._record(self._ready.pop(0))
            if self._callback is None:
                continue
            try:
                self._callback(record)
            except BaseException as failure:
                failure.add_note(
                    f"raised by the on_update callback, of update {record.update}; the update is made, and its window "
                    "is closed"
                )
                raise

    def _record(self, window: _Window) -> UpdateRecord:
        assert window.update is not None
        assert window.losses is not None
        before, last = window.seconds
        return UpdateRecord(
            update=window.update,
            micro_step=window.micro_step,
            slots=window.slots,
            bytes_sent=window.bytes_sent,
            accumulate_seconds=before,
            boundary_seconds=last,
            exposed_seconds=window.exposed,
            _rates=window.rates,
            _terms=window.terms,
            _losses=window.losses,
            _norms=window.norms,
        )


def tell(watch: UpdateWatch | None) -> None:
    """Calls `on_update` for updates that are known by now; for when a call is over."""
    if watch is not None:
        watch.tell()


@contextmanager
def timed(watch: UpdateWatch | None) -> Iterator[None]:
    """What closes a window without a call."""
    start = time.perf_counter()
    try:
        yield
    finally:
        if watch is not None:
            watch.ended(time.perf_counter() - start)


def _now(value: Any) -> Any:
    """A number that may change later, as it is now."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def loss_of(result: Any) -> torch.Tensor | None:
    """The scalar that a step returns: alone, first in a tuple or a list, or under "loss"."""
    if isinstance(result, Mapping):
        result = result.get("loss")
    elif isinstance(result, Sequence) and not isinstance(result, str) and result:
        result = result[0]
    if not isinstance(result, torch.Tensor) or not result.is_floating_point():
        return None
    return result.reshape(()) if result.numel() == 1 else None


def _end(sent: deque[WindowLosses]) -> None:
    """The finalizer of a watch, at the end of the process at the latest: no exchange is under way after it."""
    for losses in sent:
        with suppress(RuntimeError):  # another rank is gone, and nobody reads these any more
            losses.wait()
    _LATEST.extend(sent)
