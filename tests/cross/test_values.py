"""Values of the generated kernels: in Triton's interpreter they give what the programs give on the CPU.

Of an MLP and a small GPT, with all four optimizers, weights and skip_nonfinite; attention as products, dropout 0.
Muon's products are in bfloat16, which the CPU and the kernels round in other places: each lies as far from float32 as
the other (0.5 % of an update, 0.9 % apart), so there the kernels' distance is compared with the CPU's. Not run, as
there is no Triton code of them to interpret: attention's own kernels and convolutions; and what draws random numbers.
"""

from __future__ import annotations

import pytest

from tests.cross.cases import MICRO_STEPS, Case, Compared
from tests.cross.conftest import Compare, Lower


pytestmark = [pytest.mark.cross, pytest.mark.captured]
MLP = Case("mlp", ranks=1, clip=True)
# Its accumulate program is that of the case before, as is Adafactor's of the GPT.
MUON = Case("mlp", ranks=1, optimizer="muon", programs=("boundary",))
GPT = {"ranks": 1, "attention_in_products": True, "programs": MICRO_STEPS}
CASES = [
    MLP,
    Case("mlp", ranks=1, optimizer="sgd", weights=True, programs=MICRO_STEPS),
    Case("mlp", ranks=1, optimizer="adafactor", skip_nonfinite=True, programs=MICRO_STEPS),
    MUON,
    Case("small_gpt", optimizer="adamw", weights=True, skip_nonfinite=True, **GPT),
    Case("small_gpt", optimizer="sgd", clip=True, **GPT),
    Case("small_gpt", optimizer="adafactor", **GPT | {"programs": ("boundary",)}),
    Case("small_gpt", optimizer="muon", weights=True, **GPT),
]
TOLERANCE = 1e-3  # of sums in another order
AS_FAR = 2.0  # from float32, at most, as the CPU's own rounding


def is_right(compared: Compared) -> bool:
    return compared.worst < TOLERANCE and compared.rounding < AS_FAR


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_give_what_the_cpu_gives(case: Case, lower: Lower, compare: Compare) -> None:
    sources = {name: made.source for name, made in lower(case).items()}
    for name, compared in compare(case, sources).items():
        assert is_right(compared), (name, compared)
        assert compared.changed, name
        assert (compared.rounding > 0) == (case.optimizer == "muon" and name != "accumulate")


def test_a_false_constant_is_found(lower: Lower, compare: Compare) -> None:
    sources = {name: made.source for name, made in lower(MLP).items()}
    right = "1e-05, tl.float32)"  # of LayerNorm
    assert right in sources["accumulate"]
    wrong = {name: source.replace(right, "1e-01, tl.float32)") for name, source in sources.items()}
    found = compare(MLP, wrong)
    assert not is_right(found["accumulate"])
    assert not is_right(found["boundary"])


def test_a_false_constant_before_a_rounding_is_found(lower: Lower, compare: Compare) -> None:
    boundary = lower(MUON)["boundary"].source
    right = "beta=3.4445"  # of Muon's products
    assert right in boundary
    found = compare(MUON, {"boundary": boundary.replace(right, "beta=3.3")})
    assert found["boundary"].worst < TOLERANCE
    assert found["boundary"].rounding > AS_FAR
