"""A step that runs eagerly: its objects, its group of ranks, and the reduction of what a window summed.

For the runtime it is what a `CapturedStep` is (runtime/protocol.py). There are no programs; the user's function is the
micro-step, and what it did with its gradients is done again to close a window without data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradsync_fx.capture.names import batch_norms, ddp_modules, named_tensors
from gradsync_fx.capture.reachable import Found
from gradsync_fx.comm.collectives import OwnCollectives
from gradsync_fx.comm.rendezvous import EAGER
from gradsync_fx.eager.actions import Action, Clipping, OptimizerStep, Schedule, Values
from gradsync_fx.errors import CaptureError, OptionError
from gradsync_fx.optim.state import in_groups, parameters_of
from gradsync_fx.optim.zeroing import own_among
from gradsync_fx.options import Options
from gradsync_fx.planning.setting import Setting, find_setting, part_of, wire_bytes
from gradsync_fx.runtime.accumulators import Accumulators
from gradsync_fx.runtime.consistency import Integrity
from gradsync_fx.runtime.ending import Closed, Ending
from gradsync_fx.runtime.refusals import no_call_yet


@dataclass(frozen=True, slots=True)
class TouchedObjects:
    """What a `Capture` holds of the user's objects."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    ddp: tuple[DistributedDataParallel, ...]
    optimizers: tuple[Optimizer, ...]
    batch_norms: tuple[str, ...]

    def same_as(self, other: TouchedObjects) -> bool:
        """Whether both are the same parameters and optimizers."""

        def ids(objects: TouchedObjects) -> list[int]:
            return sorted(map(id, [*objects.parameters.values(), *objects.optimizers]))

        return ids(self) == ids(other)


