"""Programs broken by hand, each in one place, and what the checker says of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

import gradsync_fx
from gradsync_fx.comm.inplace_all_reduce import START_SUMS, WAIT_SUMS
from gradsync_fx.errors import VerificationError
from gradsync_fx.ir.journal import Journal
from gradsync_fx.ir.ops import ALL_REDUCE
from gradsync_fx.ir.ops import WAIT as WAIT_TENSOR
from gradsync_fx.ir.program import Kind, Program
from gradsync_fx.optimized_step import OptimizedStep
from gradsync_fx.options import OPTIMIZATIONS, Options
from gradsync_fx.passes import FOR_INDUCTOR, rewrite
from gradsync_fx.passes.check_lowered import check_lowered
from gradsync_fx.passes.fuse import ADD_PRODUCT
from gradsync_fx.passes.rewritten import KernelCall, Operand, Rewritten, Wait
from tests.drive import plain_step
from tests.long import some_long
from tests.reference import mse


_aten = torch.ops.aten


def weighted_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    gradsync_fx.micro_batch_weight(x.shape[0])
    return plain_step(model, optimizer, x, y)


def clipped_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = mse(model, x, y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss


class Lowered:
    """A program for two ranks that are not there, and what it is rewritten to."""

    def __init__(
        self,
        step: Callable[..., Any] = plain_step,
        *,
        closing: frozenset[int] = frozenset({0}),
        optimizations: tuple[str, ...] = OPTIMIZATIONS,
        tail: bool = False,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        given = {"gradient_accumulation_steps": 2, "bucket_cap_mb": 0.1}
        planned = OptimizedStep(step, Options.of({**given, **options}), simulated=2)
        planned.capture(model, optimizer, torch.randn(4, 128), torch.randn(4, 128))
        (captured,) = planned._executor.catalogue.captures
        self.program: Program = captured.programs.build(closing, tail=tail)
        mode, without = captured.facts.capture.fake_mode, {*OPTIMIZATIONS} - {*optimizations}
        self.rewritten: Rewritten = rewrite(self.program, mode, Journal(), FOR_INDUCTOR, without)
        self.check()

    @property
    def graph(self) -> torch.fx.Graph:
        return self.rewritten.main.graph

    @property
    def calls(self) -> list[KernelCall | Wait]:
        return self.rewritten.cut.calls

    def check(self) -> None:
        check_lowered(self.rewritten)

    def found(self, target: Any) -> list[Node]:
        return list(self.graph.find_nodes(op="call_function", target=target))

    def holders(self, kind: Kind) -> list[Node]:
        holders = self.graph.find_nodes(op="placeholder")
        return [h for h, s in zip(holders, self.program.slots, strict=True) if s.kind is kind]

    def refused(self, *said: str) -> None:
        with pytest.raises(VerificationError) as caught:
            self.check()
        for text in said:
            assert text in str(caught.value), str(caught.value)


MAIN_ONLY = ("overlap", "in_place", "products")


@pytest.mark.parametrize("reduction", ["mean", "weighted"])
@pytest.mark.parametrize("sync_each_batch", [False, True])
@pytest.mark.parametrize("without", some_long([None, *OPTIMIZATIONS], 2))
def test_what_is_lowered_today_is_the_program(
    reduction: str, sync_each_batch: bool, without: str | None
) -> None:
    step = weighted_step if reduction == "weighted" else clipped_step
    optimizations = tuple(optimization for optimization in OPTIMIZATIONS if optimization != without)
    options = {"reduction": reduction, "sync_each_batch": sync_each_batch}
    for closing, tail in (
        (frozenset[int](), False),
        (frozenset({0}), False),
        (frozenset({0}), True),
    ):
        Lowered(step, closing=closing, tail=tail, optimizations=optimizations, **options)


def test_a_weight_read_by_an_update_behind_its_reset() -> None:
    """What 0.1.0 did at first: the kernel is given the running weight itself, which the main program has zeroed."""
    lowered = Lowered(weighted_step, reduction="weighted")
    (weight,) = lowered.holders(Kind.WEIGHT)
    index = list(lowered.graph.find_nodes(op="placeholder")).index(weight)
    (kept,) = [n for n in weight.users if n.target is _aten.clone.default]
    extra = lowered.rewritten.cut.extras.index(kept)
    right, wrong = Operand("extra", extra), Operand("input", index)
    lowered.rewritten.cut.calls = [
        replace(call, scalars=tuple(wrong if v == right else v for v in call.scalars))
        if isinstance(call, KernelCall)
        else call
        for call in lowered.calls
    ]
    lowered.refused("parameter", "filled(0.0)")


def test_a_bucket_that_nobody_waits_for() -> None:
    lowered = Lowered()
    last = [call for call in lowered.calls if isinstance(call, Wait)][-1]
    lowered.calls[:] = [c for c in lowered.calls if c is not last and not _reads(c, last)]
    lowered.refused("never waited for")


def test_an_update_ahead_of_its_wait() -> None:
    lowered = Lowered()
    at = next(i for i, call in enumerate(lowered.calls) if isinstance(call, Wait))
    lowered.calls[at : at + 2] = reversed(lowered.calls[at : at + 2])
    lowered.refused("while its reduction is under way")


def test_a_bucket_waited_for_twice() -> None:
    lowered = Lowered()
    lowered.calls.append(next(call for call in lowered.calls if isinstance(call, Wait)))
    lowered.refused("not under way")


def test_a_sum_written_while_it_travels() -> None:
    lowered = Lowered()
    start = lowered.found(START_SUMS)[0]
    total = start.args[0][0]  # type: ignore[index]
    with lowered.graph.inserting_after(start):
        lowered.graph.call_function(_aten.copy_.default, (total, total))
    lowered.refused("while its reduction is under way")


def test_a_sum_that_is_not_reset() -> None:
    lowered = Lowered()
    kernel = next(iter(lowered.rewritten.updates.values()))
    *_, reset = kernel.graph.find_nodes(op="call_function", target=_aten.copy_.default)
    kernel.graph.erase_node(reset)
    lowered.refused("accumulator")


def test_a_sum_that_is_reset_ahead_of_its_update() -> None:
    lowered = Lowered()
    kernel = next(iter(lowered.rewritten.updates.values()))
    *_, reset = kernel.graph.find_nodes(op="call_function", target=_aten.copy_.default)
    first = next(n for n in kernel.graph.nodes if n.op != "placeholder")
    first.prepend(reset.args[1])  # type: ignore[arg-type]
    first.prepend(reset)
    lowered.refused("parameter", "filled(0.0)")


@pytest.mark.parametrize("optimizations", [(), OPTIMIZATIONS])
def test_a_term_that_is_not_added(optimizations: tuple[str, ...]) -> None:
    lowered = Lowered(closing=frozenset(), optimizations=optimizations)
    target = ADD_PRODUCT if "products" in optimizations else _aten.copy_.default
    lowered.graph.erase_node(lowered.found(target)[0])
    lowered.refused("accumulator", "ends as input(")


def test_a_term_that_is_added_twice() -> None:
    lowered = Lowered(closing=frozenset())
    product = lowered.found(ADD_PRODUCT)[0]
    with lowered.graph.inserting_after(product):
        lowered.graph.call_function(ADD_PRODUCT, product.args)
    lowered.refused("accumulator")


def test_a_bucket_that_stays_at_home() -> None:
    lowered = Lowered(optimizations=MAIN_ONLY)
    lowered.graph.erase_node(lowered.found(START_SUMS)[0])
    lowered.graph.erase_node(lowered.found(WAIT_SUMS)[0])
    lowered.refused("parameter")


def test_a_bucket_reduced_otherwise() -> None:
    lowered = Lowered()
    lowered.found(START_SUMS)[0].update_arg(1, "avg")
    lowered.refused("parameter")


def test_a_collective_read_ahead_of_its_wait() -> None:
    lowered = Lowered(optimizations=())
    started, waited = lowered.found(ALL_REDUCE)[0], lowered.found(WAIT_TENSOR)[0]
    waited.replace_all_uses_with(started)
    waited.update_arg(0, started)
    lowered.found(_aten.copy_.default)[-1].append(waited)
    lowered.refused("before its wait")


def test_a_parameter_written_ahead_of_the_forward() -> None:
    lowered = Lowered(optimizations=MAIN_ONLY)
    parameter = lowered.holders(Kind.PARAMETER)[0]
    write = next(u for u in parameter.users if u.target is _aten.copy_.default)
    first = next(n for n in lowered.graph.nodes if n.op != "placeholder")
    with lowered.graph.inserting_before(first):
        early = lowered.graph.call_function(_aten.full.default, ([128, 128], 0.0))
    first.prepend(write)
    write.update_arg(1, early)
    lowered.refused()


def test_an_update_with_another_parameters_state() -> None:
    lowered = Lowered()
    one, two = [i for i, call in enumerate(lowered.calls) if isinstance(call, KernelCall)][:2]
    a, b = lowered.calls[one], lowered.calls[two]
    assert isinstance(a, KernelCall)
    assert isinstance(b, KernelCall)
    lowered.calls[one] = replace(a, tensors=(a.tensors[0], b.tensors[1], *a.tensors[2:]))
    lowered.refused()


def test_fake_values_that_lie_in_one_storage() -> None:
    """Inductor would take the copy for a view of the weight, and drop it."""
    lowered = Lowered(weighted_step, reduction="weighted")
    (weight,) = lowered.holders(Kind.WEIGHT)
    (kept,) = [n for n in weight.users if n.target is _aten.clone.default]
    kept.meta["val"] = weight.meta["val"]
    lowered.refused("shares the storage")


def _reads(call: KernelCall | Wait, wait: Wait) -> bool:
    return isinstance(call, KernelCall) and bool({*call.tensors} & {*wait.sums})
