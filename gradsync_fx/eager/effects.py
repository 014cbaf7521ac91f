"""Defers effects of a step that runs eagerly, by the rules of effects.py: what belongs to the update waits for it.

A trace reads from its graph what depends on gradients and on updated parameters. Here the same is followed while the
step runs: for each storage that it makes is known what it is made of. A write of such a value to what was there before
the call is made for real where the window ends with the call; elsewhere it is made on a copy, which is dropped.

Such writes are noted with all that they are made of (actions.py): a window that ends without data makes them
again. They have to be the same in all calls of a window: a Python number that counts calls would end in an average
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch

from gradsync_fx._torch import tree_leaves, tree_map_only
from gradsync_fx.capture.untouched import storage_of
from gradsync_fx.eager.actions import Action, Done, Piece, Put
from gradsync_fx.eager.step import EagerStep
from gradsync_fx.eager.storages import Count, Held, Origin, alive, as_given, on_copies, written_by
from gradsync_fx.errors import CaptureError
from gradsync_fx.user_lines import user_line


ITEM = torch.ops.aten._local_scalar_dense.default


# By what is written: one number for each late write of a call, equal where the same is written in the same way.
Signs = dict[Any, list[int]]


class CallInProgress(Protocol):
    """What is asked of the call in progress: `EagerCall`."""

    actions: list[Action]
    updated: dict[int, bool]

    @property
    def stepped(self) -> set[int]: ...
    def closes(self, number: int) -> bool: ...
    def look(self, number: int) -> None: ...


class Effects:
    """Follows one call. earlier: the signs of late writes in the window's call before, by what they write."""

    def __init__(self, step: EagerStep, call: CallInProgress, earlier: Signs | None) -> None:
        self._step, self._call, self._earlier = step, call, earlier
        self.signs: Signs = {}
        self._counts: list[Count] = []
        self._fed: set[int] = set()
        self._known: dict[int, Held] = {}
        self.is_paused = self._read_on_host = self._read_updated = False
        self._slots = 0
        known, owners = step.objects.parameters, step.owners()
        self._owner_of = {id(p): owners[name] for name, p in known.items() if name in owners}
        self._parameters = {storage_of(p): owners.get(name) for name, p in known.items()}
        self._buffers = {storage_of(b) for b in step.objects.buffers.values()}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is torch's own, or ours."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    # Gradients, which are attributes.

    def get_grad(self, owner: torch.Tensor) -> torch.Tensor | None:
        """A look at `.grad`."""
        number = self._owner_of.get(id(owner))
        with self.paused():
            if number is not None and owner.grad is not None:
                self._call.look(number)
            gradient = owner.grad
        if number is not None and gradient is not None and storage_of(gradient):
            sign = hash(self._step.name_of[id(owner)])
            origin = Origin(frozenset({number}), gradient=True, sign=sign)
            held = Held(alive(gradient), origin, born=False, parameter=owner)
            self._known[storage_of(gradient)] = held
        return gradient

    def set_grad(self, owner: torch.Tensor, value: torch.Tensor) -> None:
        """`owner.grad = value`."""
        held = self._held(value)
        if id(owner) in self._owner_of and held is not None and held.origin.gradient:
            self._note(_set_grad, (owner, value), {}, held.origin, [], writes=True)
        with self.paused():
            owner.grad = value

    def set_data(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """`target.data = value`."""
        late = self._late(target, self._origin([value]))
        if late is not None:
            self._check_same(target, late)
            self._note(_set_data, (target, value), {}, late, [], writes=True)
        if late is None or self._ready(late):
            owner = self._parameters.get(storage_of(target), False)
            with self.paused():
                target.data = value
            if owner is not False:
                self._parameters[storage_of(target)] = owner

    def norm(self, value: torch.Tensor, owners: Sequence[int], slot: int) -> None:
        """What a clipping returned."""
        origin = Origin(frozenset(owners), gradient=True, sign=slot)
        self._known[storage_of(value)] = Held(alive(value), origin, slot=slot)

    def new_slot(self) -> int:
        self._slots += 1
        return self._slots

    # Operations.

    def operation(self, function: Any, args: Any, kwargs: Any) -> Any:
        """One operation of the step."""
        if self.is_paused:
            return function(*args, **kwargs)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        targets = written_by(function, args, kwargs)
        origin = self._origin(given, targets, (function, args, kwargs))
        there = [t for t in targets if not self._born(t)]
        late = next((o for t in there if (o := self._late(t, origin)) is not None), None)
        if late is not None:
            for target in there:
                self._check_same(target, late)
        counted = self._counted(there, origin) if late is None else []
        ready = late is None or self._ready(late)
        if function is ITEM:
            self._read_on_host = self._read_on_host or bool(origin.reads)
            self._read_updated = self._read_updated or bool(origin.reads and not origin.gradient)
            self._fed |= origin.kept  # a branch, perhaps, around a write of the update
        made = origin.reads or not origin.data  # what a late write may be made of
        for target in targets if made else ():
            self._keep_start(target)
        with self._nothing_drawn(function, origin):
            copied = (args, kwargs) if ready else on_copies((args, kwargs), there)
            result = function(*copied[0], **copied[1])
        if not ready:
            result = as_given(result, copied, (args, kwargs))
        addresses = {storage_of(t) for t in given}
        fresh = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        fresh = [t for t in fresh if storage_of(t) and storage_of(t) not in addresses]
        for tensor in fresh:
            slot = self.new_slot() if made else None
            self._known[storage_of(tensor)] = Held(alive(tensor), origin, slot=slot)
        if late is not None or (made and (fresh or targets)):
            changed = [h.slot for t in targets if (h := self._held(t)) is not None]
            writes = late is not None or bool(counted)
            self._note(function, args, kwargs, late or origin, fresh, changed, writes=writes)
        for target in targets:
            self._mark(target, origin, late)
        for target, before in counted:
            self._count(target, before, origin)
        return result

    def _counted(
        self, there: list[torch.Tensor], origin: Origin
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What may be counts, with their values."""
        if origin.data:
            return []
        return [(t, t.detach().clone()) for t in there if storage_of(t)]

    def _count(self, target: torch.Tensor, before: torch.Tensor, origin: Origin) -> None:
        everything = frozenset(range(len(self._step.objects.optimizers)))
        late = replace(origin, reads=everything, kept=frozenset({storage_of(target)}))
        action = replace(self._call.actions[-1], reads=tuple(sorted(everything)))
        self._call.actions[-1] = action
        self._counts.append(Count(target, before, late, action))
        if self._call.stepped:  # before that, forward may be made of it
            self._known[storage_of(target)] = Held(alive(target), late, born=False)

    def _settle_counts(self) -> None:
        for count in reversed(self._counts):
            if not count.late.kept & self._fed:
                self._call.actions.remove(count.action)
            elif not self._ready(count.late):
                with torch.no_grad():
                    count.target.copy_(count.before)

    def _origin(
        self, given: list[torch.Tensor], targets: Sequence[torch.Tensor] = (), how: Any = None
    ) -> Origin:
        made, signs = Origin(), list[int]()
        own = {storage_of(t) for t in targets}
        for tensor in given:
            address, held = storage_of(tensor), self._held(tensor)
            if held is not None:
                found = held.origin
                made = made.joined(found)
                signs.append(0 if found.data and not found.reads else found.sign)
            elif address in self._parameters:
                owner = self._parameters[address]
                updated = self._call.stepped & {owner} if owner is not None else set[int]()
                made = made.joined(Origin(frozenset(updated)))
                signs.append(address)
            elif address in self._buffers or address in own:
                made = made.joined(Origin(kept=frozenset({address})))
                signs.append(address)
            else:
                made = made.joined(Origin(kept=frozenset({address}), data=True))
        plain = [v for v in tree_leaves(how[1:]) if isinstance(v, int | float)] if how else []
        return replace(made, sign=hash((how and how[0], *plain, *signs)))

    def _late(self, target: torch.Tensor, origin: Origin) -> Origin | None:
        """Where a write belongs to the update: what it depends on."""
        address = storage_of(target)
        each_call = address in self._buffers and origin.data
        if origin.gradient or (origin.reads and not each_call):
            return origin
        if origin.data or address not in self._parameters:
            return None
        owner, numbers = self._parameters[address], range(len(self._step.objects.optimizers))
        return replace(origin, reads=frozenset(numbers if owner is None else {owner}))

    def _ready(self, late: Origin) -> bool:
        """Whether the window that the write belongs to ends with this call."""
        updated = self._call.updated
        if all(number in updated for number in late.reads):
            return all(updated[number] for number in late.reads)
        return not late.gradient and all(self._call.closes(number) for number in late.reads)

    def _check_same(self, target: torch.Tensor, late: Origin) -> None:
        """Raises `CaptureError` where the window's call before wrote it otherwise."""
        self._fed |= late.kept
        held = self._held(target)
        gradient = held.parameter if held is not None else None
        key = ("grad", id(gradient)) if gradient is not None else storage_of(target)
        self._compare(key, late.sign, lambda: f"write to {self._name(target)}")

    def check_clipping(self, parameters: Sequence[torch.Tensor], numbers: Any) -> None:
        """The same for a clipping of these gradients, with its limits."""
        plain = tuple(v for v in tree_leaves(numbers) if isinstance(v, int | float))
        self._compare(("clip", *map(id, parameters)), hash(plain), lambda: "clipping")

    def _compare(self, key: Any, sign: int, what: Callable[[], str]) -> None:
        found = self.signs.setdefault(key, [])
        # A number read from an updated parameter is another where there is an update.
        found.append(0 if self._read_updated else sign)
        if self._earlier is None or (isinstance(key, tuple) and key not in self._earlier):
            return  # of gradients: another call need not have had them
        before = self._earlier.get(key, [])[len(found) - 1 :][:1]
        if not before or (found[-1] and before[0] not in (0, found[-1])):
            raise _differs(f"{what()}, at {user_line()}")

    # Tensors in the place of others (rebound.py).

    def made_late(self, new: list[torch.Tensor]) -> Origin | None:
        """What tensors are made of that were put in the place of others, where they belong to the update."""
        origins = [held.origin for t in new if (held := self._held(t)) is not None]
        made = Origin()
        for origin in origins:
            made = made.joined(origin)
        if not made.reads:
            return None
        self._fed |= made.kept
        return made

    def puts_later(self, new: Any, late: Origin, put: Callable[[Any], None]) -> bool:
        """Whether it comes there with an update that is not this call's; then that is noted."""
        if self._ready(late):
            return False
        pieces = tree_map_only(torch.Tensor, self._piece, new)
        self._call.actions.append(Put(tuple(sorted(late.reads)), pieces, put))
        return True

    def is_count(self, old: list[torch.Tensor], new: list[torch.Tensor]) -> bool:
        """Whether one is made of the other alone, and what belongs to the update of the other."""
        there = frozenset(map(storage_of, old))
        for tensor in new:
            held = self._held(tensor)
            if held is None or held.origin.reads or not held.origin.kept:
                continue
            if held.origin.kept <= there & self._fed:
                return True
        return False

    def end(self) -> None:
        """When the step has ended. Raises `CaptureError` where it left out a late write of the call before."""
        self._settle_counts()
        for key, before in (self._earlier or {}).items():
            if isinstance(key, int) and len(self.signs.get(key, [])) < len(before):
                raise _differs("its code after the update")

    def _name(self, target: torch.Tensor) -> str:
        named = {**self._step.objects.parameters, **self._step.objects.buffers}
        address = storage_of(target)
        found = next((n for n, t in named.items() if storage_of(t) == address), "")
        return repr(found) if found else f"a tensor of shape {tuple(target.shape)}"

    def _nothing_drawn(self, function: Any, origin: Origin) -> Any:
        """Random numbers for the update are drawn with it, and at no other time."""
        seeded = torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())
        updated = self._call.updated
        if not seeded or not origin.reads or all(updated.get(n) for n in origin.reads):
            return nullcontext()
        return torch.random.fork_rng()

    def _mark(self, target: torch.Tensor, origin: Origin, late: Origin | None) -> None:
        held, address = self._held(target), storage_of(target)
        if held is not None:
            held.origin = origin.joined(held.origin)
        elif late is not None and address and address not in self._parameters:
            self._known[address] = Held(alive(target), late, born=False)

    # Notes.

    def _keep_start(self, target: torch.Tensor) -> None:
        """What a value of this call's data was, before a write that belongs to the update."""
        held = self._held(target)
        if held is not None and held.born and held.slot is None:
            held.slot = self.new_slot()
            whole = torch.empty(0, dtype=target.dtype, device=target.device)
            whole.set_(target.untyped_storage())
            self._note(torch.clone, (whole.clone(),), {}, held.origin, [], outs=(held.slot,))

    def _note(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        origin: Origin,
        fresh: list[torch.Tensor],
        changed: Sequence[int | None] = (),
        *,
        writes: bool = False,
        outs: tuple[int, ...] = (),
    ) -> None:
        slots = [h.slot if (h := self._held(t)) is not None else None for t in fresh]
        action = Done(
            reads=tuple(sorted(origin.reads)),
            function=function,
            args=tree_map_only(torch.Tensor, self._piece, args),
            kwargs=tree_map_only(torch.Tensor, self._piece, kwargs),
            outs=outs or tuple(s for s in slots if s is not None),
            changes=tuple(s for s in changed if s is not None),
            writes=writes,
            line=user_line() if writes and self._read_on_host else "",
        )
        self._call.actions.append(action)

    def _piece(self, tensor: torch.Tensor) -> Any:
        held = self._held(tensor)
        if held is None or (held.slot is None and held.parameter is None):
            return tensor
        if held.parameter is not None and held.slot is None:
            return Piece(held.parameter, tensor.dtype, (), (), -1)
        layout = (tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset()))
        return Piece(held.slot, tensor.dtype, *layout)

    def _held(self, tensor: torch.Tensor) -> Held | None:
        held = self._known.get(storage_of(tensor))
        return held if held is not None and not held.alive.expired() else None

    def _born(self, tensor: torch.Tensor) -> bool:
        held = self._held(tensor)
        return (held is not None and held.born) or not storage_of(tensor)


def _set_grad(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    parameter.grad = gradient


def _set_data(target: torch.Tensor, value: torch.Tensor) -> None:
    target.data = value


def _differs(culprit: str) -> CaptureError:
    return CaptureError(
        culprit,
        seen="the step runs eagerly, and does this with other numbers, or in another way, in calls of one window: with "
        "a count of calls, perhaps, or a value read from a gradient; it belongs to the update, which happens once",
        wanted="what is done once per update, with numbers that change with the update alone",
        fix="take the count from step.optimizer_step, or keep it in a tensor that is changed after optimizer.step(); "
        "compute with tensors of gradients (no item())",
    )
