"""Two ops for updates that are shared out: each rank's pieces of a bucket's sums, and of the new parameters.

start_pieces(sums, group, wire dtype, cuts, rank)
    until `wait` (inplace_all_reduce.py) the bucket is under way. Then this rank's pieces of the sums are reduced; what
    other ranks have lies there as it was, and nobody may read it
gather_pieces(parameters, pieces, names, group, last, cuts, rank)
    after the last of a program, parameters hold the new pieces of all ranks; until then nobody may read them

cuts: the bounds of each tensor's pieces, one tensor after the other (cuts.py). Both run in memory where all ranks reach
it on each other, else over the wire. They are called in a program of a captured step, whose buckets are in use then.
"""

from __future__ import annotations

import torch

from gradsync_fx.comm.cuts import Cuts
from gradsync_fx.comm.flat_bucket import buckets_in_use


_LIBRARY = torch.library.Library("gradsync_fx", "FRAGMENT")
_LIBRARY.define(
    "start_pieces(Tensor(a!)[] sums, str group, ScalarType wire, int[] cuts, int rank) -> ()"
)
_LIBRARY.define(
    "gather_pieces(Tensor(a!)[] parameters, Tensor[] pieces, str names, str group, bool last, int[] cuts, "
    "int rank) -> ()"
)


def _start_pieces(
    sums: list[torch.Tensor], group: str, wire: torch.dtype, cuts: list[int], rank: int
) -> None:
    buckets_in_use().start_pieces(sums, group, wire, Cuts.of(cuts, len(sums), rank))


def _gather_pieces(
    parameters: list[torch.Tensor],
    pieces: list[torch.Tensor],
    names: str,
    group: str,
    last: bool,
    cuts: list[int],
    rank: int,
) -> None:
    known = Cuts.of(cuts, len(parameters), rank)
    buckets = buckets_in_use()
    buckets.gather(names.split("\n"), parameters, pieces, group, known)
    if last:
        buckets.end_gathers()


_LIBRARY.impl("start_pieces", _start_pieces, "CompositeExplicitAutograd")
_LIBRARY.impl("gather_pieces", _gather_pieces, "CompositeExplicitAutograd")


@torch.library.register_fake("gradsync_fx::start_pieces", lib=_LIBRARY)
def _start_pieces_fake(
    sums: list[torch.Tensor], group: str, wire: torch.dtype, cuts: list[int], rank: int
) -> None:
    """Nothing is made."""


@torch.library.register_fake("gradsync_fx::gather_pieces", lib=_LIBRARY)
def _gather_pieces_fake(
    parameters: list[torch.Tensor],
    pieces: list[torch.Tensor],
    names: str,
    group: str,
    last: bool,
    cuts: list[int],
    rank: int,
) -> None:
    """Nothing is made."""


START_PIECES = torch.ops.gradsync_fx.start_pieces.default
GATHER_PIECES = torch.ops.gradsync_fx.gather_pieces.default
