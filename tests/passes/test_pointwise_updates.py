"""Updates cut out of a program: main program and kernels together do, bit for bit, what the program does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.optim import Optimizer

from gradsync_fx.ir.program import Program, output_values
from gradsync_fx.passes.fuse import write_early
from gradsync_fx.passes.pointwise_updates import cut_updates, run_calls
from gradsync_fx.passes.rewritten import Cut, Rewritten
from tests.drive import plain_step, quick, step_of
from tests.models import mlp
from tests.reference import mse, regression


def clip(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def boundary_of(step: Callable[..., Any], model: nn.Module, optimizer: Optimizer) -> Program:
    run = quick(step, 2)
    run.prepare(model, optimizer, *regression(1, 1)[0][0])
    program: Program = run._executor.catalogue.captures[0].programs.by_name["boundary"]
    return program


def cut_of(program: Program) -> tuple[GraphModule, Cut]:
    rewritten = Rewritten.copy_of(program, None)
    cut_updates(rewritten)
    rewritten.main.graph.lint()
    return rewritten.main, rewritten.cut


def inputs_of(program: Program) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for form in program.inputs():
        value = torch.empty_strided(form.shape, form.stride(), dtype=form.dtype)
        found.append(value.copy_(torch.rand(form.shape, generator=generator)))
    return found


def assert_cut_computes_the_same(program: Program, *, flat: bool) -> None:
    main, cut = cut_of(program)
    whole, apart = inputs_of(program), inputs_of(program)
    seen: list[tuple[int, ...]] = []
    for call in cut.calls:

        def run(args: list[Any], module: GraphModule = call.kernel.module) -> Any:
            seen.append(tuple(args[1].shape))
            return module(*args)

        call.kernel.run = run if flat else None
    with torch.no_grad():
        wanted = program.module(*whole)
        results = list(main(*apart))
        count = len(output_values(program.module))
        run_calls(cut.calls, apart, results[count:])
    for a, b in zip([*wanted, *whole], [*results[:count], *apart], strict=True):
        assert a is b is None or torch.equal(a, b)
    assert all(len(shape) == 1 for shape in seen)
    assert bool(seen) is flat


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("between", [clip, lambda model: None])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_one_kernel_for_all_parameters(
    make: Callable[..., Optimizer], between: Callable[[nn.Module], None], flat: bool
) -> None:
    model = mlp()
    program = boundary_of(step_of(mse, between), model, make(model.parameters(), lr=0.1))
    _, cut = cut_of(program)
    assert len(cut.calls) == len(list(model.parameters()))
    (kernel,) = {call.kernel for call in cut.calls}
    assert kernel.resets
    assert len(cut.extras) == (between is clip)
    assert_cut_computes_the_same(program, flat=flat)


def test_a_value_read_after_the_update_leaves_it_in_the_program() -> None:
    average = torch.zeros(16, 8)

    def averaging(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = plain_step(model, optimizer, x, y)
        with torch.no_grad():
            average.lerp_(model[0].weight, 0.5)  # type: ignore[index]
        return loss

    model = mlp()
    program = boundary_of(averaging, model, torch.optim.SGD(model.parameters(), lr=0.1))
    main, cut = cut_of(program)
    assert len(cut.calls) == len(list(model.parameters())) - 1
    assert len(main.graph.find_nodes(op="call_module")) == 1


def test_parameters_of_other_layouts() -> None:
    """Dense in another order, and with gaps: one is a flat view of its memory, the other runs as it stands."""
    model = mlp()
    model[0].weight = nn.Parameter(torch.randn(8, 16).t())
    model[2].weight = nn.Parameter(model[2].weight.detach().unsqueeze(-1).repeat(1, 1, 2)[..., 0])
    program = boundary_of(plain_step, model, torch.optim.AdamW(model.parameters(), lr=0.1))
    assert_cut_computes_the_same(program, flat=True)


def test_sums_are_written_where_they_are_made() -> None:
    """acc + g stands right before its write, in the order of the gradients."""
    model = mlp()
    step = quick(plain_step, 2)
    step.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), *regression(1, 1)[0][0])
    (captured,) = step._executor.catalogue.captures
    program = captured.programs.by_name["accumulate"]
    rewritten = Rewritten.copy_of(program, captured.facts.capture.fake_mode)
    write_early(rewritten)
    module = rewritten.main
    module.graph.lint()
    copies = module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    assert len(copies) == len(list(model.parameters()))
    assert all(copy.prev is copy.args[1] for copy in copies)
    assert copies[0].next.op == "call_function"


@pytest.mark.inductor
def test_a_parameter_as_it_was_ahead_of_its_update_is_not_read_behind_it() -> None:
    """Copies and views of it: Inductor takes a copy out that it holds for idle."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        loss = mse(model, x, y)
        loss.backward()
        weight = model[0].weight  # type: ignore[index]
        before, turned = weight.detach().clone(), weight.detach().t().clone()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), (weight.detach() - before).norm(), (turned.t() - weight).norm()

    ours = mlp()
    eager = copy.deepcopy(ours)
    optimizer, reference = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, eager))
    run = quick(step, 1, backend="inductor")
    for window in regression(2, 1):
        torch.testing.assert_close(
            run(ours, optimizer, *window[0]), step(eager, reference, *window[0])
        )
