"""`OptimizerShards`: what `torch.distributed.checkpoint` saves of a divided optimizer, and loads into it, in pieces."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from gradsync_fx.errors import StateError
from gradsync_fx.optim.shards import ShardTensor
from gradsync_fx.optim.shares import Portion, Shares
from gradsync_fx.optim.state import State
from gradsync_fx.runtime.sharing import meet_for, shares_among_ranks


class OptimizerShards:
    """One optimizer of a step with `shard_optimizer=True`, to be put into what `dcp.save` and `dcp.load` are given.

    The checkpoint is that of `optimizer.state_dict()`, each tensor written by the ranks that have it: it loads into
    another number of ranks, and into an optimizer that is not divided. No rank ever holds a whole state. Every rank
    saves and loads.

    >>> shards = gradsync_fx.OptimizerShards(optimizer)  # after step.prepare(...), or a call
    >>> dcp.save({"model": model.state_dict(), "optimizer": shards}, checkpoint_id=folder)
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """Raises `StateError` for an optimizer that no step has divided."""
        shares = shares_among_ranks(optimizer)
        if shares is None or not shares.pieces:
            raise StateError(
                f"OptimizerShards({type(optimizer).__name__})",
                seen="no step has divided its state among ranks",
                wanted="an optimizer of a step with shard_optimizer=True, on several ranks",
                fix="call step.prepare(...) with the step's arguments before; on one rank save optimizer.state_dict()",
            )
        self._optimizer, self._shares = optimizer, shares

    def state_dict(self) -> dict[str, Any]:
        """As of `optimizer.state_dict()`, with this rank's pieces, in the memory of its state. Every rank calls it."""
        meet_for(self._optimizer)
        groups, number = [], 0
        for group in self._optimizer.param_groups:
            last = number + len(group["params"])
            groups.append({**group, "params": list(range(number, last))})
            number = last
        state = {i: self._pieces(i, held) for i, held in self._state().items()}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what was loaded into that. Raises `StateError` for another list of parameters; nothing is changed."""
        groups = self._optimizer.param_groups
        loaded = [len(group["params"]) for group in state_dict["param_groups"]]
        if loaded != [len(group["params"]) for group in groups]:
            raise StateError(
                f"OptimizerShards({type(self._optimizer).__name__})",
                seen=f"parameters by group: {loaded} in the state",
                wanted=f"{[len(group['params']) for group in groups]}, as in the optimizer",
                fix="load it into the optimizer that it was saved of",
            )
        flat, here = self._shares.parameters(), self._state()
        for i, held in state_dict["state"].items():
            state = here[int(i)]
            for key, value in held.items():
                if isinstance(value, ShardTensor):
                    self._take(state[key], value)
                else:
                    state[key] = value
            self._optimizer.state[flat[int(i)]] = state
        for group, saved in zip(groups, state_dict["param_groups"], strict=True):
            group.update({k: v for k, v in saved.items() if k != "params"})

    def _state(self) -> dict[int, State]:
        """What there is, and what the first update will find, by position."""
        flat, held, shares = self._shares.parameters(), self._optimizer.state, self._shares
        found = {i: held[p] if held.get(p) else shares.foreseen.get(i) for i, p in enumerate(flat)}
        state = {i: one for i, one in found.items() if one}
        shares.adopt(state, state)
        return state

    def _pieces(self, i: int, state: State) -> State:
        portion, parameter = self._shares.pieces.get(i), self._shares.parameters()[i]
        if portion is None:
            return dict(state)
        return {k: self._piece(portion, parameter, v) for k, v in state.items()}

    def _piece(self, portion: Portion, parameter: torch.Tensor, value: Any) -> Any:
        shares: Shares = self._shares
        if not isinstance(value, torch.Tensor) or not shares.is_apart(portion, parameter, value):
            return value
        if portion.owner is None:
            start, _ = portion.of(shares.rank)
            return ShardTensor.of(value, parameter.shape, start)
        if portion.owner == shares.rank:
            return ShardTensor.of(value, value.shape, 0)
        return ShardTensor.of(parameter.detach().new_empty(0, dtype=value.dtype), value.shape, 0)

    @staticmethod
    def _take(onto: torch.Tensor, value: ShardTensor) -> None:
        if onto.device.type != "meta":
            onto.copy_(value.elements().view(onto.shape))
