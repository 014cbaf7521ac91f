"""Steps that draw random numbers on the host: eager PyTorch's numbers, and its generators afterwards."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsync_fx
from gradsync_fx.capture import drawn_numbers
from tests.drive import plain_step, quick
from tests.reference import accumulation, mse, regression


pytestmark = pytest.mark.captured
WINDOWS, K = 3, 2


class Net(nn.Module):
    """Two layers that a draw may leave out, and one that is always there."""

    def __init__(self, skip: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), nn.Linear(8, 1)
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            left_out = self.skip(x)
            if left_out is True or left_out is False:
                x = x if left_out else x + layer(x).tanh()
            else:
                x = x + left_out * layer(x).tanh()
        return self.head(x)


def several(x: Tensor) -> float:
    """How many numbers are drawn depends on what the first one is."""
    if random.random() < 0.5:
        return random.uniform(1.0, 2.0)
    return random.gauss(0.0, 1.0) * random.randint(1, 3)


def reseeded(x: Tensor) -> float:
    """A generator that the step itself seeds gives the same numbers in each call."""
    OWN.seed(9)
    return OWN.random()


OWN = random.Random()
LAYERS = nn.ModuleList([nn.Tanh(), nn.ReLU()])
SKIPS: dict[str, Callable[[Tensor], Any]] = {
    "layer_drop": lambda x: random.random() < 0.5,
    "factor": lambda x: random.random(),
    "integer": lambda x: random.randint(0, 3),
    "several": several,
    "torch": lambda x: bool(torch.rand([]) < 0.5),
    "torch_item": lambda x: torch.rand(1).item() > 0.9,
    "torch_integer": lambda x: torch.randint(0, 2, (1,)).item() == 1,
    "torch_normal": lambda x: bool(torch.randn(()) > 0),
    "torch_factor": lambda x: torch.rand([]) * 1.0,
    "choice": lambda x: random.choice([0.0, 0.5, 2.0]),
    "choice_of_layers": lambda x: random.choice(LAYERS)(x),
    "own": lambda x: OWN.random() < 0.5,
    "own_factor": lambda x: OWN.gauss(1.0, 0.5),
    "reseeded": reseeded,
    "seeded_there": lambda x: random.Random(5).random(),
    "size": lambda x: x[:, random.randint(0, 3) :].numel() * 0.1,
}


def seeded() -> None:
    random.seed(3)
    torch.manual_seed(4)
    OWN.seed(5)


def state() -> list[Any]:
    return [random.getstate(), OWN.getstate(), torch.get_rng_state().tolist()]


def both(skip: Callable[[Tensor], Any], **options: Any) -> tuple[nn.Module, nn.Module, Any]:
    """Ours and eager's models after the same windows, with equal states of the generators, and our step."""
    torch.manual_seed(0)
    model = Net(skip)
    other = copy.deepcopy(model)
    windows = regression(WINDOWS, K)
    seeded()
    accumulation(other, torch.optim.SGD(other.parameters(), lr=0.05), windows, mse)
    after = state()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = quick(plain_step, K, **options)
    seeded()
    for window in windows:
        for batch in window:
            step(model, optimizer, *batch)
    assert state() == after
    return model, other, step


def assert_equal(ours: nn.Module, theirs: nn.Module, within: float = 1e-6) -> None:
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=within, rtol=0)


@pytest.mark.parametrize("skip", SKIPS.values(), ids=SKIPS)
def test_numbers_and_generators_are_eagers(skip: Callable[[Tensor], Any]) -> None:
    ours, theirs, _ = both(skip)
    assert_equal(ours, theirs)


@pytest.mark.inductor
@pytest.mark.parametrize("skip", [SKIPS["layer_drop"], SKIPS["factor"]])
def test_with_inductor(skip: Callable[[Tensor], Any]) -> None:
    ours, theirs, _ = both(skip, backend="inductor")
    assert_equal(ours, theirs, 1e-5)


