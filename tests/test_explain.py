"""explain and report: the numbers that a user reads are those of the graph, at any number of ranks."""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import jsonschema
import networkx as nx
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from gradsync_fx.inspection.report import Report, schema
from tests.drive import plain_step, quick
from tests.models import Convnet, mlp
from tests.optimizers import sgd
from tests.reference import mse, regression
from tests.schema import made
from tests.scripts import Two, plain


ROOT = Path(__file__).parents[1]
(BATCH,) = regression(1, 1)[0]


def explained(function: Any = plain_step, model: nn.Module | None = None, **options: Any) -> Report:
    model = model or mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    return gradsync_fx.explain(function, model, optimizer, *BATCH, **options)


def test_before_and_after_at_eight_ranks() -> None:
    """161 float32 parameters: 8 * 16 + 16 + 16 + 1."""
    report = explained(gradient_accumulation_steps=4, world_size=8)
    assert (report.k, report.world_size, report.simulated) == (4, 8, True)
    assert (report.collectives_before, report.collectives_after) == (4, 1)
    assert (report.bytes_before, report.bytes_after) == (4 * 161 * 4, 161 * 4)
    (bucket,) = report.collectives
    assert sorted(bucket.parameters) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert (bucket.ranks, bucket.op, bucket.dtype, bucket.bytes) == (8, "sum", "float32", 644)
    assert list(bucket.programs) == ["boundary"]
    counts = {program.name: program.collectives for program in report.programs}
    assert counts == {"boundary": 1, "accumulate": 0}
    assert all(program.compile_seconds is None for program in report.programs)
    assert not report.warnings


def test_nothing_runs_and_nothing_stays() -> None:
    model = mlp()
    before = [p.clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters())
    gradsync_fx.explain(plain_step, model, optimizer, *BATCH, world_size=8)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not optimizer.state
    assert not dist.is_initialized()


def test_a_report_of_what_ran_has_measured_times_apart_from_predicted_ones() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    step = quick(plain_step, 2)
    for window in regression(2, 2):
        for batch in window:
            step(model, optimizer, *batch)
    report = step.report("a100-nvlink")
    found = {program.name: program for program in report.programs}
    assert {name: p.calls for name, p in found.items()} == {"accumulate": 2, "boundary": 2}
    assert all(p.seconds > 0 and p.compile_seconds for p in found.values())
    assert report.predicted.hardware.name == "a100-nvlink"
    assert not report.simulated


def test_every_node_has_a_region_and_the_counts_agree() -> None:
    report = explained(gradient_accumulation_steps=2, world_size=2)
    roles = ["forward", "backward", "gradient sync", "clipping", "optimizer", "other"]
    assert [region.role for region in report.regions] == roles
    for region in report.regions:
        assert region.nodes == sum(node.region == region.role for node in report.graph)
    forward = report.regions[0]
    assert any(line.startswith(str(ROOT / "tests" / "reference.py")) for line in forward.lines)
    names = {node.name for node in report.graph}
    assert all(source in names for node in report.graph for source in node.inputs)
    assert {n.parameter for n in report.graph if n.op == "parameter"} == {
        p.name for p in report.parameters
    }


def test_json_follows_the_schema_in_the_package() -> None:
    report = explained(gradient_accumulation_steps=2, world_size=2)
    found = json.loads(report.to_json())
    assert found["version"] == 1
    jsonschema.validate(found, schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**found, "k": None}, schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**found, "more": 1}, schema())


def test_the_schema_is_that_of_the_dataclasses() -> None:
    """`python tests/schema.py` writes it anew."""
    assert schema() == made()


def test_views() -> None:
    report = explained(gradient_accumulation_steps=2, world_size=2)
    text = str(report)
    assert "gradient collectives" in text
    assert max(map(len, text.splitlines())) <= 100
    graph = report.to_networkx()
    assert nx.is_directed_acyclic_graph(graph)
    assert len(graph) == len(report.graph)
    wanted = {
        "op", "region", "module", "line", "shape", "dtype", "bytes", "parameter", "bucket", "programs",
    }  # fmt: skip
    assert all(set(data) == wanted for _, data in graph.nodes(data=True))
    assert any(data["bucket"] == 0 for _, data in graph.nodes(data=True))
    dot = report.to_dot()
    assert dot.startswith("digraph")
    assert all(node.name in dot for node in report.graph)


def test_dot_is_written_to_a_file(tmp_path: Path) -> None:
    report = explained()
    path = tmp_path / "step.dot"
    assert report.to_dot(path) == path.read_text()


