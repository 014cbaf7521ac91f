"""Module buffers over ranks, as DDP has them: rank 0's at the start of a window, at every call, or each its own.

Where rank 0 has no data, it is the first rank that has: as with DDP's `join`, what lives on is of new data, and when
all data has ended all ranks have the same.

That rank's buffers for the next window are fetched while all ranks meet at the boundary and put in place at each rank's
own first call there: a rank whose data ended does not make that call, and nobody may wait for it.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from gradsync_fx.comm.rendezvous import Line, Meeting, broadcast
from gradsync_fx.errors import RanksDisagreeError
from gradsync_fx.runtime.capture_cache import Catalogue
from gradsync_fx.runtime.protocol import StepProtocol
from gradsync_fx.runtime.refusals import another_object
from gradsync_fx.wording import number_of


Buffers = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Known:
    """Of the captures so far. steps: their number. every: all buffers. shared: those that ranks send, in an order that
    is the same on all ranks. number: see `ModuleBuffers.number`."""

    steps: int
    every: Buffers
    shared: Buffers
    number: int


class ModuleBuffers:
    """The buffers of the step's modules, of all branches that were captured so far.

    fetched: what was fetched for the next window, by name.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self.fetched: Buffers = {}
        self._restored: Buffers = {}
        self._waiting = False
        self._source = 0
        self._known = _Known(0, {}, {}, 0)

    def _met(self) -> _Known:
        """Looked through once for each new capture, not in each call."""
        steps = self._catalogue.steps
        if self._known.steps != len(steps):
            every: Buffers = {}
            shared: Buffers = {}
            for step in steps if steps[0].setting.group is not None else ():
                for name, buffer in step.objects.buffers.items():
                    if every.setdefault(name, buffer) is not buffer:
                        raise another_object(f"buffer {name!r}", "another model object")
                if step.setting.broadcast_buffers != "never":
                    shared |= step.setting.shared_buffers
            shared = dict(sorted(shared.items()))
            forms = [(n, tuple(b.shape), str(b.dtype)) for n, b in shared.items()]
            number = zlib.crc32(repr(forms).encode()) if forms else 0
            self._known = _Known(len(steps), every, shared, number)
        return self._known

    def number(self) -> int:
        """Equal on two ranks exactly when they send the same buffers; 0 for none."""
        return self._met().number

    def follow(self, line: Line, meeting: Meeting) -> None:
        """Whose buffers count from here on. Raises `RanksDisagreeError` where ranks would send different ones."""
        if len({p.buffers for p in meeting.ranks}) > 1:
            raise _apart(line.texts("\0".join(self._met().shared)))
        self._source = next(iter(meeting.fed), self._source)

    def first(self, step: StepProtocol) -> None:
        """All ranks make their first capture: the one time that rank 0's buffers come at once."""
        self._send(step, 0)
        if step.setting.broadcast_buffers == "window_start":
            self.fetched = {name: b.clone() for name, b in self._met().shared.items()}

    def before(self, step: StepProtocol) -> None:
        """Before a micro-step."""
        every = self._met().every
        for name in self._restored.keys() & every.keys():
            every[name].copy_(self._restored.pop(name))
        self.participate(step)
        if self._waiting:
            for name in self.fetched.keys() & every.keys():
                every[name].copy_(self.fetched[name])
        self._waiting = False

    def participate(self, step: StepProtocol) -> None:
        """What every rank does at every call, also one without data, where buffers are broadcast at every call."""
        if step.setting.broadcast_buffers == "every":
            self._send(step, self._source)

    def after_boundary(self, step: StepProtocol) -> None:
        """All ranks meet."""
        group, shared = step.setting.group, self._met().shared
        if group is not None and step.setting.broadcast_buffers == "window_start":
            self.fetched |= {name: value.clone() for name, value in shared.items()}
            broadcast(group, [self.fetched[name] for name in shared], self._source)
            self._waiting = True

    def at_end(self, step: StepProtocol) -> None:
        """All ranks' data has ended."""
        if self._send(step, self._source):
            self._waiting = False

    def _send(self, step: StepProtocol, source: int) -> bool:
        group, shared = step.setting.group, self._met().shared
        if group is None or not shared:
            return False
        broadcast(group, list(shared.values()), source)
        return True

    def own(self) -> Buffers:
        """This rank's buffers as they are: inside a window they differ between ranks, and a model's checkpoint that
        all ranks write together holds one rank's."""
        return self._met().every

    def restore(self, fetched: Buffers, waiting: bool, own: Buffers) -> None:
        """Takes saved values; this rank's own buffers go in place at the next call, after any loading of the model."""
        self.fetched, self._waiting, self._restored = dict(fetched), waiting, dict(own)

    @property
    def waiting(self) -> bool:
        """Whether what was fetched has yet to be put in place."""
        return self._waiting


def _apart(told: list[str]) -> RanksDisagreeError:
    """told: the names of each rank's buffers."""
    held: list[set[str]] = [set(text.split("\0")) - {""} for text in told]
    apart = sorted(set[str]().union(*held) - held[0].intersection(*held))
    without = [rank for rank, names in enumerate(held) if apart and apart[0] not in names]
    return RanksDisagreeError(
        f"buffer {apart[0]!r}" if apart else "the buffers of the model",
        seen=f"the steps of ranks {without} have not reached it so far ({number_of(len(apart), 'buffer')} in all)"
        if apart
        else "their shapes or dtypes differ among the ranks",
        wanted="the same module buffers on all ranks",
        fix="call step.prepare(...) once for each branch of the step, on every rank, before training; or pass "
        'broadcast_buffers="never"',
    )
