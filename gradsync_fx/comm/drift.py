"""Whether the ranks' parameters are still the same after an update: the worst that can go wrong, and nobody would see.

After the first update and every hundredth each rank makes one number of all parameters that are reduced, and the ranks
compare these. Only where they differ are numbers of each parameter exchanged, and values of those that differ.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch

from gradsync_fx.comm.arrivals import ARRIVALS
from gradsync_fx.comm.host_copy import HostCopy
from gradsync_fx.comm.rendezvous import Line, broadcast
from gradsync_fx.errors import RanksDisagreeError
from gradsync_fx.user_lines import warn_user
from gradsync_fx.wording import number_of


# Updates between two comparisons; the first update is compared, too.
COMPARED_EVERY = 100
_AT_A_TIME = 2**18  # elements: what a hash needs beside the parameter
_EXACT = 2**52  # numbers that are sent as float64
# Odd, so that no bit of a word is lost; large, so that words at other positions count otherwise.
_PLACE, _WORD = 0x9E3779B97F4A7C15 - 2**64, 0x2545F4914F6CDD1D


class Drift:
    """Compares the ranks' parameters as updates go by.

    updated(): the hash of one rank, whenever it learns of the update -> compare(): where all of them are

    On the CPU that is when the window ends. On another device the hash is left to be computed and copied, and read when
    the ranks meet next: a call waits for nothing that was queued after it.
    """

    def __init__(self) -> None:
        self._parameters: dict[str, torch.Tensor] = {}
        self._pending: tuple[int, dict[str, torch.Tensor], HostCopy] | None = None
        self._warned = False

    def begin(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """All of the model's parameters, the same names on all ranks."""
        self._parameters = dict(parameters)

    def updated(self, line: Line, update: int, reduced: Collection[str]) -> None:
        """Begins a comparison, if it is time for one. update: how many there were, this one included.

        reduced: parameters that all ranks update alike.
        """
        if line.group is None or (update != 1 and update % COMPARED_EVERY):
            return
        ARRIVALS.settle()
        held = {name: p for name, p in self._parameters.items() if name in reduced}
        self._pending = (update, held, HostCopy(fingerprint(held.values())))

    def compare(self, line: Line, *, if_known: bool = False) -> None:
        """Ends a comparison that is pending; all ranks call it at the same point, or none has one.

        if_known: later, where the hash is still being computed on a device. Raises `RanksDisagreeError` on every rank
        where parameters differ by more than rounding.
        """
        if self._pending is None or if_known and not self._pending[-1].on_host:
            return
        (update, held, mine), self._pending = self._pending, None
        (number,) = mine.values()
        rows = line.gather([int(number) % _EXACT, len(held)], where=f"after update {update}")
        if any(row != rows[0] for row in rows):
            self._find(line, update, held)

    def _find(self, line: Line, update: int, held: Mapping[str, torch.Tensor]) -> None:
        hashes = [
            int(fingerprint([p])) % _EXACT if name in held else -1
            for name, p in self._parameters.items()
        ]
        rows = line.gather(hashes)
        differing = [
            name
            for name, column in zip(self._parameters, zip(*rows, strict=True), strict=True)
            if len(set(column)) > 1 and min(column) >= 0
        ]
        off = line.gather([_distance(line, self._parameters[name]) for name in differing])
        for name, column in zip(differing, zip(*off, strict=True), strict=True):
            worst = max(column)
            told = ", ".join(f"rank {r} is off by {d:.1e}" for r, d in enumerate(column) if d)
            allowed = math.sqrt(torch.finfo(self._parameters[name].dtype).eps)
            if not worst <= allowed:
                raise RanksDisagreeError(
                    f"parameter {name!r} after update {update}",
                    seen=f"its values differ among the ranks: relative to rank 0's, {told} "
                    f"({number_of(len(differing), 'parameter')} in all)",
                    wanted="the same parameters on all ranks after every update",
                    fix="look for what is not the same on all ranks: rates and other numbers of the optimizer, random "
                    "numbers between backward() and optimizer.step(), writes to parameters; "
                    "step.self_check(...) on all ranks tells whether a program of gradsync_fx is at fault",
                )
        if differing and not self._warned:
            self._warned = True
            warn_user(
                f"parameter {differing[0]!r} and {len(differing) - 1} more differ among the ranks after update "
                f"{update}, by no more than rounding: machines of different kinds, perhaps. Not warned about again."
            )


def fingerprint(tensors: Collection[torch.Tensor]) -> torch.Tensor:
    """An int64 without dimensions on the first one's device, of every bit and its position; nothing waits for it."""
    total: torch.Tensor | None = None
    places: dict[torch.device, torch.Tensor] = {}
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1)
        flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        if flat.device not in places:
            count = torch.arange(_AT_A_TIME, device=flat.device)
            places[flat.device] = count.mul_(_PLACE).bitwise_or_(1)
        for words in flat.view(_WORDS[flat.itemsize]).split(_AT_A_TIME):
            spread = words.to(torch.int64).add(_WORD).mul_(places[flat.device][: words.numel()])
            part = spread.sum()
            total = (
                part if total is None else (total.to(part.device) ^ (total >> 29)) * _WORD + part
            )
    return torch.zeros((), dtype=torch.int64) if total is None else total


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _distance(line: Line, tensor: torch.Tensor) -> float:
    """How far a parameter is from rank 0's, relative to the largest value there; nan or inf where one of them is."""
    assert line.group is not None
    mine = tensor.detach()
    theirs = mine.clone()
    broadcast(line.group, [theirs])
    if mine.is_complex():
        mine, theirs = torch.view_as_real(mine), torch.view_as_real(theirs)
    apart = torch.where(mine == theirs, 0.0, (mine - theirs).abs().double()).max().item()
    return apart / max(theirs.abs().max().item(), torch.finfo(theirs.dtype).tiny)