class EagerStep:
    """One user function with the objects that it was found to touch.

    why: the error that kept it from being captured. actions: what the latest call did with its gradients; signs: how
    (effects.py). norms: what clippings gave in the latest call, or end of a window without one. weight: of the latest
    call, where calls weigh. sums: the window's, by
    parameter name. trained: parameters that ever received a gradient. settled: it has nothing to share in memory.
    collectives: its own, once a call has shown whether it has any. clearing: modules whose `zero_grad` is the user's
    own. owners_of_tensors: where a call may put tensors (rebound.py).
    """

    settled = True

    def __init__(
        self,
        found: Found,
        options: Options,
        sums: dict[str, torch.Tensor],
        why: CaptureError,
    ) -> None:
        self.options, self.why, self.sums = options, why, sums
        self.owners_of_tensors = found.owners
        seen = found.observed()
        parameters, buffers = named_tensors(seen)
        known = {id(p) for p in parameters.values()}
        owned = {id(p) for o in found.optimizers for p in parameters_of(o)}
        # A tensor that no optimizer holds is an input: its gradient is its own.
        mine = {n: t for n, t in found.tensors.items() if id(t) in owned - known}
        optimizers = tuple(found.optimizers)
        self.objects = TouchedObjects(
            parameters | mine, buffers, ddp_modules(seen), optimizers, batch_norms(seen)
        )
        self.setting: Setting = find_setting(self.objects, options)
        if options.sync_each_batch:
            raise OptionError(
                "argument 'sync_each_batch'",
                seen=f"True, with a step that runs eagerly, as it cannot be captured ({why.culprit})",
                wanted="one reduction for each window",
                fix="leave it out, or mend the step so that it can be captured",
            )
        if options.manual and self.speaks_in_every_call:
            raise OptionError(
                "argument 'broadcast_buffers'",
                seen='"every", with gradient_accumulation_steps="manual" and a step that runs eagerly',
                wanted='"window_start" or "never"',
                fix="leave it out, or mend the step so that it can be captured",
            )
        self.weighs = options.reduction == "weighted" or options.skip_nonfinite
        self.clearing = own_among(found.modules)
        self.name_of = {id(p): n for n, p in self.objects.parameters.items()}
        self.trained: set[str] = set()
        self.actions: list[Action] = []
        self.signs: dict[Any, list[int]] = {}
        self.collectives = OwnCollectives()
        self.norms: list[torch.Tensor] = []
        self.weight: torch.Tensor | None = None

    # Of protocol.py.

    @property
    def updates(self) -> bool:
        """Whether it is known how a window is closed without data."""
        return any(isinstance(action, OptimizerStep) for action in self.actions)

    @property
    def can_close(self) -> bool:
        """Whether it can take part in the end of a window: with an update where it `updates`."""
        return self.updates or not self.options.manual

    @property
    def speaks_in_every_call(self) -> bool:
        if self.setting.group is None:
            return False
        own = self.collectives.each_call > 0 and not self.options.manual
        return own or (
            self.setting.broadcast_buffers == "every" and bool(self.setting.shared_buffers)
        )

    @property
    def waited(self) -> tuple[int, float]:
        """Its reductions are calls of torch's, which nobody times."""
        return 0, 0.0

    def take_weight(self) -> torch.Tensor | None:
        weight, self.weight = self.weight, None
        return weight if self.options.skip_nonfinite else None

    def bytes_sent(self, closing: Collection[int]) -> int:
        """Of all sums of these parts that are reduced, whether this window has terms of them or not."""
        held = [n for i in self.in_turn(closing) for n in self.held_by(i) if n in self.reduced]
        known, setting = self.objects.parameters, self.setting
        alone = setting.group is None
        return 0 if alone else sum(wire_bytes(known[n], setting, self.options) for n in held)

    def layout_for(self, in_window: Collection[str]) -> int:
        """Which parameters a call gives gradients to is known when it has run: never one layout for all ranks."""
        return EAGER

    def certain(self, in_window: Collection[str], closing: Collection[int]) -> bool:
        """That, too, is asked gradient by gradient."""
        return False

    def updates_told(self, parts: Collection[int]) -> list[str]:
        """It divides none."""
        return []

    def masks(self, accumulators: Accumulators, closing: frozenset[int], summed: int) -> bool:
        """It has no program of its own."""
        return False

    def in_turn(self, closing: Collection[int]) -> list[int]:
        """Optimizers of the closing parts, by number, in the order in which the step looks at their gradients."""
        read = [
            i for action in self.actions if not isinstance(action, Schedule) for i in action.reads
        ]
        read = read if self.actions else list(range(len(self.objects.optimizers)))
        return [i for i in dict.fromkeys(read) if self.part_of_optimizer(i) in closing]

    # What the step consists of.

    def part_of_optimizer(self, number: int) -> int:
        """The part of the window that an optimizer's parameters belong to."""
        held = parameters_of(self.objects.optimizers[number])
        return part_of(held[0], self.options) if held else 0

    def owners(self) -> dict[str, int]:
        """The number of the optimizer that holds each parameter; of the first, where several do."""
        numbers = range(len(self.objects.optimizers))
        return {name: number for number in reversed(numbers) for name in self.held_by(number)}

    def held_by(self, number: int) -> frozenset[str]:
        optimizers = self.objects.optimizers
        mine = set(map(id, in_groups(optimizers[number])))
        others = {id(p) for o in optimizers for p in in_groups(o)} - mine
        held = [p for p in parameters_of(optimizers[number]) if id(p) not in others]
        return frozenset(self.name_of[id(p)] for p in held if id(p) in self.name_of)

    def number_of(self, optimizer: Optimizer) -> int:
        """Raises `CaptureError` for an optimizer that neither arguments nor names of the step led to."""
        for i, known in enumerate(self.objects.optimizers):
            if known is optimizer:
                return i
        raise CaptureError(
            f"optimizer {type(optimizer).__name__}",
            seen="the step reaches it by a way that is not known before it runs",
            wanted="an optimizer among the step's arguments, or in what they, its closure and its globals hold",
            fix="pass the optimizer to the step as an argument",
        )

    @property
    def early_sums(self) -> None:
        """Every term goes into its parameter's own sum."""
        return None

    @property
    def reduced(self) -> frozenset[str]:
        """Parameters whose gradients are reduced over the ranks of the window, and so stay the same on all of them."""
        return frozenset(self.sums).difference(self.setting.ignored)

    # The end of a window.

    def close(self, ending: Ending, args: list[Any] | None) -> Closed:
        """A window that ends without data (its own calls end theirs: window.py), one optimizer after the other."""
        self.norms = []
        numbers = self.in_turn(ending.meeting.closing)
        updated = [i for i in numbers if self.settle(ending, i, ready=self.updates)]
        self.repeat(updated)
        self.schedule(updated)
        self.forget_gradients()
        return Closed([], frozenset(self.part_of_optimizer(i) for i in updated))

    def settle(self, ending: Ending, number: int, *, ready: bool = True) -> bool:
        """Reduces what the ranks' windows hold for one optimizer; says whether it is anything.

        ready: whether this rank can make the update.
        """
        held, part, sums = self.held_by(number), self.part_of_optimizer(number), ending.accumulators
        names = ending.line.names([n for n in sums.read_in_window() if n in held])
        totals, late = ending.totals(ready=ready, weighs=self.weighs)
        if names and late:
            raise no_call_yet(late)
        if not names or totals[part] <= 0 or ending.refused:
            return False
        known = self.objects.parameters
        sums.make({name: known[name] for name in names}, known, ending.options)
        divisors = ending.divisors(totals)
        ending.integrity.writes(updates=True)
        self.leave_out(held.difference(names))
        self.reduce(names, divisors["ranks", part], divisors["local", part])
        return ending.counts()

    def participate(self, accumulators: Accumulators, integrity: Integrity) -> None:
        """An accumulate call reduces nothing: `sync_each_batch` is refused."""

    def change_steps(self, options: Options) -> None:
        self.options = options

    def reduce(self, names: Collection[str], divisor: float, local: float) -> None:
        """Sums over the ranks, divided; they become the parameters' gradients, and the sums zero.

        local: what sums that stay on their rank are divided by.
        """
        for group, bucket in self.buckets(sorted(names)):
            flat = torch.cat([self.sums[name].view(-1) for name in bucket])
            held = flat.dtype
            if held.is_complex:
                flat = torch.view_as_real(flat)
            wire = self.setting.wire_dtype or flat.dtype
            if group is not None:
                # float16 ends at 65504: divided before it is sent, then.
                first = wire is torch.float16
                sent = (flat / divisor if first else flat).to(wire)
                if self.setting.levels is not None:
                    self.setting.levels.allreduce([sent]).wait()
                else:
                    dist.all_reduce(sent, group=group)
                flat = sent.to(flat.dtype) if first else sent.to(flat.dtype) / divisor
            else:
                flat = flat / local
            if held.is_complex:
                flat = torch.view_as_complex(flat)
            sizes = [self.sums[name].numel() for name in bucket]
            for name, piece in zip(bucket, flat.split(sizes), strict=True):
                self._install(self.objects.parameters[name], piece)
                self.sums[name].zero_()

    def leave_out(self, names: Collection[str]) -> None:
        """Parameters without a term that counts have no gradient; a clipping that holds it by now sees zeros."""
        for name in names:
            parameter = self.objects.parameters[name]
            if parameter.grad is not None:
                parameter.grad.zero_()
                parameter.grad = None

    def _install(self, parameter: torch.Tensor, flat: torch.Tensor) -> None:
        value = flat.view(parameter.shape).to(parameter.dtype)
        if parameter.grad is None or parameter.grad.is_sparse:
            parameter.grad = value.clone()
        else:
            parameter.grad.copy_(value)  # in place: clip_grad_norm_ holds the tensors by now

    def buckets(self, names: list[str]) -> Iterator[tuple[Any, list[str]]]:
        """Names in one bucket while group, dtype and device agree, each with the group to reduce over (None: none)."""
        group = self.setting.group
        open_buckets: dict[tuple[Any, ...], list[str]] = {}
        for name in names:
            total, mine = self.sums[name], None if name in self.setting.ignored else group
            key = (mine, total.dtype, total.device)
            bucket = open_buckets.setdefault(key, [])
            bucket.append(name)
            wire = self.setting.wire_dtype or total.dtype
            if (
                sum(self.sums[n].numel() for n in bucket) * wire.itemsize
                >= self.setting.bucket_bytes
            ):
                yield mine, open_buckets.pop(key)
        for (mine, *_), bucket in open_buckets.items():
            yield mine, bucket

    def repeat(self, updated: Collection[int]) -> None:
        """What the latest call did with the gradients of these optimizers, with those that are in place now."""
        values: Values = {}
        for action in self.actions:
            if not isinstance(action, Schedule) and set(action.reads) <= set(updated):
                action.repeat(values)
                if isinstance(action, Clipping) and action.slot in values:
                    self.norms.append(values[action.slot])

    def schedule(self, updated: Collection[int]) -> None:
        """Schedulers step once for each update."""
        for action in self.actions:
            if isinstance(action, Schedule) and set(action.reads) <= set(updated):
                action.repeat({})

    def forget_gradients(self) -> None:
        """`.grad` is None between calls."""
        for parameter in self.objects.parameters.values():
            parameter.grad = None
