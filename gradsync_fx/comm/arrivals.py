"""Parameters on their way: new values are gathered while the next call's forward begins, and put in place when it gets
to them.

update -> add(parameters, land) -> ... -> arrive(parameters), an op before the first that reads them -> land
                                  or      settle(), for whoever else reads them

Until it lands, a parameter holds the value that it had before the update, whole. A parameter that somebody writes in
between would lose that: it is an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from gradsync_fx.errors import WindowError


_LIBRARY = torch.library.Library("gradsync_fx", "FRAGMENT")
_LIBRARY.define("arrive(Tensor(a!)[] parameters) -> ()")


class Arrival:
    """Some parameters that one gather brings. land: waits for it, and writes them.

    parameters: the tensors that are written, and their names.
    """

    def __init__(
        self, parameters: Sequence[tuple[str, torch.Tensor]], land: Callable[[], None]
    ) -> None:
        self.parameters = tuple(parameters)
        self._land = land
        self._versions = [p._version for _, p in self.parameters]

    def check(self) -> None:
        """Raises `WindowError` where a parameter was written since the update."""
        for (name, parameter), version in zip(self.parameters, self._versions, strict=True):
            if parameter._version != version:
                raise WindowError(
                    f"parameter {name!r}",
                    seen="it was written between two calls, while its value of the last update was on its way",
                    wanted="no write to a parameter before that value is in place",
                    fix="call step.settle() before what writes it, or leave overlap_param_gather out",
                )

    def land(self) -> None:
        """Waits for the values, and writes them."""
        with torch.no_grad():
            self._land()


class Arrivals:
    """All that is on its way in this process. emptied: called, once, when all of it has landed."""

    def __init__(self) -> None:
        self._by_address: dict[int, Arrival] = {}
        self._lock = threading.RLock()
        self._emptied: list[Callable[[], None]] = []

    def __len__(self) -> int:
        """Parameters that have not landed."""
        return len(self._by_address)

    def add(self, arrival: Arrival) -> None:
        """What its parameters were waiting for lands first."""
        self.land([p for _, p in arrival.parameters])
        with self._lock:
            for _, parameter in arrival.parameters:
                self._by_address[parameter.data_ptr()] = arrival

    def check(self) -> None:
        """Raises `WindowError` where somebody wrote a parameter that is on its way.

        Not inside of a call: torch counts what its program will write before it runs.
        """
        for arrival in dict.fromkeys(self._by_address.values()):
            arrival.check()

    def when_empty(self, call: Callable[[], None]) -> None:
        """Calls it once, when everything has landed."""
        self._emptied.append(call)

    def land(self, parameters: Sequence[torch.Tensor]) -> None:
        """From here on these parameters have their new values."""
        if not self._by_address:
            return
        with self._lock:
            for parameter in parameters:
                arrival = self._by_address.get(parameter.data_ptr())
                if arrival is not None:
                    self._land(arrival)

    def settle(self) -> None:
        """From here on all parameters have their new values."""
        with self._lock:
            while self._by_address:
                self._land(next(iter(self._by_address.values())))

    def _land(self, arrival: Arrival) -> None:
        for _, parameter in arrival.parameters:
            del self._by_address[parameter.data_ptr()]
        try:
            arrival.land()
        finally:
            if not self._by_address:
                emptied, self._emptied = self._emptied, []
                for call in emptied:
                    call()


ARRIVALS = Arrivals()


def _arrive(parameters: list[torch.Tensor]) -> None:
    ARRIVALS.land(parameters)


_LIBRARY.impl("arrive", _arrive, "CompositeExplicitAutograd")


@torch.library.register_fake("gradsync_fx::arrive", lib=_LIBRARY)
def _arrive_fake(parameters: list[torch.Tensor]) -> None:
    """Nothing is made."""


ARRIVE = torch.ops.gradsync_fx.arrive.default
