"""Values of a step are called what the user calls them: in errors, reports and listings."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from gradsync_fx.capture.source_names import users_name
from tests.drive import quick


def _step(batch: Any, y: Any, *rest: Any, mask: Any = None, **more: Any) -> None:
    """Only its signature is looked at."""


class _Trainer:
    def train_step(self, x: Any) -> None:
        """Only its signature is looked at."""


@pytest.mark.parametrize(
    ("source", "function", "name"),
    [
        ("L['args'][0]", _step, "batch"),
        ("L['args'][0]['x'][1]", _step, "batch.x.1"),
        ("L['args'][1].ids", _step, "y.ids"),
        ("L['args'][3]", _step, "rest.1"),
        ("L['kwargs']['mask']", _step, "mask"),
        ("L['kwargs']['extra']", _step, "extra"),
        ("L['args'][0]", partial(_step, 1), "y"),
        ("L['args'][0]", _Trainer().train_step, "x"),
        ("L['function'].__self__.scale", _Trainer().train_step, "self.scale"),
        ("L['args'][2]", _Trainer().train_step, "args.2"),
        ("L['args'][0]", None, "args.0"),
        ("G['SCALE']", _step, "SCALE"),
    ],
)
def test_a_source_is_what_the_user_wrote(source: str, function: Any, name: str) -> None:
    assert users_name(source, function) == name


def test_what_a_function_encloses_has_its_name() -> None:
    scale, others = torch.ones(1), [torch.ones(1)]

    def step() -> Any:
        return scale, others

    assert users_name("L['function'].__closure__[0].cell_contents[0]", step) == "others.0"
    assert users_name("L['function'].__closure__[1].cell_contents", step) == "scale"
    assert users_name("L['function'].func.__closure__[1].cell_contents", partial(step)) == "scale"


@pytest.mark.captured
def test_a_listing_names_the_inputs(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scale = torch.ones(())

    def step(batch: dict[str, Any], target: Any) -> Any:
        loss = ((model(batch["x"]) - target) * scale).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = quick(step, 2)
    with caplog.at_level(logging.DEBUG, "gradsync_fx.runtime.program_cache"):
        run({"x": torch.ones(3, 2)}, target=torch.ones(3, 1))
    told = [record.getMessage() for record in caplog.records]
    (listing,) = [text for text in told if text.startswith("accumulate program")]
    for says in ("parameter weight", "data batch.x", "data target", "data scale"):
        assert f": {says}\n" in listing
