"""Random numbers that a step draws on the host: drawn ahead of its program, and inputs of it like any other number.

random.random(), rng.randint(1, 6), random.choice(layers) ...   Python's, where their arguments are constants
torch.rand([]), torch.randint(2, (1,))                          at a line whose number a branch asks for (layer drop)

    call -> what the draws of each trace would give, from the generators as they are -> guards choose a trace by that
         -> the draws are made for good -> its program

A branch on a draw is a guard on its value: each way that it can come out is a trace of its own. Calls that run no
program (`prepare`, a trace that starts over, an error) leave the generators as they were.
"""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


# Methods of a generator of Python's that give one number. The functions of the module `random` are those of its own.
NUMBERS = frozenset(
    {
        *("random", "uniform", "triangular", "randint", "randrange", "getrandbits", "gauss"),
        *("normalvariate", "lognormvariate", "expovariate", "vonmisesvariate", "gammavariate"),
        *("betavariate", "paretovariate", "weibullvariate", "choice"),
    }
)
OF_TORCH = frozenset({torch.rand, torch.randn, torch.randint})
PYTHONS: random.Random = random.random.__self__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Draw:
    """A call that draws one number: a bound method of a generator of Python's, or a function of torch."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        of = "torch" if self.of_torch else "random" if self.generator is PYTHONS else "Random"
        return f"{of}.{self.function.__name__}"

    @property
    def of_torch(self) -> bool:
        return self.function in OF_TORCH

    @property
    def generator(self) -> random.Random:
        """Python's own, or one that the user made."""
        found: random.Random = self.function.__self__  # type: ignore[attr-defined]
        return found

    @property
    def below_one(self) -> bool:
        """Whether it gives a float from 0 to 1, without 1."""
        return self.function is torch.rand or self.function.__name__ == "random"

    @property
    def outcomes(self) -> int:
        """How many numbers it chooses from, where it is one of some integers; else 2."""
        if self.function is torch.randint:
            return len(range(*self.args[:-1]))
        count = _OUTCOMES.get(self.function.__name__)
        return 2 if count is None or self.kwargs else count(*self.args)

    def make(self) -> Any:
        value = self.function(*self.args, **dict(self.kwargs))
        return value.item() if self.of_torch else value


_OUTCOMES: dict[str, Callable[..., int]] = {
    "choice": len,
    "randrange": lambda *ends: len(range(*ends)),
    "randint": lambda first, last: last - first + 1,
}
Draws = tuple[Draw, ...]


DRAWN: dict[int, list[Any]] = {}  # the values of all series, by number: guards look at them
_serial = itertools.count()


@dataclass(slots=True)
class _Series:
    """Draws in order, and what they would give now. values: one object, as long as the series is known."""

    draws: list[Draw]
    values: list[Any] = field(default_factory=list)
    number: int = field(default_factory=_serial.__next__)

    def foresee(self, before: _Generators) -> None:
        self.values[:] = [draw.make() for draw in self.draws]
        before.restore()


class _Generators:
    """The states of generators at one moment. torch's costs a copy, and is kept where it is drawn from."""

    def __init__(self, of_python: Iterable[random.Random], *, of_torch: bool) -> None:
        self._states = [(one, one.getstate()) for one in of_python]
        self._torch = torch.get_rng_state() if of_torch else None

    def add(self, generator: random.Random) -> None:
        """As it is now."""
        if all(one is not generator for one, _ in self._states):
            self._states.append((generator, generator.getstate()))

    def restore(self) -> None:
        for one, state in self._states:
            one.setstate(state)
        if self._torch is not None:
            torch.set_rng_state(self._torch)


class HostDraws:
    """What the traces of one step draw."""

    def __init__(self) -> None:
        self._known: list[_Series] = []
        self._generators = [PYTHONS]
        self._of_torch = False
        self._before: _Generators | None = None  # as the call found them
        weakref.finalize(self, _forget, self._known)

    def foresee(self) -> None:
        """Before guards are looked at: what each known series of draws would give."""
        if self._known:
            self._before = _Generators(self._generators, of_torch=self._of_torch)
            for series in self._known:
                series.foresee(self._before)

    def begin(self) -> None:
        """A trace begins, and the generators are as the call found them."""
        self._before = _Generators(self._generators, of_torch=True)

    def place(self, draws: Draws) -> tuple[int, int]:
        """Where the number of the last of these draws stands: the list of `DRAWN`, and its index there."""
        wanted = list(draws)
        series = next((s for s in self._known if s.draws[: len(wanted)] == wanted), None)
        if series is None:
            series = next((s for s in self._known if s.draws == wanted[:-1]), None) or _Series([])
            self._note_generator(wanted[-1])
            assert self._before is not None
            with torch.random.fork_rng(devices=[]):
                now = _Generators(self._generators, of_torch=False)  # the trace may have drawn
                self._before.restore()
                try:
                    series.values[:] = [draw.make() for draw in wanted]
                finally:
                    now.restore()
            series.draws[:] = wanted
            if all(one is not series for one in self._known):
                self._known.append(series)
                DRAWN[series.number] = series.values
        return series.number, len(wanted) - 1

    def _note_generator(self, draw: Draw) -> None:
        if draw.of_torch:
            self._of_torch = True
        elif all(one is not draw.generator for one in self._generators):
            assert self._before is not None
            self._generators.append(draw.generator)
            self._before.add(draw.generator)  # a trace draws from copies of the user's

    @contextmanager
    def made(self, draws: Draws) -> Iterator[None]:
        """While the program of these draws runs: they are made for good, unless it does not come to its end."""
        if not draws:
            yield
            return
        assert self._before is not None
        self._before.restore()
        for draw in draws:
            draw.make()
        try:
            yield
        except BaseException:
            self._before.restore()
            raise


def _forget(known: list[_Series]) -> None:
    for series in known:
        del DRAWN[series.number]
