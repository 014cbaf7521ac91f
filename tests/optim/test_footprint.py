"""Optimizers of a user's own that are traced: what their code reads is an input or a guard, and nothing is frozen."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import gradsync_fx
from gradsync_fx.optim.footprint import Footprint
from gradsync_fx.optim.reached import Unseen, is_torchs
from tests import own_optimizers
from tests.drive import drive, plain_step, quick
from tests.models import mlp
from tests.own_optimizers import COMPILED, OPAQUE, Constant, Make, Own
from tests.reference import accumulation, assert_same, regression, twins


def pair() -> tuple[nn.Module, nn.Module]:
    ours, eager = twins(mlp())
    for model in (ours, eager):
        model[2].weight.lr_scale = 0.1  # type: ignore[index, union-attr]
    return ours, eager


@pytest.mark.parametrize("name", COMPILED)
def test_what_tells_parameters_apart_is_seen(name: str) -> None:
    """Warnings are errors: none of these is opaque."""
    ours, eager = pair()
    optimizer, reference = COMPILED[name](ours), COMPILED[name](eager)
    data = regression(4, 2)
    step = quick(plain_step, 2)
    assert_same(drive(step, ours, optimizer, data), accumulation(eager, reference, data), atol=1e-6)
    assert step.compile_count == 2
    assert not step.report().warnings


@pytest.mark.parametrize("name", ["name", "place"])
def test_places_count_parameters_without_a_gradient(name: str) -> None:
    ours, eager = pair()
    for model in (ours, eager):
        model[0].bias.requires_grad_(False)  # type: ignore[index, union-attr]
    optimizer, reference = COMPILED[name](ours), COMPILED[name](eager)
    data = regression(3, 2)
    mine = drive(quick(plain_step, 2), ours, optimizer, data)
    assert_same(mine, accumulation(eager, reference, data), atol=1e-6)


def test_constants_are_guards() -> None:
    """An attribute, an attribute of a parameter and a global that change between calls: traced anew, and bounded."""
    ours, eager = pair()
    optimizer, reference = Constant(ours.parameters()), Constant(eager.parameters())
    step = quick(plain_step, 1)
    (windows,) = (regression(8, 1),)
    changes: dict[int, float] = {2: 0.25, 5: 0.75}
    for i, window in enumerate(windows):
        for o in (optimizer, reference):
            o.scale = changes.get(i, o.scale)
        step(ours, optimizer, *window[0])
        plain_step(eager, reference, *window[0])
        torch.testing.assert_close(ours.state_dict(), eager.state_dict(), atol=1e-6, rtol=0)
    assert step.compile_count == 3


@pytest.mark.parametrize("what", ["attribute", "global", "class", "parameter", "method", "shadow"])
def test_what_is_set_between_calls_holds_from_then_on(what: str, monkeypatch: Any) -> None:
    class Mine(Constant):
        factor = 0.5

        def rate(self, i: int, p: Any, group: dict[str, Any]) -> Any:
            return super().rate(i, p, group) * getattr(p, "own", 1.0)

    ours, eager = pair()
    optimizer, reference = Mine(ours.parameters()), Mine(eager.parameters())
    step = quick(plain_step, 1)
    for i, window in enumerate(regression(4, 1)):
        if i == 2:
            if what == "global":
                monkeypatch.setattr(own_optimizers, "SCALE", 0.1)
            elif what == "class":
                Mine.factor = 0.1
            elif what == "method":
                monkeypatch.setattr(Mine, "rate", lambda self, i, p, group: 0.01)
            for o, m in ((optimizer, ours), (reference, eager)):
                if what == "attribute":
                    o.scale = 0.1
                elif what == "shadow":
                    o.factor = 0.1
                elif what == "parameter":
                    m[0].bias.own = 0.1  # type: ignore[index, union-attr]
        step(ours, optimizer, *window[0])
        plain_step(eager, reference, *window[0])
        torch.testing.assert_close(ours.state_dict(), eager.state_dict(), atol=1e-6, rtol=0)


def test_what_changes_with_every_call_is_opaque_in_the_end() -> None:
    ours, eager = pair()
    optimizer, reference = Constant(ours.parameters()), Constant(eager.parameters())
    step = quick(plain_step, 1)
    for i, window in enumerate(regression(8, 1)):
        optimizer.scale = reference.scale = 1 / (i + 1)
        told = pytest.warns(gradsync_fx.GradSyncWarning, match="changes too often")
        with told if i == 5 else nullcontext():
            step(ours, optimizer, *window[0])
        plain_step(eager, reference, *window[0])
        torch.testing.assert_close(ours.state_dict(), eager.state_dict(), atol=1e-6, rtol=0)
    assert step.compile_count == 6


@pytest.mark.parametrize("name", OPAQUE)
def test_looking_leaves_everything_as_it_was(name: str) -> None:
    """A trace that is given up has changed nothing: attributes, groups, state, class, parameters."""
    model = mlp()
    optimizer = OPAQUE[name](model)

    def seen(optimizer: Any) -> Any:
        plain = (int, float, list, dict, torch.Tensor)
        held = {k: v for k, v in vars(optimizer).items() if isinstance(v, plain) and k[0] != "_"}
        entries = {k: v for k, v in vars(type(optimizer)).items() if isinstance(v, int | float)}
        marks = [[k for k in vars(p) if k[0] != "_"] for p in model.parameters()]
        kept = copy.deepcopy((held, entries))
        return {**kept[0], **kept[1], "marks": [len(mark) for mark in marks]}

    before = seen(optimizer)
    gradsync_fx.explain(plain_step, model, optimizer, *regression(1, 1)[0][0])
    assert str(seen(optimizer)) == str(before)


def test_torchs_own_are_known() -> None:
    model = mlp()
    for name in ("SGD", "AdamW", "Adafactor", "NAdam", "LBFGS"):
        assert is_torchs(getattr(torch.optim, name)(model.parameters(), lr=0.1))

    class SGD(torch.optim.SGD):
        """Of the same name, and not torch's."""

    assert not is_torchs(SGD(model.parameters(), lr=0.1))
    assert not is_torchs(Own(model.parameters()))


@pytest.mark.parametrize(
    ("name", "why"),
    {
        "id": "'id'",
        "clock": "module time",
        "global": "global 'SCALES'",
        "trainable": "requires",
    }.items(),
)
def test_code_is_read_ahead_of_a_trace(name: str, why: str) -> None:
    make: Make = OPAQUE[name]
    with pytest.raises(Unseen, match=why):
        Footprint(make(mlp()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_optimizers_of_torch_distributed_are_not_traced() -> None:
    from torch.distributed.optim import PostLocalSGDOptimizer  # warns when it is imported

    class Wrapped(PostLocalSGDOptimizer):
        def __init__(self, inner: Optimizer) -> None:
            self.optim, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults

    with pytest.raises(Unseen, match="PostLocalSGDOptimizer"):
        Footprint(Wrapped(torch.optim.SGD(mlp().parameters(), lr=0.1)))
