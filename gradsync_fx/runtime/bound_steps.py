"""Optimized steps that are methods: each object has a step, with a window, of its own.

They are kept in the object's `__dict__`, under a name that no attribute has: an override, `super()`, and the same step
under a second name all lead to the step that the class has there. They live as long as the object does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from gradsync_fx.errors import WindowError


KEY = "__gradsync_fx_steps__"
Bound = TypeVar("Bound")
_turn = threading.RLock()  # making a step may look at the object, and so at another step of it


class StepsOfObject:
    """By the class's step that each was made from. A copy of the object, or a pickle, has none: nor their windows."""

    __slots__ = (
        "by_shared",
        "owner",
    )  # and no __dict__: who looks for an object's models does not come here

    def __init__(self, owner: Any = None) -> None:
        self.owner = owner
        self.by_shared: dict[int, tuple[Any, Any]] = {}

    def __reduce__(self) -> Any:
        return StepsOfObject, ()


def bound_step(shared: Any, name: str, instance: Any, make: Callable[[], Bound]) -> Bound:
    """The step of one object, made at its first use. shared: the class's. name: for people.

    Raises `WindowError` for an object that cannot hold one.
    """
    try:
        attributes = vars(instance)
    except TypeError:
        raise WindowError(
            f"method {name!r} of {type(instance).__name__}",
            seen="its objects have __slots__ and no __dict__: none can hold a window of its own",
            wanted="objects that can hold their optimized step",
            fix="add '__dict__' to its __slots__, or optimize a function outside of the class",
        ) from None
    with _turn:  # threads that are first at once get one step, and one window
        held = attributes.get(KEY)
        if held is None or held.owner is not instance:  # a shallow copy has the original's
            held = StepsOfObject(instance)
            if isinstance(instance, type):  # of a class method
                setattr(instance, KEY, held)
            else:
                attributes[KEY] = held
        if id(shared) not in held.by_shared:
            held.by_shared[id(shared)] = (shared, make())  # it is kept, so that no other has its id
        found: Bound = held.by_shared[id(shared)][1]
        return found