@pytest.mark.parametrize("place", ["meta", "fake"])
def test_parameters_without_storage(place: str) -> None:
    """A configuration of a gigabyte a layer is inspected without allocating it; the model is as before."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    context: Any = torch.device("meta")
    if place == "fake":
        context = torch._subclasses.fake_tensor.FakeTensorMode()
    with context:
        model = nn.Sequential(nn.Linear(16384, 16384), nn.Linear(16384, 1000))
        x, y = torch.zeros(2, 16384), torch.zeros(2, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())
    held = list(model.parameters())
    report = gradsync_fx.explain(
        step, model, optimizer, x, y, gradient_accumulation_steps=4, world_size=64
    )
    count = sum(p.numel() for p in held)
    assert report.bytes_after == count * 4
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    assert all(a is b for a, b in zip(held, optimizer.param_groups[0]["params"], strict=True))


def test_a_world_size_that_is_none() -> None:
    for wrong in (0, True):
        with pytest.raises(gradsync_fx.OptionError, match="world_size"):
            explained(world_size=wrong)
    with pytest.raises(gradsync_fx.OptionError, match="laptop"):
        explained(hardware="abacus")


# Warnings


def test_a_loss_divided_by_k_and_again() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        (loss / 4).backward()
        optimizer.step()
        return loss

    (warning,) = explained(step, gradient_accumulation_steps=4).warnings
    assert "divided by 4 at" in warning
    assert "test_explain.py" in warning
    assert not explained(step, gradient_accumulation_steps=4, reduction="sum").warnings
    assert not explained(step, gradient_accumulation_steps=3).warnings


def test_collectives_that_stay() -> None:
    report = explained(gradient_accumulation_steps=2, world_size=2, sync_each_batch=True)
    assert report.collectives_before == report.collectives_after == 2
    (warning,) = report.warnings
    assert "0 gradient collectives removed although world size is 2 and k is 2" in warning


def test_a_metric_is_kept_and_said_so() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        return shown

    report = explained(step, gradient_accumulation_steps=2, world_size=2)
    (kept,) = report.kept
    assert "all_reduce" in kept.op
    assert "test_explain.py" in kept.line
    assert "every micro-step" in kept.why
    assert {p.name: p.collectives for p in report.programs} == {"boundary": 2, "accumulate": 1}


def test_batch_norm_in_training_mode() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    model = Convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = torch.randn(4, 1, 8, 8), torch.tensor([1, 2, 3, 4])
    (warning,) = gradsync_fx.explain(step, model, optimizer, images, labels).warnings
    assert "BatchNorm in training mode (norm)" in warning


def test_unused_parameters() -> None:
    model = Two()
    optimizer = torch.optim.AdamW(model.parameters())
    report = gradsync_fx.explain(plain, model, optimizer, *BATCH, "a")
    assert set(report.unused_parameters) == {"b.weight", "b.bias", "idle.weight", "idle.bias"}


# torch's own tools


def test_logs_and_traces(tmp_path: Path) -> None:
    """TORCH_LOGS shows what was captured and compiled; TORCH_TRACE holds programs and report."""
    program = (
        "import torch, gradsync_fx\n"
        "from tests.drive import plain_step\n"
        "from tests.models import mlp\n"
        "m = mlp(); o = torch.optim.SGD(m.parameters(), 0.1)\n"
        "s = gradsync_fx.optimize(plain_step, gradient_accumulation_steps=2, backend='aot_eager')\n"
        "for _ in range(2): s(m, o, torch.randn(4, 8), torch.randn(4, 1))\n"
    )

    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "TORCH_LOGS": "+gradsync_fx", "TORCH_TRACE": str(tmp_path)},
    )
    assert ended.returncode == 0, ended.stderr
    assert "compiled the accumulate program" in ended.stderr
    assert "def forward" in ended.stderr
    trace = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    for name in ("accumulate", "boundary", "report"):
        assert f'"name": "gradsync_fx_plain_step_{name}"' in trace
    assert "plain_step_0" in trace  # what Dynamo calls the frame


def test_profiles_name_the_programs() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = quick(plain_step, 2)
    with torch.profiler.profile() as profiler:
        for _ in range(2):
            step(model, optimizer, *BATCH)
    names = {event.name for event in profiler.events()}
    assert {"gradsync_fx plain_step: accumulate", "gradsync_fx plain_step: boundary"} <= names


def test_a_meta_model_costs_no_memory() -> None:
    """0.2 B parameters, 800 MB: nothing of that size is allocated, in the first call or later."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(5000, 5000, bias=False) for _ in range(8)))
        args = (
            model,
            torch.optim.AdamW(model.parameters()),
            torch.ones(4, 5000),
            torch.ones(4, 5000),
        )

    def explained_once() -> None:
        gradsync_fx.explain(plain_step, *args, gradient_accumulation_steps=4, world_size=8)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3):
        explained_once()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_nothing_outlives_a_step() -> None:
    model = mlp()
    step = quick(plain_step, 2)
    step(model, sgd(model), torch.ones(4, 8), torch.ones(4, 1))
    step.discard()
    gone = weakref.ref(model)
    del step, model
    gc.collect()
    assert gone() is None
