"""Ranks on one machine that share an update out exchange pieces where these lie, in place of sending them.

rank 0   | sums, pieces of 0 | pieces of 1 |     each rank adds up its own pieces over all ranks, in its own memory:
rank 1   | sums, pieces of 0 | pieces of 1 |     nothing is written back to the others

rank 0   | new pieces of 0   |             |     each rank writes its new pieces where the others reach them; the ranks
rank 1   |                   | pieces of 1 |     meet, and each copies the others' into its parameters

New pieces are written over when the ranks have met once more: every rank has read them by then. The next window's sums
are such a meeting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from gradsync_fx.comm.cuts import Cuts
from gradsync_fx.comm.shared_memory import Room, open_room


# Added up, or copied to two places, by so many elements at a time: these are still in the core's own cache when they go
# out.
AT_A_TIME = 2**16
_COPIED_AT_A_TIME = 2**18
_ALIGNED = 64  # bytes


@dataclass(frozen=True, slots=True, eq=False)
class SharedPieces:
    """Pieces of one bucket on all ranks. copies: its flat tensor, in rank order. places: where this rank's pieces lie
    in it, from and to. wire: the dtype that terms are rounded to.
    """

    copies: tuple[torch.Tensor, ...]
    rank: int
    places: tuple[tuple[int, int], ...]
    wire: torch.dtype

    def add_up_share(self) -> None:
        """This rank's pieces, summed in rank order."""
        for begin, end in self.places:
            for start in range(begin, end, AT_A_TIME):
                self._add_up(start, min(start + AT_A_TIME, end))

    def _add_up(self, start: int, stop: int) -> None:
        terms = [copy[start:stop] for copy in self.copies]
        own = terms[self.rank]
        if self.wire is not own.dtype:
            terms = [term.to(self.wire).to(own.dtype) for term in terms]
        # The third rank's own term is read after the sum of the first two is there.
        total = torch.add(terms[0], terms[1], out=own if self.rank < 2 else torch.empty_like(own))
        for term in terms[2:]:
            total.add_(term)
        if total is not own:
            own.copy_(total)


class MeetingPlace(Protocol):
    """Where ranks wait for each other. meetings: how often they met so far."""

    meetings: int

    def meet(self) -> None:
        """Raises what names a rank that does not come."""


class PiecesRoom:
    """Room for the new values of some parameters, by name: as bytes, of which a rank writes its pieces."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._begins: dict[str, int] = {}
        size = 0
        for name, parameter in parameters.items():
            self._begins[name] = size
            size += -(-parameter.numel() * parameter.itemsize // _ALIGNED) * _ALIGNED
        room: Room | None = open_room([size] if size else [])
        self.flat = None if room is None else room.take(size, torch.uint8)

    def holds(self, names: Sequence[str]) -> bool:
        return all(name in self._begins for name in names)

    def views(
        self, copy: torch.Tensor, names: Sequence[str], parameters: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The places of some parameters in a rank's copy of this room, flat."""
        found = []
        for name, parameter in zip(names, parameters, strict=True):
            begin = self._begins[name]
            place = copy[begin : begin + parameter.numel() * parameter.itemsize]
            found.append(place.view(parameter.dtype))
        return found


class SharedParameters:
    """New values on their way through memory. copies: of the room, in rank order. meeting: where all of them wait."""

    def __init__(
        self, room: PiecesRoom, copies: Sequence[torch.Tensor], meeting: MeetingPlace
    ) -> None:
        self._room, self._copies, self._meeting = room, tuple(copies), meeting
        self._places: dict[tuple[str, ...], list[list[torch.Tensor]]] = {}
        self._put: list[tuple[tuple[str, ...], Sequence[torch.Tensor], Cuts]] = []
        self._read_after: dict[str, int] = {}  # by name the meeting after which others read it

    def holds(self, names: Sequence[str]) -> bool:
        """Whether all of these have their place in it."""
        return self._room.holds(names)

    def put(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        pieces: Sequence[torch.Tensor],
        cuts: Cuts,
    ) -> None:
        """Writes this rank's new pieces, for the others and into its own parameters."""
        if any(self._read_after.get(name) == self._meeting.meetings for name in names):
            self._meeting.meet()  # others may still read what was there
        places = self._of(tuple(names), parameters, cuts)[cuts.rank]
        own = cuts.pieces(parameters, cuts.rank)
        for place, mine, piece in zip(places, own, pieces, strict=True):
            flat = piece.view(-1)
            for start in range(0, flat.numel(), _COPIED_AT_A_TIME):
                some = slice(start, start + _COPIED_AT_A_TIME)
                place[some].copy_(flat[some])
                mine[some].copy_(flat[some])
        self._put.append((tuple(names), parameters, cuts))

    def take(self) -> None:
        """Writes the others' new pieces of all that was put into the parameters."""
        if not self._put:
            return
        self._meeting.meet()
        for names, parameters, cuts in self._put:
            self._read_after.update(dict.fromkeys(names, self._meeting.meetings))
            everyone = self._of(names, parameters, cuts)
            for rank in range(cuts.world):
                if rank == cuts.rank:
                    continue
                for piece, place in zip(cuts.pieces(parameters, rank), everyone[rank], strict=True):
                    if piece.numel():
                        piece.copy_(place)
        self._put.clear()

    def forget(self) -> None:
        """The program that put these was cut off."""
        self._put.clear()

    def _of(
        self, names: tuple[str, ...], parameters: Sequence[torch.Tensor], cuts: Cuts
    ) -> list[list[torch.Tensor]]:
        """By rank: the places of its pieces. One program's cuts are every program's."""
        if names not in self._places:
            self._places[names] = [
                cuts.pieces(self._room.views(copy, names, parameters), rank)
                for rank, copy in enumerate(self._copies)
            ]
        return self._places[names]
