"""Where all-reduces and waits stand in a boundary program as it is compiled, for two ranks that are not there."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering
from torch.fx import GraphModule, Node

from gradsync_fx.comm.inplace_all_reduce import START_SUMS, WAIT_SUMS
from gradsync_fx.ir.journal import Journal
from gradsync_fx.ir.ops import ALL_REDUCE, WAIT
from gradsync_fx.ir.program import Program
from gradsync_fx.lowering.lower import lower
from gradsync_fx.optimized_step import OptimizedStep
from gradsync_fx.options import Options
from gradsync_fx.passes.fuse import ADD_PRODUCT, add_products
from gradsync_fx.passes.overlap import reduce_in_place, wait_late
from gradsync_fx.passes.pointwise_updates import cut_updates
from gradsync_fx.passes.rewritten import Cut, Rewritten, Wait
from tests.drive import plain_step, step_of
from tests.reference import mse


def clip(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def boundary(
    step: Callable[..., Any], *, closing: frozenset[int] = frozenset({0}), **options: Any
) -> tuple[Program, Any]:
    """Of four equal layers, each a bucket, between two ranks. closing: empty for the accumulate program."""
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    given = {"gradient_accumulation_steps": 2, "backend": "aot_eager", "bucket_cap_mb": 1e-3}
    planned = OptimizedStep(step, Options.of({**given, **options}), simulated=2)
    planned.capture(model, optimizer, torch.randn(4, 128), torch.randn(4, 128))
    (captured,) = planned._executor.catalogue.captures
    return captured.programs.build(closing), captured.facts.capture.fake_mode


def rewritten(step: Callable[..., Any], **options: Any) -> tuple[GraphModule, Cut]:
    program, fake_mode = boundary(step, **options)
    found = Rewritten.copy_of(program, fake_mode)
    for one in (wait_late, reduce_in_place, cut_updates):
        one(found)
    found.main.graph.lint()
    return found.main, found.cut


def found(module: GraphModule, target: Any) -> list[Node]:
    return list(module.graph.find_nodes(op="call_function", target=target))


def test_waits_stand_behind_the_backward() -> None:
    """all_reduce, wait, mm, ...   ->   all_reduce, mm, ..., all_reduce, wait, wait"""
    planned = Rewritten.copy_of(*boundary(plain_step))
    wait_late(planned)
    module = planned.main
    module.graph.lint()
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    starts, waits = found(module, ALL_REDUCE), found(module, WAIT)
    assert len(starts) == len(waits) == 4
    products = found(module, torch.ops.aten.mm.default)
    assert max(order[n] for n in [*starts, *products]) < min(order[n] for n in waits)
    assert order[starts[0]] < order[products[-1]]


def test_each_bucket_is_waited_for_right_before_its_updates() -> None:
    module, cut = rewritten(plain_step)
    assert len(found(module, START_SUMS)) == 4
    assert found(module, WAIT_SUMS) == found(module, ALL_REDUCE) == []
    assert [isinstance(call, Wait) for call in cut.calls] == [True, False] * 4
    for wait, update in zip(cut.calls[::2], cut.calls[1::2], strict=True):
        assert isinstance(wait, Wait)
        assert not isinstance(update, Wait)
        assert update.tensors[update.kernel.written] in wait.sums
    assert not cut.extras


def test_with_a_norm_over_all_gradients_all_waits_come_first() -> None:
    module, cut = rewritten(step_of(mse, clip))
    assert len(found(module, START_SUMS)) == len(found(module, WAIT_SUMS)) == 4
    assert not any(isinstance(call, Wait) for call in cut.calls)
    assert len(cut.calls) == 4


@pytest.mark.parametrize("options", [{"sync_each_batch": True}, {"reduce_dtype": torch.float16}])
def test_what_is_no_plain_sum_travels_by_itself(options: dict[str, Any]) -> None:
    module, _ = rewritten(plain_step, **options)
    assert len(found(module, ALL_REDUCE)) == 4
    assert found(module, START_SUMS) == []


def test_products_add_themselves_to_their_sums() -> None:
    """In the accumulate program; up to the order of the additions."""
    program, fake_mode = boundary(plain_step, closing=frozenset(), backend="inductor")
    copied = Rewritten.copy_of(program, fake_mode)
    add_products(copied)
    module = copied.main
    module.graph.lint()
    assert len(found(module, ADD_PRODUCT)) == 4
    assert found(module, torch.ops.aten.copy_.default) == []
    one = [torch.randn(form.shape, dtype=form.dtype) for form in program.inputs()]
    other = [value.clone() for value in one]
    with torch.no_grad():
        program.module(*one)
        module(*other)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.inductor
@pytest.mark.parametrize("python_reducer", [False, True])
def test_the_generated_code_starts_early_and_adds_products_in_place(
    python_reducer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a DDP with `optimize_ddp="python_reducer"` was made before: it leaves a setting of Inductor's on."""
    code: list[str] = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(code.append))
    program, fake_mode = boundary(plain_step, backend="inductor")
    with inductor_config.patch(_fuse_ddp_communication=python_reducer):
        lower(program, fake_mode, Options(), Journal())
    calls = re.findall(r"^ *torch\.ops\.(\w+\.\w+)", code[0], re.MULTILINE)
    assert calls == ["gradsync_fx.add_product", "gradsync_fx.start"] * 4
