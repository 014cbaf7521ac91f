"""A class and all classes below it, for what is patched or looked up on every one of them."""

from __future__ import annotations

from typing import TypeVar


C = TypeVar("C")


def family(cls: type[C]) -> list[type[C]]:
    """The class and its subclasses, each once, each after one that it is a subclass of."""
    found: dict[type[C], None] = {cls: None}
    for below in cls.__subclasses__():
        found |= dict.fromkeys(family(below))
    return list(found)
