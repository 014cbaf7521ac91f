"""What AOTAutograd made is read from disk where nothing that it depends on has changed, and nowhere else."""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradsync_fx import disk_cache
from gradsync_fx._torch import inductor_config
from gradsync_fx.capture.kept_graph import KeptGraph
from gradsync_fx.ir.program import Step
from tests.drive import plain_step, quick
from tests.models import Convnet, TinyGPT, mlp


pytestmark = pytest.mark.captured

READ = "was on disk"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "gradsync_fx" / "graphs"


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What the package has logged since the last call, about what it keeps."""
    names = "capture.functional", "capture.kept_graph", "disk_cache"

    def since() -> list[str]:
        found = [r.getMessage() for r in caplog.records if r.name.endswith(names)]
        caplog.clear()
        return found

    for name in names:
        caplog.set_level(logging.DEBUG, f"gradsync_fx.{name}")
    return since


def data() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    return torch.randn(4, 8, generator=source), torch.randn(4, 1, generator=source)


def trained(function: Any = plain_step, make: Any = mlp, batch: Any = None, **options: Any) -> Any:
    """The parameters after two windows, and the step."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    step = quick(function, 2, **options)
    for _ in range(4):
        step(model, optimizer, *(batch or data()))
    return [p.detach().clone() for p in model.parameters()], step


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def classified(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return loss


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[2](checkpoint(lambda x: self[1](self[0](x)), x, use_reentrant=False))


def rebuilt() -> nn.Module:
    return Checkpointed(*mlp())


STEPS: dict[str, tuple[Any, ...]] = {
    "mlp": (plain_step, mlp, None),
    "convnet": (classified, Convnet, (torch.randn(4, 1, 8, 8), torch.randint(10, (4,)))),
    "gpt": (classified, TinyGPT, (torch.randint(8, (2, 6)), torch.randint(8, (2, 6)))),
    "checkpointed": (plain_step, rebuilt, None),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_graph_that_was_read_is_the_one_that_was_kept(
    case: str, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Name by name, with all that is known of its nodes; and trains alike, to the bit."""
    function, make, batch = STEPS[case]
    with inductor_config.patch(fx_graph_cache=False):
        plain, _ = trained(function, make, batch)
    assert told() == []
    pairs = []
    write = KeptGraph.write

    def watched(kept: KeptGraph, graph: Any, mode: Any) -> Any:
        made = write(kept, graph, mode)
        pairs.append((graph, made))
        described(graph, made)
        return made

    monkeypatch.setattr(KeptGraph, "write", watched)
    first, _ = trained(function, make, batch)
    assert told() == []
    second, _ = trained(function, make, batch)
    assert [READ in line for line in told()] == [True]
    assert len(pairs) == 1
    assert same(first, plain)
    assert same(second, plain)


def described(one: Any, other: Any) -> None:
    """Asserts that two graphs are equal, storages of values included."""
    assert one is not other
    storages: list[dict[int, int]] = [{}, {}]
    left_out = {"desc", "source_fn_stack", "fwd_source_fn_stack", "from_node", "eager_input_vals"}
    for a, b in zip(one.graph.nodes, other.graph.nodes, strict=True):
        assert (a.op, a.name, str(a.target)) == (b.op, b.name, str(b.target))
        assert a.op == "placeholder" or a.target == b.target
        assert str((a.args, a.kwargs)) == str((b.args, b.kwargs))
        assert a.meta.keys() - left_out == b.meta.keys()
        for key in b.meta:
            if key != "val":
                assert str(a.meta[key]) == str(b.meta[key]), key
        for x, y in zip(tensors(a), tensors(b), strict=True):
            assert form(x, storages[0]) == form(y, storages[1])
    assert one.code == other.code


def tensors(node: Any) -> list[Any]:
    value = node.meta.get("val")
    return list(value) if isinstance(value, list | tuple) else [value]


def form(value: Any, storages: dict[int, int]) -> Any:
    if not isinstance(value, Tensor):
        return value
    storage = storages.setdefault(value.untyped_storage()._cdata, len(storages))
    return (
        storage, value.untyped_storage().nbytes(), value.dtype, value.device, value.shape, value.stride(),
        value.storage_offset(), type(value), value.requires_grad,
    )  # fmt: skip


def scaled(number: float) -> Any:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = number * F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def shifted(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y) + torch.zeros(()).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 17), nn.ReLU(), nn.Linear(17, 1))


def another() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))


def partly() -> nn.Module:
    model = mlp()
    model[0].bias.requires_grad_(False)
    return model


def other_strides() -> nn.Module:
    model = mlp()
    model[0].weight = nn.Parameter(torch.randn(8, 16).t())
    return model


CHANGES: dict[str, Callable[[], Any]] = {
    "a constant": lambda: trained(scaled(3.0)),
    "a shape": lambda: trained(scaled(2.0), wider),
    "an op": lambda: trained(scaled(2.0), another),
    "what is trained": lambda: trained(scaled(2.0), partly),
    "strides": lambda: trained(scaled(2.0), other_strides),
    "a batch": lambda: trained(scaled(2.0), batch=[t[:3] for t in data()]),
    "a dtype": lambda: trained(
        scaled(2.0), lambda: mlp().double(), [t.double() for t in data()]
    ),
    "decompositions": lambda: trained(scaled(2.0), backend="inductor", options={"max_fusion_size": 3}),
}  # fmt: skip


@pytest.mark.parametrize("change", [
    pytest.param(c, marks=[pytest.mark.inductor] if c == "decompositions" else []) for c in CHANGES
])  # fmt: skip
def test_a_change_is_captured(change: str, told: Any) -> None:
    trained(scaled(2.0))
    trained(scaled(2.0))
    assert [READ in line for line in told()] == [True]
    CHANGES[change]()
    assert told() == []


def test_what_stands_round_the_step_is_in_the_key(told: Any) -> None:
    batch = data()
    trained(shifted)
    torch.set_default_dtype(torch.float64)
    try:
        trained(shifted, lambda: mlp().float(), batch)
    finally:
        torch.set_default_dtype(torch.float32)
    assert told() == []
    torch.set_float32_matmul_precision("medium")
    try:
        trained(shifted)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert told() == []


@torch.library.custom_op("gradsync_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda context, gradient: 2 * gradient)


def foreign(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(twice(model(x)), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def viewed(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return plain_step(model, optimizer, x, y), x[0]


def view_of_one_storage() -> tuple[Tensor, Tensor]:
    whole = torch.randn(4, 9)
    return whole[:, :8], whole[:, 8:]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "an op of others": (lambda: trained(foreign), "the op gradsync_tests.twice"),
    "a view as result": (lambda: trained(viewed), "a result that is a view"),
    "shared memory": (lambda: trained(batch=view_of_one_storage()), "inputs that share memory"),
    "symbols": (lambda: trained(dynamic=True), "an input of type SymInt"),
    "autocast": (lambda: under_autocast(), "an autocast round the step"),
}


def under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        trained()


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_key_cannot_name_is_not_kept(case: str, told: Any, folder: Path) -> None:
    run, reason = REFUSED[case]
    run()
    assert any(reason in line for line in told()), told()
    assert not folder.exists()


def spoilt(packed: bytes, how: str) -> bytes:
    header, _, body = packed.partition(b"\n")
    if how == "truncated":
        return packed[: len(packed) // 2]
    if how == "a flipped byte":
        return packed[:-9] + bytes([packed[-9] ^ 1]) + packed[-8:]
    if how == "another version":
        return packed.replace(b"graph 1", b"graph 2", 1)
    if how == "another key":
        name, kind, number, key, checksum = header.split(b" ")
        return b" ".join((name, kind, number, key[::-1], checksum)) + b"\n" + body
    return {"empty": b"", "foreign": b"\x80\x04not ours"}[how]


@pytest.mark.parametrize("how", [
    "truncated", "a flipped byte", "another version", "another key", "empty", "foreign",
])  # fmt: skip
def test_a_file_that_is_not_whole_is_ignored(how: str, told: Any, folder: Path) -> None:
    """With one line in the log; and the next process finds a new one."""
    plain, _ = trained()
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(spoilt(whole, how))
    told()
    assert same(trained()[0], plain)
    (line,) = told()
    assert f"{path} is ignored, and made anew" in line
    trained()
    assert [READ in line for line in told()] == [True]


def without_nodes(data: Any) -> Any:
    return {"nodes": 3}


def another_op(data: Any) -> Any:
    data["nodes"][-4][2] = "aten::no_such_op"
    return data


def a_name_twice(data: Any) -> Any:
    data["nodes"][1][1] = data["nodes"][0][1]
    return data


def another_line(data: Any) -> Any:
    for *_, about in data["nodes"]:
        if "stack_trace" in about:
            about["stack_trace"] = 10_000
    return data


@pytest.mark.parametrize("change", [without_nodes, another_op, a_name_twice, another_line])
def test_data_of_another_form_is_ignored(change: Any, told: Any, folder: Path) -> None:
    """Also where the file is whole."""
    plain, _ = trained()
    (path,) = folder.iterdir()
    disk_cache.write_entry(path.name, change(disk_cache.read_entry(path.name)))
    told()
    assert same(trained()[0], plain)
    (line,) = told()
    assert "is ignored, and made anew" in line


SOURCE = """
import torch
import torch.nn.functional as F

def train_step(model, optimizer, x, y):
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
"""


def test_lines_are_those_of_this_process(
    tmp_path: Path, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that has moved by some lines is the same step; what is told of it names the lines as they are."""

    def step_at(offset: int) -> Step:
        path = tmp_path / f"step_{offset}.py"
        path.write_text("\n" * offset + textwrap.dedent(SOURCE))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
        _, step = trained(module.train_step)
        (capture,) = step._executor.catalogue.captures
        found: Step = capture.objects.step
        return found

    def lines(step: Step, offset: int) -> list[list[tuple[str, int]]]:
        """Per node, what it is traced back to; those of the file less the offset."""
        found = []
        for node in step.module.graph.nodes:
            trace = re.findall(r'File "(.*)", line (\d+)', node.meta.get("stack_trace", ""))
            here = f"step_{offset}.py"
            found.append([
                (Path(file).name.replace(here, "step"), int(line) - offset * file.endswith(here))
                for file, line in trace
            ])  # fmt: skip
        assert any(file == "step" for trace in found for file, _ in trace)
        return found

    before, after = step_at(0), step_at(7)
    assert [READ in line for line in told()] == [True]
    assert lines(after, 7) == lines(before, 0)


def test_torch_s_own_switches_turn_it_off(folder: Path) -> None:
    with inductor_config.patch(fx_graph_cache=False):
        trained()
    assert not folder.exists()
