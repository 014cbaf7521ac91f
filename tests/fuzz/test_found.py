"""What fuzzing has found, each as the smallest case of it."""

from __future__ import annotations

import pytest

from tests.eagerly import asked
from tests.fuzz.cases import Case, Do
from tests.fuzz.plain import compare
from tests.fuzz.play import play


FOUND = {
    # The momentum of a scalar parameter was taken for a step counter, and its address for a tensor's: a crash.
    "scalar momentum": Case("twice", "decay", 2, (Do("call"), Do("call", 1))),
    # For its sake all step counters became tensors of float32: a float64 model was trained with six digits.
    "scalar moments": Case(
        "twice", "Adam-l2", 1, (Do("call", 31), Do("call", 85, rows=3)), loss="divided"
    ),
    # A window that was loaded and not yet called could not be discarded, and would have come back.
    "discard of a loaded window": Case(
        "linear",
        "SGD",
        3,
        (Do("call"), Do("reload"), Do("discard"), Do("call", 1), Do("call", 2), Do("call", 3)),
    ),
    # Nor could it be saved again: its sums were left out.
    "save of a loaded window": Case(
        "linear", "momentum", 2, (Do("call"), Do("reload"), Do("reload"), Do("call", 1))
    ),
}


@pytest.mark.skipif(asked(), reason="cases say themselves which way they are run")
@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    compare(FOUND[name], [play(0, FOUND[name])])
