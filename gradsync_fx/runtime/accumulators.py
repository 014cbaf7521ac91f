"""The accumulators of a window: which parameters have one, what was added since it opened, and their zeroing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

import torch

from gradsync_fx._torch import FakeTensor, has_hooks
from gradsync_fx.capture.tracer import hook_error
from gradsync_fx.comm.flat_buffers import allocate
from gradsync_fx.comm.host_copy import HostCopy
from gradsync_fx.comm.shared_memory import Room, open_room
from gradsync_fx.errors import WindowError
from gradsync_fx.options import Options
from gradsync_fx.planning.setting import accumulator_dtype, part_of
from gradsync_fx.planning.shareable import bytes_of
from gradsync_fx.runtime.captured_facts import CapturedFacts
from gradsync_fx.runtime.state_format import check_fits, foreign_state
from gradsync_fx.user_lines import warn_user
from gradsync_fx.wording import number_of


_GRADIENT = attrgetter("grad")


@dataclass(slots=True)
class _Added:
    """A micro-step of which it is not known whether it counted.

    names: of its parameters, in parts that are open since. weights: of all parts, with this micro-step's. closed: the
    parts that have started anew.
    """

    names: tuple[str, ...]
    weights: HostCopy
    closed: frozenset[int] = frozenset()


class EarlySums(Protocol):
    """Sums that are taken ahead of linear work, of one captured step (prologue.py)."""

    def fold(self) -> None:
        """Their terms go into the accumulators."""

    def drop(self, parts: Collection[int]) -> None:
        """Their terms of these parts are done with, or go; parameters are others from here on."""


class Accumulators:
    """One tensor for each parameter that ever received a gradient, in float32 or wider unless asked otherwise.

    weights: running weight of each part, used where weights are known only when a micro-step has run. A micro-step
    of weight 0 (not finite, or without a token) gave no term: it is as if it had not been.
    """

    def __init__(self, parts: int) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.weights: dict[int, torch.Tensor] = dict.fromkeys(range(parts), torch.zeros(()))
        self.parameters: dict[str, torch.Tensor] = {}
        self._in_window: dict[str, None] = {}
        self._unread: list[_Added] = []
        self._read = dict.fromkeys(self.weights, 0.0)
        self.restored: dict[str, torch.Tensor] = {}
        self._part_of: dict[str, int] = {}
        self._trainable: dict[str, bool] = {}
        self._given: Counter[str] = Counter()
        # The names that were added last, and how often again since: they are counted when somebody asks.
        self._latest: Collection[str] | None = None
        self._again = 0
        self.early: list[EarlySums] = []

    def fold(self, but: EarlySums | None = None) -> None:
        """Brings in the terms of this window that wait in early sums. but: of a step whose next program does that."""
        for sums in self.early:
            if sums is not but:
                sums.fold()

    def make_room(self, facts: CapturedFacts, options: Options) -> None:
        """An accumulator for every leaf of a new capture; saved sums that waited for it come in."""
        leaves = facts.capture.step.leaves
        room = open_room(bytes_of(facts.shareable, leaves, options))
        for bucket in facts.buckets:
            self._make_bucket(
                {leaves[i].name: leaves[i].parameter for i in bucket.leaves},
                options,
                room if bucket in facts.shareable else None,
            )
        self.make({}, facts.capture.parameters, options)

    def _make_bucket(
        self, wanted: Mapping[str, torch.Tensor], options: Options, room: Room | None
    ) -> None:
        """New sums of one bucket, of one dtype, as views of one flat tensor; those of other layouts by themselves."""
        fresh = {n: p for n, p in wanted.items() if n not in self.sums and p.is_contiguous()}
        if fresh:
            dtype = accumulator_dtype(next(iter(fresh.values())), options)
            views = allocate(list(fresh.values()), dtype, room)
            for (name, parameter), view in zip(fresh.items(), views, strict=True):
                self._keep(name, parameter, view, options)
        for name, parameter in wanted.items():
            self._make(name, parameter, options)

    def make(
        self,
        wanted: Mapping[str, torch.Tensor],
        known: Mapping[str, torch.Tensor],
        options: Options,
    ) -> None:
        """An accumulator for each of `wanted`, and for each of `known` that a saved sum waits for."""
        for name, parameter in wanted.items():
            self._make(name, parameter, options)
        for name in list(self.restored):
            if name not in known:
                raise foreign_state(name, list(known))
            self._make(name, known[name], options)

    def _make(self, name: str, parameter: torch.Tensor, options: Options) -> None:
        if name not in self.sums:
            dtype = accumulator_dtype(parameter, options)
            total = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            self._keep(name, parameter, total, options)
        if name in self.restored:
            check_fits(name, self.sums[name], self.restored[name])
            self.sums[name].copy_(self.restored[name])
            del self.restored[name]  # only now: a call that was refused is made again

    def _keep(
        self, name: str, parameter: torch.Tensor, total: torch.Tensor, options: Options
    ) -> None:
        self.sums[name] = total
        self.parameters[name], self._part_of[name] = parameter, part_of(parameter, options)

    def replace(
        self,
        saved: dict[str, torch.Tensor],
        known: Mapping[str, torch.Tensor],
        options: Options,
    ) -> None:
        """Saved sums, which were checked, in place of those here; a parameter that they do not have had no term.

        known: the parameters of all steps so far; sums of others wait for theirs.
        """
        for total in self.sums.values():
            total.zero_()
        for sums in self.early:
            sums.drop(self.weights)
        self.restored = dict(saved)
        self._trainable.clear()
        for name, parameter in known.items():
            if name in self.restored:
                self._make(name, parameter, options)

    def drop_gradients(self, parameters: Mapping[str, torch.Tensor] | None = None) -> None:
        """`.grad` is None between calls; what stands there is dropped with a warning.

        parameters: by default those that ever had a running sum.
        """
        held = self.parameters if parameters is None else parameters
        if set(map(_GRADIENT, held.values())) <= {None}:
            return
        dropped = [name for name, p in held.items() if p.grad is not None]
        for name in dropped:
            held[name].grad = None
        if dropped:
            warn_user(
                f"{dropped[0]!r} had a .grad ({number_of(len(dropped), 'parameter')} in all): dropped. The "
                "window's gradients are kept in accumulators; see step.gradients()."
            )

    def place_weights(self, beside: torch.Tensor) -> None:
        """Running weights beside the parameters; before the first capture their device is not known.

        Beside fake parameters they are fake, too: there may be no such device.
        """
        for part, weight in self.weights.items():
            if weight.dtype is not torch.float64 or weight.device != beside.device:
                self.weights[part] = beside.new_zeros((), dtype=torch.float64, requires_grad=False)
                if not isinstance(beside, FakeTensor):
                    self.weights[part].copy_(weight)

    def read_in_window(self) -> dict[str, None]:
        """The parameters with a term in the open window.

        Waits for their device where only a weight that was not read yet can tell: for the first micro-step that
        counted, as later ones of the same parameters tell nothing new. What is queued after that one goes on.
        """
        while any(name not in self._in_window for added in self._unread for name in added.names):
            added = self._unread.pop(0)
            for part, weight in zip(self.weights, added.weights.values(), strict=True):
                if part in added.closed:
                    continue
                before, self._read[part] = self._read[part], weight
                if weight != before:
                    mine = (name for name in added.names if self._part_of[name] == part)
                    self._in_window.update(dict.fromkeys(mine))
        return self._in_window

    def given(self) -> Collection[str]:
        """The parameters with a term in the open window, if it counted: nobody waits to know that."""
        self._count_again()
        return {**self._in_window, **self._given}

    def in_every(self, names: Collection[str], micro_steps: int) -> bool:
        """Whether each of these, and no other parameter, was given a term by every micro-step of the open window."""
        self._count_again()
        wanted = dict.fromkeys(names, micro_steps) if micro_steps else {}
        return self._given == wanted

    def weights_read(self) -> tuple[float, ...]:
        """The weight of each part so far, as far as `read_in_window` read it: 0 for certain where nothing counted."""
        self.read_in_window()
        if all(weight.device.type == "cpu" for weight in self.weights.values()):
            return tuple(float(weight) for weight in self.weights.values())
        return tuple(self._read.values())

    def restore_in_window(self, names: Collection[str]) -> None:
        """As saved, beside the weights that were saved with it."""
        self._unread.clear()
        self._count_again()
        self._latest = None
        self._given.clear()
        self._in_window = dict.fromkeys(names)
        self._read = {part: float(weight) for part, weight in self.weights.items()}

    def names(self, parts: Collection[int]) -> list[str]:
        """Parameters of these parts with a term in the open window; waits as `read_in_window` does."""
        return [name for name in self.read_in_window() if self._part_of[name] in parts]

    def added(self, names: Collection[str], *, weighed: bool) -> None:
        """A micro-step put its terms for these parameters in. weighed: unless its weight, added already, is 0."""
        if names is self._latest and not weighed:
            self._again += 1
            return
        self._count_again()
        self._latest = None if weighed else names
        self._given.update(names)
        if weighed:
            # Read when somebody asks: a call that closes nothing doesn't wait for its device.
            now = HostCopy(torch.stack(list(self.weights.values())))
            self._unread.append(_Added(tuple(names), now))
        else:
            self._in_window.update(dict.fromkeys(names))

    def _count_again(self) -> None:
        if self._latest is not None and self._again:
            self._given.update(dict.fromkeys(self._latest, self._again))
        self._again = 0

    def closed(self, parts: Collection[int]) -> None:
        """These parts start anew; their sums were reset by the program that closed them."""
        self._count_again()
        self._latest = None
        for held in (self._in_window, self._given):
            for name in [name for name in held if self._part_of[name] in parts]:
                del held[name]
        for added in self._unread:
            added.names = tuple(n for n in added.names if self._part_of[n] not in parts)
            added.closed = added.closed.union(parts)
        self._unread = [added for added in self._unread if added.names]
        self._read.update(dict.fromkeys(parts, 0.0))
        for sums in self.early:
            sums.drop(parts)
        if not self._in_window:
            self._trainable.clear()

    def clear(self, parts: Collection[int]) -> None:
        """These parts start anew without an update."""
        for name, part in self._part_of.items():
            if part in parts:
                self.sums[name].zero_()
        for part in parts:
            self.weights[part].zero_()
        self.closed(parts)

    def toggled(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """An eager call may leave `requires_grad` changed: its next one sets it again, and torch goes by it."""
        if self._trainable:  # a window is open
            self._trainable |= {n: p.requires_grad for n, p in parameters.items()}

    def check_trainable(self, parameters: Mapping[str, torch.Tensor], where: str) -> None:
        """Raises `WindowError` when `requires_grad` of a parameter changed since the window opened.

        And `CaptureError` for a gradient hook that came after the capture: it would never run.
        """
        for name, parameter in parameters.items():
            if has_hooks(parameter):
                raise hook_error(name)
            before = self._trainable.setdefault(name, parameter.requires_grad)
            if before != parameter.requires_grad:
                raise WindowError(
                    f"requires_grad of {name!r}",
                    seen=f"it changed from {before} to {not before} inside a window ({where})",
                    wanted="a change between two windows",
                    fix="change it at a boundary, or call step.flush() or step.discard() first",
                )
