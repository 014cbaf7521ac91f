"""Module buffers over ranks, as DDP has them: rank 0's at the start of a window, at every call, or each its own.

Where rank 0 has no data, it is the first rank that has: as with DDP's `join`, what lives on is of new data, and when
all data has ended all ranks have the same.

That rank's buffers for the next window are fetched while all ranks meet at the boundary and put in place at each rank's
own first call there: a rank whose data ended does not make that call, and nobody may wait for it.
"""

from __future__ import annotations

import torch

from gradsync_fx.comm.rendezvous import Meeting, broadcast
from gradsync_fx.runtime.protocol import StepProtocol


class ModuleBuffers:
    """The buffers of the step's modules, and what was fetched for the next window."""

    def __init__(self) -> None:
        self.fetched: dict[str, torch.Tensor] = {}
        self._here: dict[str, torch.Tensor] = {}
        self._restored: dict[str, torch.Tensor] = {}
        self._waiting = False
        self._source = 0

    def follow(self, meeting: Meeting) -> None:
        """Whose buffers count from here on."""
        self._source = next(iter(meeting.fed), self._source)

    def first(self, step: StepProtocol) -> None:
        """All ranks make their first capture: the one time that rank 0's buffers come at once."""
        group, buffers = step.setting.group, step.setting.shared_buffers
        self._here = step.objects.buffers if group is not None else {}
        if group is not None and step.setting.broadcast_buffers != "never" and buffers:
            broadcast(group, list(buffers.values()))
        if self._follows(step):
            self.fetched = {name: b.clone() for name, b in buffers.items()}

    def before(self, step: StepProtocol) -> None:
        """Before a micro-step."""
        for name, value in self._restored.items():
            step.objects.buffers[name].copy_(value)
        self._restored = {}
        self.participate(step)
        if self._waiting:
            for name, value in self.fetched.items():
                step.objects.buffers[name].copy_(value)
        self._waiting = False

    def participate(self, step: StepProtocol) -> None:
        """What every rank does at every call, also one without data, where buffers are broadcast at every call."""
        group, buffers = step.setting.group, step.setting.shared_buffers
        if group is not None and step.setting.broadcast_buffers == "every" and buffers:
            broadcast(group, list(buffers.values()), self._source)

    def after_boundary(self, step: StepProtocol) -> None:
        """All ranks meet."""
        group = step.setting.group
        if group is not None and self._follows(step):
            for name, value in step.setting.shared_buffers.items():
                self.fetched[name] = value.clone()
            names = step.setting.shared_buffers
            broadcast(group, [self.fetched[name] for name in names], self._source)
            self._waiting = True

    def at_end(self, step: StepProtocol) -> None:
        """All ranks' data has ended."""
        group, buffers = step.setting.group, step.setting.shared_buffers
        if group is not None and step.setting.broadcast_buffers != "never" and buffers:
            broadcast(group, list(buffers.values()), self._source)
            self._waiting = False

    def own(self) -> dict[str, torch.Tensor]:
        """This rank's buffers as they are: inside a window they differ between ranks, and a model's checkpoint that
        all ranks write together holds one rank's."""
        return self._here

    def restore(
        self, fetched: dict[str, torch.Tensor], waiting: bool, own: dict[str, torch.Tensor]
    ) -> None:
        """Takes saved values; this rank's own buffers go in place at the next call, after any loading of the model."""
        self.fetched, self._waiting, self._restored = dict(fetched), waiting, dict(own)

    @property
    def waiting(self) -> bool:
        """Whether what was fetched has yet to be put in place."""
        return self._waiting

    def _follows(self, step: StepProtocol) -> bool:
        setting = step.setting
        return setting.group is not None and setting.broadcast_buffers == "window_start"
