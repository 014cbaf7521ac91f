"""Tensors that an eager step puts in the place of others: `self.average = 0.9 * self.average + 0.1 * weight`.

Attributes, items of dictionaries and lists, and variables round the step are looked at before and after a call. What
is put there and made of gradients or updated parameters belongs to the update: where the window goes on the old tensor
is put back, and what was done is noted, to be done where it ends. The same holds for lists, tuples and dictionaries of
tensors that were made anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from types import CellType
from typing import Any

import torch
from torch import nn

from gradsync_fx.capture.reachable import MANY
from gradsync_fx.capture.untouched import tensors_in
from gradsync_fx.eager.effects import Effects
from gradsync_fx.errors import CaptureError


Before = list[tuple[Any, dict[Any, Any]]]  # owners, each with what it held, by name, index or key


def tensors_in_place(owners: Iterable[Any]) -> Before:
    """What modules (their buffers), other objects, dictionaries, lists and cells hold."""
    each = {
        id(owner): owner for owner in owners
    }  # functions of one module have its globals in common
    return [(owner, dict(_entries(owner))) for owner in each.values()]


def put_back(before: Before, effects: Effects) -> None:
    """After the call: what belongs to the update is put in its place with it, and not now.

    Raises `CaptureError` for a count of updates that is not changed in place.
    """
    changed = [
        (owner, key, held.get(key, _NOTHING), new)
        for owner, held in before
        for key, new in list(_entries(owner))
        if held.get(key, _NOTHING) is not new and (key in held or not isinstance(owner, list))
    ]
    changed = [place for place in changed if _in(place[3])]
    in_every_call = []
    for owner, key, old, new in changed:
        late = effects.made_late(_in(new))
        if late is None:
            in_every_call.append((key, old, new))
        elif effects.puts_later(new, late, partial(_put, owner, key)):
            _put(owner, key, old)
    for key, old, new in in_every_call:
        if effects.is_count(_in(old), _in(new)):
            raise CaptureError(
                f"{key!r} in the step",
                seen="the step runs eagerly, and puts a tensor there, made of the one before, which what belongs to "
                "the update is made of",
                wanted="a count that changes with the update",
                fix=f"change it in place, after optimizer.step(): {key}.add_(1)",
            )


_NOTHING = object()  # there was no such name or key


def _in(value: Any) -> list[torch.Tensor]:
    """A tensor, or those in a container."""
    many = isinstance(value, list | tuple | dict) and len(value) > MANY
    return [] if many else tensors_in(value)


def _entries(owner: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(owner, dict):
        yield from list(owner.items())
    elif isinstance(owner, list):
        yield from enumerate(owner)
    elif isinstance(owner, CellType):
        yield from (("cell_contents", owner.cell_contents),) if _is_full(owner) else ()
    elif isinstance(owner, nn.Module):
        yield from list(owner._buffers.items())
        yield from list(vars(owner).items())
    else:
        yield from list(getattr(owner, "__dict__", {}).items())


def _is_full(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that is not bound yet
        return False


def _put(owner: Any, key: Any, value: Any) -> None:
    if isinstance(owner, dict | list):
        if value is _NOTHING:
            del owner[key]
        else:
            owner[key] = value
    elif value is _NOTHING:
        delattr(owner, key)
    else:
        setattr(owner, key, value)


def containers(args: Any, kwargs: Any) -> list[Any]:
    """Dictionaries and lists among the arguments of a call, and in these."""
    found: list[Any] = []
    open_ = [*args, *kwargs.values()]
    while open_:
        value = open_.pop()
        if isinstance(value, dict | list) and len(value) <= MANY:
            found.append(value)
            open_ += value.values() if isinstance(value, dict) else value
    return found
