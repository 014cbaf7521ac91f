"""Regions of captured steps: what runs in every call, what at the boundary only; independent of names and metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.optim import Optimizer

from gradsync_fx.capture.tracer import Capture, traced
from gradsync_fx.ir.program import Kind, Step
from gradsync_fx.ir.regions import Regions, find_regions
from tests.drive import plain_step
from tests.models import Convnet, mlp
from tests.reference import mse


class _Captured(Exception):
    pass


def capture_of(function: Callable[..., Any], *args: Any) -> Step:
    """The step that a call would run."""
    found: list[Capture] = []

    def take(capture: Capture) -> Any:
        found.append(capture)
        raise _Captured

    with pytest.raises(_Captured):
        traced(function, take, {}, None)(*args)
    return found[0].step


def clipped(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
    """Two backwards, clipping, an update, an average of the weights, and a counter of samples."""
    loss = mse(model, x, y)
    loss.backward(retain_graph=True)
    (2 * loss).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        AVERAGE.lerp_(model[0].weight, 0.5)  # type: ignore[index]
        SEEN.add_(x.shape[0])
    return loss, norm


AVERAGE, SEEN = torch.zeros(16, 8), torch.zeros((), dtype=torch.int64)


def classify(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def by_hand(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Updates its parameters itself."""
    loss = mse(model, x, y)
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            p.mul_(0.99).sub_(0.1 * p.grad)
    return loss


def regression_step(function: Callable[..., Any]) -> Step:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    return capture_of(function, model, optimizer, torch.randn(4, 8), torch.randn(4, 1))


def convnet_step() -> Step:
    model = Convnet(dropout=0.5)
    optimizer = torch.optim.AdamW(model.parameters())
    images, labels = torch.randn(4, 1, 8, 8), torch.tensor([1, 2, 3, 4])
    return capture_of(classify, model, optimizer, images, labels)


STEPS: dict[str, Callable[[], Step]] = {
    "plain": lambda: regression_step(plain_step),
    "clipped": lambda: regression_step(clipped),
    "by hand": lambda: regression_step(by_hand),
    "convnet": convnet_step,
}


def disguised(step: Step) -> Step:
    """The same step with every node renamed and all metadata but `val` dropped."""
    graph, known = Graph(), {}
    number = iter(range(10**6))
    for node in step.module.graph.nodes:
        if node.op == "output":
            graph.output(torch.fx.map_arg(node.args[0], known.__getitem__))
            continue
        copy = graph.create_node(
            node.op,
            node.target if node.op != "placeholder" else f"q{next(number)}",
            torch.fx.map_arg(node.args, known.__getitem__),
            torch.fx.map_arg(node.kwargs, known.__getitem__),
            name=f"z{next(number)}",
        )
        if "val" in node.meta:
            copy.meta["val"] = node.meta["val"]
        known[node] = copy
    return Step(GraphModule(step.module, graph), step.slots, step.leaves)


def numbered(step: Step, regions: Regions) -> dict[str, Any]:
    """The regions with a node's place in the graph for the node."""
    place = {node: i for i, node in enumerate(step.module.graph.nodes)}

    def number(nodes: Any) -> list[int]:
        return sorted(place[n] for n in nodes)

    return {
        "gradients": [(leaf, number(nodes)) for leaf, nodes in regions.gradients.items()],
        "partial": number(regions.partial),
        "updates": number(regions.updates),
        "beyond": number(regions.beyond),
        "writes": {place[w]: number(sources) for w, sources in regions.boundary_writes.items()},
        "outputs": {i: number(sources) for i, sources in regions.boundary_outputs.items()},
        "stages": regions.stages,
        "tail": (regions.tail_data, regions.tail_outputs),
        "hand": [(leaf, place[h.wait], h.op, h.group) for leaf, h in regions.hand.items()],
        "flat": sorted(regions.hand_flat),
    }


@pytest.mark.parametrize("name", STEPS)
def test_names_and_metadata_do_not_count(name: str) -> None:
    step = STEPS[name]()
    other = disguised(step)
    names = {n.name for n in step.module.graph.nodes if n.op != "output"}
    assert not names & {n.name for n in other.module.graph.nodes if n.op != "output"}
    assert all(set(n.meta) <= {"val"} for n in other.module.graph.nodes)
    wanted = numbered(step, find_regions(step))
    assert numbered(other, find_regions(other)) == wanted
    assert wanted["gradients"]
    assert wanted["beyond"]
    assert wanted["writes"]


def written(step: Step, regions: Regions) -> dict[str, bool]:
    """Name of each input that is written, and whether only the boundary writes it."""
    holders = dict(zip(step.module.graph.find_nodes(op="placeholder"), step.slots, strict=True))
    copies = step.module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return {holders[n.args[0]].name: n in regions.boundary_writes for n in copies}


def test_parameters_are_written_at_the_boundary_only() -> None:
    step = STEPS["plain"]()
    regions = find_regions(step)
    assert written(step, regions) == dict.fromkeys(
        ["0.weight", "0.bias", "2.weight", "2.bias"], True
    )
    assert len(regions.updates) == 1
    assert len(regions.gradients) == 4
    assert not regions.boundary_outputs


def test_an_average_is_written_at_the_boundary_and_a_counter_on_every_call() -> None:
    step = STEPS["clipped"]()
    regions = find_regions(step)
    where = written(step, regions)
    parameters = {s.name for s in step.slots if s.kind is Kind.PARAMETER}
    assert all(where[name] for name in parameters)
    assert sorted(v for name, v in where.items() if name not in parameters) == [False, True]
    # The loss on every call, the norm at the boundary.
    assert set(regions.boundary_outputs) == {1}
    # The first backward's gradients are partial sums of the second's.
    assert len(regions.partial) == 4
    assert all(len(nodes) == 1 for nodes in regions.gradients.values())


def test_weight_decay_by_hand_belongs_to_the_boundary() -> None:
    """p * 0.99 reads no gradient, and is the update all the same."""
    step = STEPS["by hand"]()
    regions = find_regions(step)
    assert regions.updates == ()
    assert set(written(step, regions).values()) == {True}


def test_batch_statistics_are_written_on_every_call() -> None:
    step = STEPS["convnet"]()
    where = written(step, find_regions(step))
    buffers = {s.name for s in step.slots if s.kind is Kind.BUFFER}
    assert buffers == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert not any(where[name] for name in buffers)


def test_gradients_stand_in_the_order_in_which_they_are_ready() -> None:
    step = STEPS["plain"]()
    regions = find_regions(step)
    place = {node: i for i, node in enumerate(step.module.graph.nodes)}
    sources = [place[nodes[0].args[0]] for nodes in regions.gradients.values()]  # type: ignore[index]
    assert sources == sorted(sources)
