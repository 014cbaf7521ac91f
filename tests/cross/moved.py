"""Bytes that kernels move for sums of gradients and for updates, for each element of a parameter, beside the fewest.

As the generated code shows it: a kernel reads and writes each tensor that it is given once, by its size and dtype. What
counts are running sums, states, parameters where they are updated, what is sent, and gradients that have a tensor of
their own on the way there; of an embedding's, to which rows are added, all of it. Reductions' own traffic does not
count, nor do activations.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

import torch

from tests.cross.results import Lowered


KERNELS = ("launch", "fill", "copy", "extern")
HELD = ("accumulator ", "state ")
_ALLOCATED = re.compile(r"(\w+) = empty_strided_cuda\(\(([\d, ]*)\), \([\d, ]*\), torch\.(\w+)\)")


def fewest(made: Lowered, *, clip: bool = False) -> float:
    """What the algorithm needs. A term: each sum is read and written. An update: sum, parameter and state are read and
    written, the sum with zero; and for a norm of the gradients, which is there before it, each sum is read once more.
    """
    sums, updated = _bytes(made, "accumulator "), _bytes(made, "parameter ", "state ")
    term, update = 2 * sums, 2 * sums + 2 * updated + clip * sums
    whole = {"accumulate": term, "boundary": term + update, "tail": update}[made.program]
    return whole / _parameters(made)


def moved(made: Lowered) -> float:
    """What the kernels do."""
    contents = _contents(made)
    _find_gradients([c for row in contents for both in row.values() for c in both if c])
    total = 0
    for event, row in zip(made.events, contents, strict=True):
        updates = any(name.startswith("parameter ") for name in event.writes)
        for name, *both in event.moved if event.kind in KERNELS else ():
            if name.startswith(HELD) or updates and name.startswith("parameter "):
                total += sum(both)
            elif name in row:
                total += sum(n for n, c in zip(both, row[name], strict=True) if c and c.gradient)
    return total / _parameters(made)


@dataclass(slots=True, eq=False)
class _Content:
    """What a temporary holds from a write to the next one: Inductor has one memory for several.

    travels: it is sent, or comes of that. onto: what kernels that read it write, and how many bytes of that.
    """

    size: float = 0
    travels: bool = False
    onto: list[tuple[_Content | str, int]] = field(default_factory=list)
    gradient: bool = False


def _contents(made: Lowered) -> list[dict[str, tuple[_Content | None, _Content | None]]]:
    """For each event, of each temporary what it reads and what it writes."""
    now: dict[str, _Content] = {}
    found = []
    room = _room(made.source)
    for event in made.events:
        size = {name: written for name, _, written in event.moved}
        read = {name: now[name] for name in event.reads if name in now}
        for name in event.writes:
            if name not in made.inputs and (name in read or name not in now or now[name].onto):
                now[name] = _Content()  # else it is filled in parts
        written = {name: now[name] for name in event.writes if name not in made.inputs}
        targets: list[tuple[_Content | str, int]] = [
            (written.get(n, n), size.get(n, 0))
            for n in event.writes
            if n in written or n.startswith((*HELD, "parameter "))
        ]
        for name, content in written.items():
            # In parts; or once more, as an embedding's gradient is: zeros first, then what is added to them.
            content.size = min(content.size + size.get(name, 0), room.get(name, math.inf))
        for content in read.values():
            content.onto += targets
        for content in (*read.values(), *written.values()):
            content.travels |= event.kind in ("reduce", "wait")
        found.append({n: (read.get(n), written.get(n)) for n in {**read, **written}})
    return found


def _room(source: str) -> dict[str, int]:
    """Bytes of the temporaries that the wrapper allocates, by its names of them."""
    return {
        name: math.prod(map(int, re.findall(r"\d+", sizes))) * getattr(torch, dtype).itemsize
        for name, sizes, dtype in _ALLOCATED.findall(source)
    }


def _find_gradients(contents: list[_Content]) -> None:
    """Marks what is sent, and what becomes nothing but a sum, what is sent, or an update, as large as itself."""
    more = True
    while more:
        more = False
        for content in contents:
            ends = all(isinstance(c, str) or c.gradient for c, _ in content.onto)
            as_large = content.size in {size for _, size in content.onto}
            if not content.gradient and (content.travels or ends and as_large):
                content.gradient = more = True


def _bytes(made: Lowered, *kinds: str) -> int:
    return sum(bytes for name, (_, bytes) in made.sizes.items() if name.startswith(kinds))


def _parameters(made: Lowered) -> int:
    """Elements of all that are trained: each has a sum."""
    return sum(n for name, (n, _) in made.sizes.items() if name.startswith("accumulator "))
