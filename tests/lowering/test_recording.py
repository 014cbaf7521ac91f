"""What CUDA graphs can hold of a program, what is said where they cannot, and what callers are given."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import gradsync_fx
from gradsync_fx.ir.journal import Journal, Recording
from gradsync_fx.ir.ops import ITEM
from gradsync_fx.ir.program import Kind, Slot
from gradsync_fx.lowering import lower as lowering
from gradsync_fx.lowering.recording import Recorded, held_inputs, recording_of, warn_once
from gradsync_fx.passes import rewrite
from gradsync_fx.passes.device_numbers import numbers_on_device
from tests.drive import plain_step
from tests.passes.test_device_numbers import program, update
from tests.reference import regression
from tests.scenarios.groups import fresh


aten = torch.ops.aten


def verdict(build: Any, device: str = "cuda", kind: Kind = Kind.PARAMETER) -> Recording:
    made, mode = program(build, device)
    made.slots = (Slot(kind, "p", 0), *made.slots[1:])
    found = rewrite(made, mode, Journal(), [("", numbers_on_device)])
    return recording_of(found, asked=True)


def test_held_tensors_and_the_numbers_stay_where_they_are() -> None:
    made, mode = program(update)
    found = rewrite(made, mode, Journal(), [("", numbers_on_device)])
    assert held_inputs(found) == {0: "parameter 'p'", 1: "the vector of numbers"}
    assert str(recording_of(found, asked=True)) == "recorded"
    assert str(recording_of(found, asked=False)) == "can be recorded"


def test_a_program_of_the_cpu_is_not_recorded() -> None:
    assert verdict(update, "cpu").never == "its tensors are on the CPU"


def test_a_number_of_pythons_keeps_a_program_from_being_recorded() -> None:
    """It is no part of what a recording is found by: the first one would be replayed for ever."""

    def interpolated(make: Any, p: Any, lr: Any, scale: Any) -> Any:
        return make(aten.lerp.Scalar, p, p, make(ITEM, lr))

    assert "number" in verdict(interpolated).never


def test_a_tensor_of_the_call_that_is_written_keeps_a_program_from_being_recorded() -> None:
    assert "data 'p' is written" in verdict(update, kind=Kind.DATA).never


def test_what_the_host_waits_for_is_left_out() -> None:
    def counted(make: Any, p: Any, lr: Any, scale: Any) -> Any:
        number = make(ITEM, make(aten.argmax.default, p))
        return make(aten.mul.Tensor, p, number)

    found = verdict(counted)
    assert not found.never
    assert "argmax_default, whose value the host waits for" in str(found)


def test_reductions_that_run_on_the_host_keep_a_program_from_being_recorded() -> None:
    def reduced(make: Any, p: Any, lr: Any, scale: Any) -> Any:
        functional = torch.ops._c10d_functional
        sent = make(functional.all_reduce.default, p, "sum", dist.group.WORLD.group_name)  # type: ignore[union-attr]
        return make(functional.wait_tensor.default, sent)

    for backend, store, why in (
        ("gloo", dist.HashStore(), "all_reduce_default runs over gloo, on the host"),
        ("fake", FakeStore(), ""),
    ):
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            assert verdict(reduced).never == why
        finally:
            dist.destroy_process_group()


def recorded(address: int = 0) -> tuple[Recorded, torch.Tensor, torch.Tensor, list[str]]:
    """Of a program that gives its input, and a result in memory of its own, which every call writes."""
    graph = torch.fx.Graph()
    p = graph.placeholder("p")
    graph.output((p, graph.call_function(aten.neg.default, (p,))))
    own, said = torch.zeros(4), list[str]()

    def run(args: list[Any]) -> list[Any]:
        return [args[0], own.copy_(args[0]).neg_()]

    def plain() -> Any:
        return lambda args: [args[0], -args[0]]

    module = torch.fx.GraphModule({}, graph)
    held = torch.zeros(8)[address : address + 4]
    return Recorded(run, plain, {0: "parameter 'p'"}, module, said.append), held, own, said


def test_results_outlast_the_next_call() -> None:
    one, held, _, _ = recorded()
    same, first = one([held.fill_(1.0)])
    one([held.fill_(2.0)])
    assert same is held  # what is an input is handed on as it is
    assert torch.equal(first, -torch.ones(4))


def test_a_tensor_that_is_not_aligned_is_not_recorded() -> None:
    """A recording would be of a copy of it, and write that."""
    one, held, own, said = recorded(address=1)
    for _ in range(2):
        _, result = one([held.fill_(3.0)])
        assert torch.equal(result, torch.full((4,), -3.0))
    assert torch.equal(own, torch.zeros(4))
    assert said == ["parameter 'p' lies at an address that is no multiple of 16 bytes"]


def test_it_is_said_once() -> None:
    why = Recording("accumulate", True, "its tensors are on the CPU")
    with pytest.warns(gradsync_fx.GradSyncWarning, match="no CUDA graph of the accumulate program"):
        warn_once(why, {})
    warn_once(Recording("boundary", True, "its tensors are on the CPU"), {"accumulate": why})


@pytest.mark.inductor
def test_a_cpu_is_told_nothing_new_and_the_mode_says_why_it_records_nothing() -> None:
    inner, told = lowering.compile_fx_inner, list[Any]()

    def kept(*args: Any, **how: Any) -> Any:
        told.append(how)
        return inner(*args, **how)

    model, optimizer = fresh()
    step = gradsync_fx.optimize(plain_step, gradient_accumulation_steps=2, mode="reduce-overhead")

    def train() -> None:
        for batch in regression(1, 2, seed=0)[0]:
            step(model, optimizer, *batch)

    said = pytest.warns(gradsync_fx.GradSyncWarning, match="its tensors are on the CPU")
    with mock.patch.object(lowering, "compile_fx_inner", kept), said as warnings:
        train()
    assert len(warnings) == 1
    assert told
    assert all(how == {"static_input_idxs": (), "is_inference": False} for how in told)
