"""What gpu_check.py finds, line by line: OK or FAIL with figures; a check that breaks off is a line, too."""

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Line:
    """ok: None for figures that nothing is expected of."""

    what: str
    ok: bool | None
    figures: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        mark = {True: "OK  ", False: "FAIL", None: "    "}[self.ok]
        told = ", ".join(f"{name} {_short(value)}" for name, value in self.figures.items())
        return f"{mark} {self.what}: {told}" if told else f"{mark} {self.what}"


Check = Callable[[], Iterable[Line]]


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def at_most(what: str, found: float, limit: float, **figures: Any) -> Line:
    """Fails for NaN, too."""
    return Line(what, found <= limit, {"off by": found, "at most": limit, **figures})


def equal(what: str, found: Any, wanted: Any, **figures: Any) -> Line:
    return Line(what, found == wanted, {"found": found, "wanted": wanted, **figures})


def near(what: str, found: float, wanted: float, share: float, **figures: Any) -> Line:
    """Within this share of what is wanted."""
    off = abs(found - wanted) / abs(wanted) if wanted else float("inf")
    return Line(
        what,
        off <= share,
        {"found": found, "wanted": wanted, "off by": off, "at most": share, **figures},
    )


def distance(found: Sequence[Tensor], wanted: Sequence[Tensor], start: Sequence[Tensor]) -> float:
    """How far parameters ended from where they should have, as a share of the way that they should have gone."""

    def norm(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
        pairs = zip(ours, theirs, strict=True)
        parts = [(a.double().cpu() - b.double().cpu()).square().sum() for a, b in pairs]
        return torch.stack(parts).sum().sqrt().item()

    way = norm(wanted, start)
    return norm(found, wanted) / way if way else float("nan")


def told(name: str, check: Check, tell: Callable[[str], None]) -> bool:
    """Tells each line of a check as it comes; what it raises is a failure of its own. Whether all is well."""
    well = True
    for line in _lines(name, check):
        tell(str(line))
        well &= line.ok is not False
    return well


def _lines(name: str, check: Check) -> Iterator[Line]:
    try:
        for line in check():
            yield Line(f"{name}, {line.what}", line.ok, line.figures)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = " ".join(str(error).split())[:600]
        yield Line(
            f"{name}, broken off: {type(error).__name__} at {where.filename}:{where.lineno}: {said}",
            False,
        )
