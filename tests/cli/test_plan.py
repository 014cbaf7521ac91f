"""`gradsync-fx plan`: which micro-batch fits. What is told of a size from two others is what its own capture says."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import gradsync_fx
from gradsync_fx.cli.main import app
from gradsync_fx.cli.plan import Wanted
from gradsync_fx.cli.problems import Problem


pytestmark = pytest.mark.captured
STEP = """
import torch

def train_step(model, optimizer, x, y):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

def factory():
    return made(4)

def made(micro_batch):
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    return train_step, (model, optimizer, torch.randn(micro_batch, 64), torch.randint(10, (micro_batch,)))

def odd(micro_batch=3):
    step, (model, optimizer, x, y) = made(micro_batch)
    def by_size(model, optimizer, x, y):
        return step(model, optimizer, x if len(x) < 4 else x + x, y)
    return by_size, (model, optimizer, x, y)

def without():
    return (lambda: None), ()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(STEP)
    return path


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plan", *arguments, "--timeout", "0"])
    return done.exit_code, done.output


def test_the_best_that_fits_is_marked(file: Path) -> None:
    given = (f"{file}:factory", "--global-batch", "4096", "--world-size", "2", "--memory", "2MB")
    code, text = run(*given)
    assert code == 0, text
    assert "4096 samples per update on 2 ranks" in text
    code, text = run(*given, "--json", "-")
    found = json.loads(text)
    rows = found["choices"]
    assert [r["micro_batch"] for r in rows] == [2**i for i in range(12)]
    assert all(r["micro_batch"] * r["k"] == 2048 for r in rows)
    assert all(r["fits"] == (r["held"] + r["temporaries"] <= 2_000_000) for r in rows)
    assert {r["fits"] for r in rows} == {True, False}
    (best,) = [r for r in rows if r["best"]]
    close = [
        r
        for r in rows
        if r["fits"] and r["window"] <= 1.01 * min(c["window"] for c in rows if c["fits"])
    ]
    assert best == max(close, key=lambda r: r["micro_batch"])


def imported(name: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The file as a module, for as long as the test runs."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # Dynamo looks it up
    spec.loader.exec_module(module)
    return module


def test_a_size_between_is_that_of_its_own_capture(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """factory returns 4 samples, so 4 and 8 are captured; made is called with whatever is asked for."""
    _, text = run(f"{file}:factory", "--global-batch", "512", "--memory", "1GB", "--json", "-")
    rows = {r["micro_batch"]: r for r in json.loads(text)["choices"]}
    module = imported("train_of_a_plan", file, monkeypatch)
    for size in (2, 64):
        step, args = module.made(size)
        report = gradsync_fx.explain(step, *args, gradient_accumulation_steps=2)
        assert report.memory is not None
        assert rows[size]["held"] == sum(report.memory.held.values())
        assert rows[size]["temporaries"] == max(p.temporaries for p in report.memory.programs)


def test_the_peak_of_shared_updates_is_that_of_its_own_capture(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (f"{file}:factory", "--global-batch", "64", "--memory", "1GB", "--json", "-")
    _, text = run(*given, "--world-size", "2")
    rows = {r["micro_batch"]: r for r in json.loads(text)["choices"]}
    module = imported("train_of_a_sharded_plan", file, monkeypatch)
    step, args = module.made(16)
    options: dict[str, Any] = {"shard_optimizer": True, "world_size": 2}
    report = gradsync_fx.explain(step, *args, gradient_accumulation_steps=2, **options)
    assert report.memory is not None
    assert rows[16]["sharded"] == report.memory.peak
    assert report.memory.held["state"] < 0.6 * rows[16]["held"]
    _, text = run(*given)
    assert {r["sharded"] for r in json.loads(text)["choices"]} == {None}, "one rank"


def test_a_factory_that_takes_the_micro_batch_is_asked_for_it(file: Path) -> None:
    code, text = run(f"{file}:odd", "--global-batch", "8", "--memory", "1GB")
    assert code == 1
    assert "micro-batches of 3 and 6" in text
    assert "gradsync-fx inspect" in text
    assert CliRunner().invoke(app, ["inspect", f"{file}:odd", "--timeout", "0"]).exit_code == 0


def test_nothing_fits(file: Path) -> None:
    code, text = run(f"{file}:factory", "--global-batch", "8", "--memory", "1KB")
    assert code == 1
    assert "none fits" in text


def test_a_step_without_a_batch(file: Path) -> None:
    code, text = run(f"{file}:without", "--global-batch", "8", "--memory", "1GB")
    assert code == 2
    assert "no tensor with samples" in text


def test_a_batch_that_ranks_cannot_share(file: Path) -> None:
    given = ("--global-batch", "9", "--world-size", "2", "--memory", "1GB")
    code, text = run(f"{file}:factory", *given)
    assert code == 2
    assert "a multiple of 2" in text


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GB", 24 * 10**9), ("80gib", 80 * 2**30), ("1.5 MB", 1_500_000), ("4096", 4096)],
)
def test_sizes(text: str, size: int) -> None:
    assert Wanted.of(text, 8, 2).memory == size


@pytest.mark.parametrize("text", ["", "much", "0GB", "-1GB", "24TB", "1e9"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(Problem, match="24GB"):
        Wanted.of(text, 8, 2)
