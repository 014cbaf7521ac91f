"""Optimizers whose state is divided among the ranks, at run time: their `state_dict()` is whole, on every rank.

optimizer.state_dict()          all ranks meet, then pieces are gathered: what a run without shards would have
optimizer.load_state_dict(s)    of such a state, whoever saved it: each rank keeps its own part

Both are torch's own methods, with a hook behind them.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from gradsync_fx._torch import all_gather_single
from gradsync_fx.comm.host_group import backend_of, host_group
from gradsync_fx.comm.rendezvous import Line
from gradsync_fx.errors import RanksDisagreeError, ShareError
from gradsync_fx.optim.binding import Binding
from gradsync_fx.optim.likeness import settings_likeness
from gradsync_fx.optim.opaque import Opaque
from gradsync_fx.optim.shares import Portion, Shares, shares_of
from gradsync_fx.optim.state import State, parameters_of
from gradsync_fx.runtime.captured_facts import CapturedFacts
from gradsync_fx.wording import number_of


def pieces_of(facts: CapturedFacts, bindings: Iterable[Binding]) -> dict[int, Portion]:
    """By leaf number: the pieces of the parameters that these updates change, where they are divided."""
    number = {id(leaf.parameter): i for i, leaf in facts.capture.step.leaves.items()}
    found: dict[int, Portion] = {}
    shared = facts.shared_parameters
    for binding in bindings:
        if binding.shares is None:
            continue
        flat = parameters_of(binding.optimizer)
        for i in binding.which:
            if i in binding.shares.pieces and id(flat[i]) in shared:
                found[number[id(flat[i])]] = binding.shares.pieces[i]
    return found


def updates_told(facts: CapturedFacts, bindings: Iterable[Binding]) -> list[str]:
    """What has to be alike on all ranks of these updates, in words, where they are divided; also why one cannot be.

    Settings are among it: a piece that is updated with others than the rest is the same on all ranks, and wrong.
    """
    if not facts.shares or facts.simulated:
        return []
    found = []
    for binding in bindings:
        assert binding.shares is not None
        optimizer, pieces = binding.optimizer, binding.shares.pieces
        try:
            update = binding.trace()
        except ShareError as error:  # raised again where it is built
            found.append(f"an update that cannot be divided: {error.seen}")
            continue
        if isinstance(update, Opaque):
            found.append(f"an update that a trace does not see wholly: {update.why}")
            continue
        flat = parameters_of(optimizer)
        held = sum(bool(optimizer.state.get(flat[i])) for i in binding.which)
        cuts = repr([(i, pieces.get(i)) for i in binding.which])
        found += [f"{type(optimizer).__qualname__} {line}" for line in settings_likeness(optimizer)]
        found.append(f"state of {number_of(held, 'parameter')}")
        found.append(f"pieces of its parameters with the number {zlib.crc32(cuts.encode()):#x}")
    return found


class _Divided:
    """The state of one optimizer. meet: lets all ranks meet; raises where some do something else."""

    def __init__(self, shares: Shares, line: Line, meet: Callable[[], None]) -> None:
        self.shares, self._line = shares, line
        # Weak: what meets holds the steps, and they the optimizer.
        self._meet = weakref.WeakMethod(meet)

    def gathered(self, state: dict[int, State]) -> dict[int, State]:
        """By position; what lies here stays as it is."""
        shares = self.shares
        shares.adopt(shares.pieces, state)
        self.meet()
        flat = shares.parameters()
        apart = [
            (i, key)
            for i, piece in sorted(shares.pieces.items())
            for key in sorted(state.get(i, {}), key=str)
            if shares.is_apart(piece, flat[i], state[i][key])
        ]
        self._check_alike([(i, key, str(state[i][key].dtype)) for i, key in apart])
        found = {i: dict(held) for i, held in state.items()}
        for i, key in apart:
            found[i][key] = self._whole(shares.pieces[i], flat[i], state[i][key])
        return found

    def meet(self) -> None:
        """With the steps gone there is nobody to be elsewhere: what follows waits for the others."""
        meet = self._meet()
        if meet is not None:
            meet()

    def _check_alike(self, entries: list[tuple[int, str, str]]) -> None:
        rows = self._line.gather([len(entries), zlib.crc32(repr(entries).encode())])
        if any(row != rows[0] for row in rows):
            told = ", ".join(
                f"rank {r} holds {number_of(int(row[0]), 'tensor')}" for r, row in enumerate(rows)
            )
            raise RanksDisagreeError(
                "the optimizer's state",
                seen=f"ranks hold others than each other: {told}",
                wanted="the same entries of the same dtypes on all ranks",
                fix="load the same state on every rank, and set no entry on some ranks only",
            )

    def _whole(self, piece: Portion, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        world, device = self.shares.world, parameter.device
        if piece.owner is None:
            mine = torch.zeros(piece.size(0), dtype=value.dtype, device=device)
            mine[: value.numel()] = value
            everyone = mine.new_empty(world * piece.size(0))
            all_gather_single(_bytes(everyone), _bytes(mine), group=self._group(mine))
            whole = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
            whole.copy_(everyone[: piece.elements].view(parameter.shape))
            return whole
        whole = (
            value.to(device)
            if piece.owner == self.shares.rank
            else torch.empty_like(value, device=device)
        )
        sent = whole.contiguous()
        group = self._group(sent)
        if sent.numel():
            dist.broadcast(_bytes(sent), dist.get_global_rank(group, piece.owner), group=group)
        return sent if sent is whole else whole.copy_(sent)

    def _group(self, tensor: torch.Tensor) -> ProcessGroup:
        group = self._line.group
        assert group is not None
        return group if backend_of(group, tensor.device.type) else host_group(group)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


_divided: weakref.WeakKeyDictionary[Optimizer, _Divided] = weakref.WeakKeyDictionary()


def divide(facts: CapturedFacts, meet: Callable[[], None]) -> None:
    """Lets the optimizers of a step have whole state dicts from now on. Raises `ShareError` where one has its own."""
    if not facts.shares:
        return
    setting = facts.setting
    if not isinstance(setting.group, ProcessGroup):  # of simulated ranks
        return
    for optimizer in facts.capture.optimizers:
        shares = shares_of(optimizer, setting.rank, setting.world)
        if optimizer in _divided:
            continue
        if type(optimizer).state_dict is not Optimizer.state_dict:
            raise ShareError(
                f"shard_optimizer=True, {type(optimizer).__name__}",
                seen="its class has a state_dict of its own, which would save this rank's part alone",
                wanted="torch.optim.Optimizer.state_dict, which gathers the parts of all ranks",
                fix="leave that method out, or shard_optimizer for this optimizer",
            )
        line = Line(setting.group, facts.options.rank_timeout)
        _divided[optimizer] = _Divided(shares, line, meet)
        optimizer.register_state_dict_post_hook(_after_state_dict)
        optimizer.register_load_state_dict_post_hook(_after_load_state_dict)


def whole_state(optimizer: Optimizer) -> dict[Any, State]:
    """What `optimizer.state` would hold in a run that divides nothing. Every rank calls it where something is."""
    divided = _divided.get(optimizer)
    if divided is None:
        return dict(optimizer.state)
    flat = divided.shares.parameters()
    numbered = {i: optimizer.state[p] for i, p in enumerate(flat) if p in optimizer.state}
    whole = {flat[i]: held for i, held in divided.gathered(numbered).items()}
    return {**optimizer.state, **whole}


def shares_among_ranks(optimizer: Optimizer) -> Shares | None:
    """How an optimizer's state is divided, where it is."""
    divided = _divided.get(optimizer)
    return None if divided is None else divided.shares


def meet_for(optimizer: Optimizer) -> None:
    """Lets all ranks come together that hold the state of an optimizer. Raises where some are elsewhere."""
    divided = _divided.get(optimizer)
    if divided is not None:
        divided.meet()


def is_divided(optimizer: Optimizer) -> bool:
    """Whether ranks hold its state in parts."""
    return optimizer in _divided


def _after_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    divided = _divided.get(optimizer)  # none of a copy's
    if divided is None:
        return None
    numbered = {i: held for i, held in state_dict["state"].items() if isinstance(i, int)}
    return {**state_dict, "state": {**state_dict["state"], **divided.gathered(numbered)}}


def _after_load_state_dict(optimizer: Optimizer) -> None:
    divided = _divided.get(optimizer)
    if divided is not None:
        shares = divided.shares
        flat = shares.parameters()
        held = {i: optimizer.state[flat[i]] for i in shares.pieces if flat[i] in optimizer.state}
        shares.adopt(held, held)
