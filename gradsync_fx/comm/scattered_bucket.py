"""A bucket of which each rank is to have its pieces alone, and new parameters back: over the wire, as
passes/scatter.py spells it out, or in memory.

sums of all ranks   -> this rank's pieces of them      terms are rounded to the wire's dtype, and added in their own, in
pieces of all ranks -> parameters                      the order of ranks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gradsync_fx.comm.cuts import Cuts
from gradsync_fx.comm.shm_pieces import SharedPieces
from gradsync_fx.ir.ops import ALL_GATHER, ALL_TO_ALL, WAIT


# A gather in which ranks send equally much costs what is padded; one in which they do not, a copy for each rank.
MOST_PADDING = 1.25


class ScatteredBucket:
    """Running sums that are contiguous. shared: their pieces on all ranks, where this is done in memory.

    sent: what all ranks are sending to this one; None but between a start and its wait.
    """

    def __init__(self, sums: Sequence[torch.Tensor], cuts: Cuts) -> None:
        self.sums, self._cuts = tuple(sums), cuts
        self.shared: SharedPieces | None = None
        self.sent: torch.Tensor | None = None

    def start(self, group: str, wire: torch.dtype) -> None:
        """Starts to send to each rank its pieces."""
        cuts = self._cuts
        parts = [p for rank in range(cuts.world) for p in cuts.pieces(self.sums, rank)]
        flat = torch.cat(parts).to(wire)
        totals = cuts.totals()
        mine = [totals[cuts.rank]] * cuts.world
        self.sent = ALL_TO_ALL(flat, mine, totals, group)

    def wait(self) -> None:
        """From here on this rank's pieces of the sums are reduced."""
        assert self.sent is not None
        arrived, self.sent = WAIT(self.sent), None
        cuts, dtype = self._cuts, self.sums[0].dtype
        first, *others = arrived.view(cuts.world, -1)
        total = first.to(dtype)
        for term in others:
            total = total + term
        parts = total.split(cuts.sizes(cuts.rank))
        for piece, part in zip(cuts.pieces(self.sums, cuts.rank), parts, strict=True):
            piece.copy_(part)


class SharesUnderWay:
    """New pieces that ranks send to each other. shares: of each rank, when all of them have arrived."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        cuts: Cuts,
        arriving: torch.Tensor,
        shares: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    ) -> None:
        self._parameters, self._cuts = parameters, cuts
        self._arriving, self._shares = arriving, shares

    def wait(self) -> None:
        """From here on the parameters hold the pieces of all ranks."""
        for rank, share in enumerate(self._shares(WAIT(self._arriving))):
            parts = share.split(self._cuts.sizes(rank))
            pieces = self._cuts.pieces(self._parameters, rank)
            for piece, part in zip(pieces, parts, strict=True):
                piece.copy_(part)


def gather_shares(
    parameters: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor], group: str, cuts: Cuts
) -> SharesUnderWay:
    """Starts to send this rank's pieces to all others. The parameters are of one dtype."""
    share, totals = torch.cat([piece.view(-1) for piece in pieces]), cuts.totals()
    longest = max(totals)
    if longest * cuts.world <= MOST_PADDING * sum(totals):
        padded = torch.nn.functional.pad(share, [0, longest - share.numel()])
        arriving = ALL_GATHER(padded, cuts.world, group)

        def rows(arrived: torch.Tensor) -> list[torch.Tensor]:
            table = arrived.view(cuts.world, longest)
            return [row[:total] for row, total in zip(table, totals, strict=True)]

        return SharesUnderWay(parameters, cuts, arriving, rows)
    split = [totals[cuts.rank]] * cuts.world
    arriving = ALL_TO_ALL(share.repeat(cuts.world), totals, split, group)
    return SharesUnderWay(parameters, cuts, arriving, lambda arrived: arrived.split(totals))
