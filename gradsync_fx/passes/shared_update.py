"""An update of which each rank makes its share: pieces of parameters and gradients in, gathered parameters out.

parameter (every rank has it whole)   -> this rank's piece  \
gradient (a piece; whole where every   -> this rank's piece   } -> body -> new piece -> gather -> new parameter
  micro-step was reduced)                                   /
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from gradsync_fx.ir.builder import Draft
from gradsync_fx.optim.shares import Portion
from gradsync_fx.optim.state import parameters_of
from gradsync_fx.optim.update import Update
from gradsync_fx.passes.scatter import gather, own_piece
from gradsync_fx.passes.sums import cast
from gradsync_fx.planning.plan import Plan


@dataclass(slots=True)
class SharedUpdate:
    """What one update reads and leaves on this rank; with nothing shared out, what it is given.

    parameters, gradients: by position, as the marker of the update has them.
    """

    draft: Draft
    plan: Plan
    marker: Node
    update: Update
    parameters: dict[int, Node]
    gradients: dict[int, Node]
    _pieces: dict[int, Portion] = field(init=False)
    _leaf: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        number = {id(leaf.parameter): i for i, leaf in self.plan.step.leaves.items()}
        flat = parameters_of(self.update.optimizer)
        self._leaf = {i: number[id(flat[i])] for i in self.update.which if id(flat[i]) in number}
        pieces = self.plan.pieces
        self._pieces = {i: pieces[leaf] for i, leaf in self._leaf.items() if leaf in pieces}

    def is_shared(self, i: int) -> bool:
        """Whether what its update leaves here is gathered."""
        return i in self._pieces

    def parameter(self, i: int) -> Node:
        """What the update of parameter i is given as such."""
        piece, whole = self._pieces.get(i), self.parameters[i]
        if piece is None or piece.owner is not None:
            return whole
        with self.draft.graph.inserting_before(self.marker):
            return own_piece(self.draft, self.plan, piece, whole)

    def gradient(self, i: int) -> Node:
        """Likewise its gradient."""
        piece, given = self._pieces.get(i), self.gradients[i]
        if piece is None:
            return given
        with self.draft.graph.inserting_before(self.marker):
            own = self._piece(piece, given)
            shape = list(self.parameters[i].meta["val"].shape)
            if piece.owner is None or list(own.meta["val"].shape) == shape:
                return own
            form = self.draft.form(own.meta["val"], shape=shape)
            return self.draft.call_known(form, torch.ops.aten.reshape.default, own, shape)

    def _piece(self, piece: Portion, given: Node) -> Node:
        """Of what is given whole, the piece."""
        size = piece.size(self.plan.rank)
        if given.meta["val"].numel() == size:
            return given
        return own_piece(self.draft, self.plan, piece, given)

    def gathered(self, new: Mapping[int, Node]) -> dict[int, Node]:
        """The new parameters, by position: one gather for those of a bucket and of one dtype, in the buckets' order.

        Where they arrive in the next call, in the order in which its forward gets to them: the last bucket first.
        """
        found: dict[int, Node] = {}
        position = {leaf: i for i, leaf in self._leaf.items() if i in self._pieces}
        buckets = list(self.plan.closing_buckets())
        for bucket in reversed(buckets) if self.plan.arriving else buckets:
            alike: dict[torch.dtype, list[int]] = {}
            for i in (position[leaf] for leaf in bucket.leaves if leaf in position):
                alike.setdefault(self.parameters[i].meta["val"].dtype, []).append(i)
            for some in alike.values():
                found.update(zip(some, self._gather(some, new), strict=True))
        return found

    def _gather(self, some: list[int], new: Mapping[int, Node]) -> list[Node]:
        forms: list[Any] = [self.parameters[i].meta["val"] for i in some]
        group = self.plan.group
        assert group is not None
        with self.draft.graph.inserting_before(self.marker):
            mine = []
            for i, form in zip(some, forms, strict=True):
                if i in new:
                    mine.append(new[i])
                else:  # nothing of it, as an empty piece of its gradient
                    empty = self._piece(self._pieces[i], self.gradients[i])
                    mine.append(cast(self.draft, empty, form.dtype))
            pieces = [self._pieces[i] for i in some]
            hides = bool(self.plan.arriving)
            return gather(self.draft, self.plan, pieces, mine, forms, group, hides=hides)