def test_what_cannot_come_out_otherwise_is_no_branch() -> None:
    """Probabilities of 0 and 1: the numbers are drawn all the same."""
    never = both(lambda x: random.random() < 0.0 or random.random() >= 1.0)
    assert_equal(*never[:2])
    assert never[2].compile_count == 2


def test_a_factor_is_no_constant() -> None:
    assert both(SKIPS["factor"])[2].compile_count == 2


def test_prepare_draws_nothing() -> None:
    model = Net(SKIPS["layer_drop"])
    step = quick(plain_step, K)
    seeded()
    before = state()
    step.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), *regression(1, 1)[0][0])
    assert state() == before


def refused(skip: Callable[[Tensor], Any]) -> gradsync_fx.GradSyncError:
    with pytest.raises(gradsync_fx.CaptureError) as caught:
        both(skip)
    return caught.value


def test_too_many_ways_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way out: one draw for both layers."""
    monkeypatch.setattr(drawn_numbers, "WAYS", 2)
    assert "4 ways" in refused(SKIPS["layer_drop"]).seen
    shared: dict[str, float] = {}

    def once(x: Tensor) -> bool:
        # The layers' second call of a forward finds what its first one drew.
        drawn = shared.pop("drawn", None)
        if drawn is None:
            shared["drawn"] = drawn = random.random()
        return drawn < 0.5

    assert_equal(*both(once)[:2])


def test_a_constant_of_the_program_is_refused() -> None:
    """The way out: a factor."""
    error = refused(lambda x: nn.functional.dropout(x, p=random.random()).sum() is None)
    assert "constant" in error.seen
    assert_equal(*both(SKIPS["factor"])[:2])


def test_what_no_program_can_do_is_refused() -> None:
    """The way out: torch's numbers."""
    error = refused(lambda x: random.sample([0.5, 1.0, 2.0], 2)[0])
    assert "random.sample" in error.culprit
    assert "random.randint" in refused(lambda x: random.randint(0, x.sum() > 0)).culprit
    assert_equal(*both(lambda x: torch.rand(x.shape[0], 1))[:2])


def test_a_generator_without_a_seed_is_refused() -> None:
    """The way out: one that is made before."""
    assert "without a seed" in refused(lambda x: random.Random().random()).seen
    assert_equal(*both(SKIPS["own_factor"])[:2])


def test_a_tensor_made_of_a_number_is_refused() -> None:
    """It would be traced anew in each call."""
    assert "constant" in refused(lambda x: torch.tensor(random.random()).exp()).seen


def test_a_branch_on_another_tensor_is_what_is_named() -> None:
    """Numbers that are drawn elsewhere are not taken for it."""
    error = refused(lambda x: bool(torch.rand(1) > x.mean()))
    assert "data-dependent" in error.seen
    assert "random" not in str(error)


def test_what_the_step_raises_is_named() -> None:
    model = Net(lambda x: random.randint(5, 1))
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.05), regression(1, 1)[0][0]
    step = quick(plain_step, K)
    seeded()
    before = state()
    with pytest.raises(gradsync_fx.CaptureError, match="empty range"):
        step(model, optimizer, *batch)
    assert state() == before


def test_a_generator_that_is_replaced_is_another_one() -> None:
    model = Net(lambda x: model.own.random())
    model.own = random.Random(1)
    optimizer, step = torch.optim.SGD(model.parameters(), lr=0.0), quick(plain_step, K)
    (batch,) = regression(1, 1)[0]
    losses = []
    for _ in range(2):
        losses.append(step(model, optimizer, *batch).item())
        model.own = random.Random(2)
    model.own.seed(1)
    assert step(model, optimizer, *batch).item() == losses[0] != losses[1]


def test_importing_the_package_draws_nothing() -> None:
    random.seed(5)
    before = random.getstate()
    gradsync_fx.__getattr__("optimize")
    assert random.getstate() == before
