"""Steps made from a LightningModule: equal to Lightning's Trainer on the same data, and what cannot be one."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch

import gradsync_fx
from gradsync_fx.integrations.lightning import step_of
from tests.reference import assert_bitwise, assert_same, regression
from tests.refusals import refused
from tests.scenarios import lightened
from tests.scenarios.lightened import Regressor
from tests.workers import Ranks


def check(facts: dict[str, Any], batches: int, k: int, *, atol: float = 1e-6) -> None:
    assert_same(facts["found"], facts["expected"], atol=atol)
    assert facts["rate"] == pytest.approx(facts["expected_rate"])
    assert facts["updates"] == lightened.EPOCHS * -(-batches // k)
    assert facts["compiled"] == min(k, 2) + (batches % k > 0)


@pytest.mark.parametrize(
    ("how", "batches", "k"),
    [
        ({}, 2, 1),
        ({}, 4, 2),
        ({}, 5, 2),
        ({"form": "list", "optimizer": "adamw"}, 6, 3),
        ({"form": "two lists", "clip": ("norm", 0.5)}, 4, 2),
        ({"form": "each step", "clip": ("value", 0.05)}, 4, 2),
        ({"form": "dict", "returns": "dict"}, 4, 2),
        ({"form": "dict of dict", "clip": ("norm", 0.5)}, 5, 3),
        ({"form": "plateau"}, 4, 2),
    ],
    ids=str,
)
def test_one_rank(how: dict[str, Any], batches: int, k: int) -> None:
    atol = 1e-5 if how.get("optimizer") == "adamw" else 1e-6
    check(lightened.both(None, how, batches, k), batches, k, atol=atol)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("how", "batches", "k"),
    [
        ({}, 4, 2),
        ({"form": "dict of dict", "clip": ("norm", 0.5)}, 5, 2),
        ({"optimizer": "adamw"}, 4, 2),
    ],
    ids=str,
)
def test_two_ranks(ranks: Ranks, how: dict[str, Any], batches: int, k: int) -> None:
    first, second = ranks(lightened.both, how, batches, k)
    for facts in (first, second):
        check(facts, batches, k, atol=1e-5 if how.get("optimizer") == "adamw" else 1e-6)
        in_epoch = [int(i % k == k - 1) for i in range(batches)]
        assert facts["sums"] == in_epoch * lightened.EPOCHS
    assert_bitwise(first["found"], second["found"])


def test_the_module_stays_as_it_is() -> None:
    module = Regressor({})
    before = set(module.__dict__)
    step_of(module)
    assert set(module.__dict__) == before
    assert type(module) is Regressor
    assert module.log.__func__ is L.LightningModule.log  # type: ignore[attr-defined]


class Manual(Regressor):
    def __init__(self) -> None:
        super().__init__({})
        self.automatic_optimization = False


class OwnStep(Regressor):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Would do something of its own."""


class Ends(Regressor):
    def on_train_batch_end(self, *args: Any) -> None:
        """Would do something of its own."""


def test_refused() -> None:
    option = gradsync_fx.OptionError
    refused(option, "Manual", step_of, Manual())
    refused(option, "OwnStep.optimizer_step", step_of, OwnStep({}))
    module = Regressor({})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    refused(option, "configure_optimizers", step_of, module, [optimizer, optimizer])
    for wrong in ({"frequency": 2}, {"interval": "day"}, {"unknown": 1}):
        given = [[optimizer], [{"scheduler": schedule, **wrong}]]
        refused(option, "lr_scheduler StepLR", step_of, module, given)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    refused(option, "ReduceLROnPlateau", step_of, module, [[optimizer], [plateau]])
    with pytest.raises(gradsync_fx.OptionError, match="gradient_clip_algorithm"):
        step_of(module, gradient_clip_algorithm="both")


def test_a_hook_of_the_loop_is_told() -> None:
    with pytest.warns(gradsync_fx.GradSyncWarning, match=r"Ends.on_train_batch_end"):
        step_of(Ends({}))


@pytest.mark.parametrize(
    "name",
    ["setup", "configure_model", "on_fit_start", "on_train_start", "on_train_epoch_start"],
)
def test_hooks_ahead_of_the_step_are_told(name: str) -> None:
    kind: Any = type("Own", (Regressor,), {name: lambda self, *args, **kwargs: None})
    with pytest.warns(gradsync_fx.GradSyncWarning, match=rf"Own.{name} is not part .* call it"):
        step_of(kind({}))


class Warmed(Regressor):
    def share(self) -> float:
        return min(1.0, self.global_step / 5)

    def training_step(self, batch: Any, index: int) -> Any:
        return super().training_step(batch, index) * self.share()


class Watched(Regressor):
    def validation_step(self, batch: Any, index: int) -> int:
        return self.global_step


def test_what_a_module_knows_of_its_trainer() -> None:
    with pytest.warns(gradsync_fx.GradSyncWarning, match=r"Warmed.share reads self.global_step"):
        step_of(Warmed({}))
    step_of(Watched({}))  # not in training: no warning


@pytest.mark.parametrize(
    "name", ["on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device"]
)
def test_hooks_that_change_the_batch_are_part_of_the_step(name: str) -> None:
    def doubled(self: Any, batch: Any, *args: Any) -> Any:
        return [batch[0] * 2, *batch[1:]]

    plain, changed = Regressor({}), type("Own", (Regressor,), {name: doubled})({})
    changed.load_state_dict(plain.state_dict())
    ((batch,),) = regression(1, 1)
    ours = gradsync_fx.optimize(step_of(changed), backend="aot_eager")
    theirs = gradsync_fx.optimize(step_of(plain), backend="aot_eager")
    ours(batch)
    theirs([batch[0] * 2, *batch[1:]])
    for a, b in zip(changed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_model_compiled_alone_warns_at_the_users_line() -> None:
    # Importing Lightning puts a function of its own round `torch.compile`.
    with pytest.warns(gradsync_fx.GradSyncWarning, match="whole training step") as caught:
        torch.compile(torch.nn.Linear(2, 1), backend="gradsync")
    assert [warning.filename for warning in caught] == [__file__]
