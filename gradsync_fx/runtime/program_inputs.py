"""The inputs of a compiled program, put in its order by one look-up for each kind: every call binds all of them.

the step's own inputs, running sums and weights, what windows and optimizers hold -> one list, as the slots say
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from gradsync_fx.ir.program import Kind, Slot


HeldTensors = dict[tuple[Kind, Any], torch.Tensor]
# Where inputs are kept, by kind: positions among the arguments of `bind`. All others are the step's own.
_KEPT = {
    Kind.ACCUMULATOR: 1,
    Kind.WEIGHT: 2,
    Kind.INVARIANT: 3,
    Kind.STATE: 4,
    Kind.SCALAR: 4,
}


class ProgramInputs:
    """Which input comes from where; the tensors themselves are looked up in every call."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        by_source: tuple[list[int], ...] = ([], [], [], [], [])
        for i, slot in enumerate(slots):
            by_source[_KEPT.get(slot.kind, 0)].append(i)
        together = [i for positions in by_source for i in positions]
        *keyed, by_kind = by_source
        keys = [[slots[i].key for i in positions] for positions in keyed]
        held = [(slots[i].kind, slots[i].key) for i in by_kind]
        self._pick = [_picker(wanted) for wanted in (*keys, held)]
        place = {position: i for i, position in enumerate(together)}
        self._ordered = _picker([place[i] for i in range(len(slots))])

    def bind(
        self,
        args: Sequence[Any],
        sums: Mapping[str, torch.Tensor],
        weights: Mapping[int, torch.Tensor],
        invariants: Sequence[torch.Tensor],
        held: HeldTensors,
    ) -> list[Any]:
        """args: the step's own inputs. held: by kind and key of their slots."""
        of_step, of_sums, of_weights, of_invariants, of_held = self._pick
        together = [
            *of_step(args),
            *of_sums(sums),
            *of_weights(weights),
            *of_invariants(invariants),
            *of_held(held),
        ]
        return list(self._ordered(together))


def _picker(keys: Sequence[Any]) -> Callable[[Any], Sequence[Any]]:
    """What looks all of these up, in C where there are several."""
    if len(keys) < 2:
        return lambda source: [source[key] for key in keys]
    return itemgetter(*keys)
