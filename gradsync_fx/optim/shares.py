"""Who updates what of an optimizer's parameters, and keeps what of its state (ZeRO stage 1).

split     an update that works element by element: rank r has the flattened elements cuts[r] to cuts[r + 1]
whole     one that looks at the whole tensor, and of parameters that are too small to be split: one rank has all

Which kind an update is, is read off its trace (subgraphs.py), never off its class. Who has what depends on the
optimizer's list of parameters and the number of ranks alone: it is the same in each step, branch and window, so that
state stays where it is.

In `optimizer.state` then lies, for a parameter that is split, each tensor of its shape as a flat piece; for one that
another rank has, each tensor as one without storage (device "meta") that tells its shape. Numbers are on every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from gradsync_fx.errors import OptionError, ShareError
from gradsync_fx.optim.number_tensor import is_counter
from gradsync_fx.optim.opaque import Opaque
from gradsync_fx.optim.state import State, parameters_of
from gradsync_fx.optim.subgraphs import BodyCall, Place
from gradsync_fx.optim.update import Update
from gradsync_fx.wording import number_of


# Elements: pieces start at multiples of this, where that leaves none of them empty. Vectorised kernels of torch round
# a remainder otherwise than what fills a register.
ALIGNED = 16


@dataclass(frozen=True, slots=True)
class Portion:
    """One parameter's flattened elements: rank r has those from cuts[r] to cuts[r + 1].

    owner: the rank that has all of them; None where they are split, evenly but for the last rank's.
    """

    cuts: tuple[int, ...]
    owner: int | None

    def of(self, rank: int) -> tuple[int, int]:
        return self.cuts[rank], self.cuts[rank + 1]

    def size(self, rank: int) -> int:
        return self.cuts[rank + 1] - self.cuts[rank]

    @property
    def elements(self) -> int:
        return self.cuts[-1]

    @classmethod
    def split(cls, elements: int, world: int) -> Portion | None:
        """Even pieces; None where one would be empty, or too small to be worth it."""
        if elements < world * max(ALIGNED, world):
            return None
        size = -(-elements // world)
        if elements >= ALIGNED * world * world:
            size = -(-size // ALIGNED) * ALIGNED
        return cls(tuple(min(elements, rank * size) for rank in range(world + 1)), None)

    @classmethod
    def whole(cls, elements: int, owner: int, world: int) -> Portion:
        return cls((*[0] * (owner + 1), *[elements] * (world - owner)), owner)


class Shares:
    """One optimizer's parameters among the ranks. pieces: by position, of those that were in an update so far.

    foreseen: state before its first update, by position, until that has happened. simulated: there are no such ranks,
    and the optimizer keeps what it has. there: how that is divided, where it is.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rank: int,
        world: int,
        *,
        simulated: bool = False,
        there: Shares | None = None,
    ) -> None:
        self.rank, self.world, self.simulated, self._there = rank, world, simulated, there
        self.pieces: dict[int, Portion] = {}
        self.foreseen: dict[int, State] = {}
        self._optimizer = weakref.ref(optimizer)

    def parameters(self) -> list[torch.Tensor]:
        optimizer = self._optimizer()
        return [] if optimizer is None else parameters_of(optimizer)

    def local(self, update: Update, shared: Callable[[torch.Tensor], bool]) -> Update:
        """What this rank computes of a traced update, and the pieces of its parameters.

        shared: whether a parameter is the same on all ranks; others stay as they are. Raises `ShareError` for an
        update that cannot be divided, on all ranks alike.
        """
        flat = self.parameters()
        owners = _owners(self._groups(), self.world)
        mine: list[BodyCall] = []
        elsewhere: list[BodyCall] = []
        for call in update.calls:
            # A parameter of one element stays whole everywhere: its state looks like the counters beside it.
            if not any(shared(flat[i]) and flat[i].dim() for i in call.params):
                mine.append(call)
                continue
            if len(call.params) > 1 or any(where != "state" for where, _, _ in call.written):
                raise _over_several(update, call)
            (i,) = call.params
            piece = self._piece(update, call, flat[i], owners[i])
            known = self.pieces.setdefault(i, piece)
            if known.owner is None and piece.owner is not None:
                raise _another_kind(update, i)
            (mine if known.owner in (None, self.rank) else elsewhere).append(call)
        return replace(update, calls=mine, elsewhere=elsewhere)

    def _groups(self) -> list[list[torch.Tensor]]:
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        return [group["params"] for group in groups]

    def _piece(
        self, update: Update, call: BodyCall, parameter: torch.Tensor, owner: int
    ) -> Portion:
        groups = [update.states[n] for n in call.states if update.states[n][0] == "group"]
        held = update.optimizer.param_groups
        plain = all(held[index][key].dim() == 0 for _, index, key in groups)
        elements = parameter.numel()
        split = None
        if call.body.pointwise and plain and parameter.dim():
            split = Portion.split(elements, self.world)
        return split or Portion.whole(elements, owner, self.world)

    def adopt(self, positions: Iterable[int], state: Mapping[int, State]) -> None:
        """Cuts what lies there whole (it was just made, or loaded) down to this rank's part."""
        if self.simulated:
            return
        parts = self.parts({i: state[i] for i in positions if i in self.pieces and i in state})
        for i, held in parts.items():
            state[i].update(held)

    def parts(self, state: Mapping[int, State]) -> dict[int, State]:
        """What this rank keeps of it, by position."""
        flat, found = self.parameters(), {}
        for i, given in state.items():
            held = given if self._there is None else self._there.whole_form(i, given)
            piece = self.pieces.get(i)
            found[i] = {
                k: self.part(piece, flat[i], v)
                if piece is not None and isinstance(v, torch.Tensor)
                else v
                for k, v in held.items()
            }
        return found

    def part(self, piece: Portion, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of the state; itself where it is that already, or a number."""
        if piece.owner is None:
            if value.shape != parameter.shape:
                return value
            start, end = piece.of(self.rank)
            return value.detach().reshape(-1)[start:end].clone()
        if piece.owner == self.rank or is_counter(value):
            return value
        return value.to("meta")

    def whole_form(self, i: int, state: State) -> State:
        """A parameter's state as an optimizer's own code has it; zeros stand for what is on other ranks."""
        if self._there is not None:
            state = self._there.whole_form(i, state)
        piece = self.pieces.get(i)
        if piece is None:
            return state
        parameter = self.parameters()[i]
        return {k: self._stand_in(piece, parameter, v) for k, v in state.items()}

    def _stand_in(self, piece: Portion, parameter: torch.Tensor, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if piece.owner is None and self.is_piece(piece, parameter, value):
            return torch.zeros_like(
                parameter,
                dtype=value.dtype,
                requires_grad=False,
                memory_format=torch.preserve_format,
            )
        if value.device.type == "meta" and parameter.device.type != "meta":
            return torch.zeros_like(value, device=parameter.device)
        return value

    def is_piece(self, piece: Portion, parameter: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether a tensor of the state is this rank's piece of one of the parameter's shape."""
        return value.shape == (piece.size(self.rank),) and value.shape != parameter.shape

    def is_apart(self, piece: Portion, parameter: torch.Tensor, value: Any) -> bool:
        """Whether other ranks have another part of this entry, or all of it."""
        if not isinstance(value, torch.Tensor):
            return False
        if piece.owner is None:
            return self.is_piece(piece, parameter, value)
        return not (value.dim() == 0 and value.device.type == "cpu")


_known: weakref.WeakKeyDictionary[Optimizer, Shares] = weakref.WeakKeyDictionary()


def shares_of(optimizer: Optimizer, rank: int, world: int, *, simulated: bool = False) -> Shares:
    """How an optimizer's parameters are divided: once for all steps that update by it, but for simulated ranks."""
    known = _known.get(optimizer)
    if simulated:
        return Shares(optimizer, rank, world, simulated=True, there=known)
    if known is None:
        known = _known[optimizer] = Shares(optimizer, rank, world)
    if (known.rank, known.world) != (rank, world):
        raise OptionError(
            f"shard_optimizer=True, {type(optimizer).__name__}",
            seen=f"its state is divided among {number_of(known.world, 'rank')}, and a step asks for {world}",
            wanted="one group of ranks for all steps that update by one optimizer",
            fix="make a new optimizer, and load into it what optimizer.state_dict() of this one gave on all its ranks",
        )
    return known


def created_elsewhere(update: Update) -> Iterator[tuple[Place, torch.Tensor]]:
    """State that the updates of other ranks make anew, with a tensor without storage that tells its shape."""
    held, flat = set(update.states), parameters_of(update.optimizer)
    for call in update.elsewhere:
        (i,) = call.params
        (out,) = call.body.graph.find_nodes(op="output")
        for place, node in zip(call.written, out.args[0][1:], strict=True):
            if place not in held:
                form = node.meta["val"]
                # A pointwise body was traced for some parameter: its results have this one's shape.
                like = flat[i] if call.body.pointwise and form.dim() else form
                sizes, strides = tuple(like.shape), like.stride()
                # Not like a fake value: that would be one, too, and a state of it nobody could read.
                yield place, torch.empty_strided(sizes, strides, dtype=form.dtype, device="meta")


def refuse_divided(optimizer: Optimizer) -> None:
    """Raises `OptionError` for a step that would update by itself what another one divides among ranks."""
    known = _known.get(optimizer)
    if known is not None and known.pieces:
        raise OptionError(
            f"shard_optimizer=False, {type(optimizer).__name__}",
            seen=f"its state is divided among {number_of(known.world, 'rank')} by another step",
            wanted="one setting of shard_optimizer for all steps that update by one optimizer",
            fix="pass shard_optimizer=True here, too",
        )


def _owners(groups: list[list[torch.Tensor]], world: int) -> list[int]:
    """For each parameter the rank that has it where it is not split: the largest first, each to who has least so far.

    Group by group, so that a group that is added later changes nothing of the earlier ones.
    """
    loads, found = [0] * world, []
    for group in groups:
        owners = [0] * len(group)
        for i in sorted(range(len(group)), key=lambda i: -group[i].numel()):
            owners[i] = loads.index(min(loads))
            loads[owners[i]] += group[i].numel()
        found += owners
    return found


def refuse_opaque(updates: Iterable[object]) -> None:
    """Raises `ShareError` for an optimizer whose own `step` runs as it is."""
    for update in updates:
        if isinstance(update, Opaque):
            raise ShareError(
                f"shard_optimizer=True, {type(update.optimizer).__name__}.step",
                seen=f"it is not seen wholly by a trace, so that no rank can make a part of it: {update.why}",
                wanted="an optimizer whose update can be traced",
                fix="leave shard_optimizer out for this optimizer, or use one of torch.optim",
            )


def _over_several(update: Update, call: BodyCall) -> ShareError:
    name = type(update.optimizer).__name__
    many = f"reads over {number_of(len(call.params), 'parameter')} together"
    if len(call.params) == 1:
        many = "writes what all of its parameters share"
    return ShareError(
        f"shard_optimizer=True, {name}.step",
        seen=f"the update {many}, so that no rank can make a part of it by itself",
        wanted="an optimizer that updates each parameter by itself",
        fix="leave shard_optimizer out for this optimizer, or use one whose parameters do not meet in its step",
    )


def _another_kind(update: Update, i: int) -> ShareError:
    return ShareError(
        f"shard_optimizer=True, {type(update.optimizer).__name__}.step",
        seen=f"its update of parameter {i} worked element by element, and looks at the whole tensor by now",
        wanted="an update of one kind, as its state lies where that needs it",
        fix="set what changed before the first update; or load optimizer.state_dict(), which all ranks call, into a "
        "new optimizer, and optimize the step anew for it",
    )
