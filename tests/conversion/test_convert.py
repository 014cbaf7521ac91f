"""Converted scripts train what the scripts train, in each known shape; of what is not known, a line and a reason."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor

import gradsync_fx
from gradsync_fx.conversion.convert import Converted, convert
from tests.conversion.training import (
    ACCELERATE,
    ALONE,
    CARRIED,
    DDP_CONTEXT,
    HEAD,
    MODEL,
    ON_TWO_RANKS,
    TAIL,
    WHOLE,
)


ROOT = Path(gradsync_fx.__file__).parent.parent
_count = itertools.count()


def trained(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """The parameters after a script, run as a module of its own: programs find globals by a module's name."""
    AcceleratorState._reset_state(True)
    name = f"converted_script_{next(_count)}"
    (folder / f"{name}.py").write_text(text)
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    model = module.main() if hasattr(module, "main") else module.model
    return model.state_dict()


def alike(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-6)


def whole(text: str) -> Converted:
    """Of a script whose one loop is converted."""
    found = convert(text)
    assert (found.loops, found.left) == (1, ()), found.left
    compile(found.text, "converted", "exec")
    return found


@pytest.mark.parametrize("name", ALONE)
def test_the_converted_script_trains_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parameters, and what it prints: losses, updates and norms."""
    quick = functools.partial(gradsync_fx.optimize, backend="aot_eager")
    monkeypatch.setattr(gradsync_fx, "optimize", quick)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=gradsync_fx.GradSyncWarning)
        before = trained(tmp_path, ALONE[name], monkeypatch)
        said = capsys.readouterr().out
        after = trained(tmp_path, whole(ALONE[name]).text, monkeypatch)
    assert capsys.readouterr().out == said
    alike(before, after)


@pytest.mark.inductor
def test_with_the_default_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = trained(tmp_path, TAIL, monkeypatch)
    alike(before, trained(tmp_path, whole(TAIL).text, monkeypatch))


@pytest.mark.gloo
@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_on_two_ranks(name: str, tmp_path: Path) -> None:
    converted = whole(ON_TWO_RANKS[name]).text.replace(
        ".optimize(", '.optimize(backend="aot_eager", '
    )
    results = []
    for i, text in enumerate((ON_TWO_RANKS[name], converted)):
        (tmp_path / f"script{i}.py").write_text(text)
        ended = subprocess.run(
            [
                sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                "2", str(tmp_path / f"script{i}.py"), str(tmp_path / f"{i}.pt"),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=250,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        results.append((torch.load(tmp_path / f"{i}.pt"), ended.stdout))
    assert results[0][1] == results[1][1]
    alike(results[0][0], results[1][0])


def test_what_a_loop_becomes() -> None:
    """A mean where every window is whole; else sums, which a short window divides by k as the script did."""
    assert "@gradsync_fx.optimize(gradient_accumulation_steps=4)\n" in whole(WHOLE).text
    assert "train_step.discard()" in whole(WHOLE).text
    found = whole(TAIL)
    assert 'gradient_accumulation_steps=accumulation_steps, reduction="sum")' in found.text
    assert "    train_step.flush()\n    if train_step.sync_gradients:\n" in found.text
    ((line, note),) = found.notes
    assert TAIL.splitlines()[line - 1].startswith("    for i, (inputs, targets)")
    assert "short last window" in note
    assert 'gradient_accumulation_steps="manual", reduction="sum"' in whole(CARRIED).text


def test_the_rest_of_a_script_stays_to_the_letter() -> None:
    odd = TAIL.replace("running = 0.0", "running   =  0.0 # odd\n\n\nother = { 'a':1 }")
    text = whole(odd).text
    assert "running   =  0.0 # odd\n\n\nother = { 'a':1 }\n" in text
    assert text.startswith(HEAD.partition("from torch import nn\n")[0])


LOOP = """
for i, (x, y) in enumerate(data):
    loss = F.mse_loss(model(x), y)
    loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
HELPER = """
def update(i):
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
LEFT = {
    "helper": (
        HELPER + LOOP.partition("    if")[0] + "    update(i)\n",
        "no optimizer.step() in it",
    ),
    "several optimizers": (
        LOOP.replace(
            "        optimizer.step()\n", "        optimizer.step()\n        optimizer2.step()\n"
        ),
        "several optimizers",
    ),
    "grad": (
        LOOP.replace("    if (i", "    print(model[0].weight.grad.norm())\n    if (i"),
        "it reads or makes gradients",
    ),
    "grad of an update": (
        LOOP.replace("        optimizer.step", "        print(model[0].bias.grad)\n        optimizer.step"),
        "may be a part of the update",
    ),
    "between": (
        LOOP.replace("    if (i", "    model.apply(check)\n    if (i"),
        "it uses model between backward and the update",
    ),
    "continue": (
        LOOP.replace("    loss =", "    if x is None:\n        continue\n    loss ="),
        "a `continue` in the loop",
    ),
    "try": ("try:\n" + LOOP.replace("\n", "\n    ") + "\nfinally:\n    pass\n", "a `try` around"),
    "another condition": (LOOP.replace("(i + 1) % 4 == 0", "loss.item() < 1"), "no count"),
    "first batch": (LOOP.replace("(i + 1) % 4 == 0", "i % 4 == 0"), "no count"),
    "every batch": (
        LOOP.replace("    if (i + 1) % 4 == 0:\n", "").replace("        opt", "    opt"),
        "steps in every round",
    ),
    "two backwards": (
        LOOP.replace("    if (i", "    model(y @ y.T @ x).sum().backward()\n    if (i"),
        "not exactly one backward",
    ),
    "never zeroed": (LOOP.replace("        optimizer.zero_grad()\n", ""), "not zeroed"),
    "scaler": (
        "scaler = torch.amp.GradScaler()\n"
        + LOOP.replace("loss.backward", "scaler.scale(loss).backward").replace(
            "optimizer.step()", "scaler.step(optimizer)\n        scaler.update()"
        ),
        "enabled GradScaler",
    ),
    "no sync at another place": (
        LOOP.replace("    loss =", "    with model.no_sync():\n        pass\n    loss ="),
        "no_sync() under a condition",
    ),
    "ranks without DDP": (
        "import torch.distributed as dist\ndist.init_process_group('gloo')\n" + LOOP,
        "no DistributedDataParallel",
    ),
    "called in a loop": (
        "def epoch():\n" + LOOP.strip().replace("\n", "\n    ").join(("    ", "\n"))
        + "for _ in range(3):\n    epoch()\n",
        "is called in a loop",
    ),
    "outside of a loop": (
        "def one(x, y):\n    F.mse_loss(model(x), y).backward()\n",
        "stands in no loop",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_known_is_left_and_said(name: str) -> None:
    loop, reason = LEFT[name]
    text = f"{HEAD}{MODEL}{loop}"
    compile(text, name, "exec")
    found = convert(text)
    assert found.text == text
    assert found.loops == 0
    ((line, why),) = found.left
    assert reason in why
    assert line > len(f"{HEAD}{MODEL}".splitlines())


def test_a_division_of_a_part_of_the_loss_is_no_division_by_k() -> None:
    text = whole(WHOLE.replace("(loss / 4).backward()", "(loss + loss / 4).backward()")).text
    assert "(loss + loss / 4).backward()" in text
    assert 'reduction="sum"' in text


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("loader, scheduler = acc", "loader, scheduler2 = acc", ""),
        (
            "prepare(model, optimizer, loader, scheduler)",
            "prepare(model, optimizer, loader), scheduler",
            "scheduler is not prepared by Accelerate",
        ),
        (
            "                if accelerator.sync_gradients:\n                    accelerator.clip",
            "                if True:\n                    accelerator.clip",
            "uses what that changes",
        ),
        (
            "            if accelerator.sync_gradients:\n                updates",
            "            if accelerator.sync_gradients and epoch:\n                updates",
            "asks whether there was an update, beside something else",
        ),
    ],
)
def test_what_is_not_known_with_accelerate(old: str, new: str, reason: str) -> None:
    text = ACCELERATE.replace(old, new)
    assert text != ACCELERATE
    found = convert(text)
    if reason:
        assert (found.loops, found.text) == (0, text)
        assert reason in found.left[0][1]
    else:
        assert found.loops == 1


def test_a_late_import_comes_too_late() -> None:
    """Ours stands where the script's first imports end."""
    text = whole(f"{TAIL}import os\nprint(os.getcwd())\n").text
    assert "from torch import nn\nimport gradsync_fx\n" in text


def test_a_flag_that_something_else_asks_stays() -> None:
    loop = DDP_CONTEXT.replace('print("update", i)', 'print("update", i, last)')
    assert "        last = (i + 1) % k == 0" in whole(loop).text
    assert "last" not in whole(DDP_CONTEXT).text


def test_two_loops_of_a_script() -> None:
    """Each has a step of its own; where one may leave gradients to the other, neither is converted."""
    second = TAIL.partition("accumulation_steps = 4\n")[2].replace("running = 0.0\n", "")
    found = convert(TAIL + second)
    assert found.loops == 2
    assert found.text.count("def optimized_step(") == found.text.count("def train_step(") == 1
    compile(found.text, "two", "exec")
    found = convert(WHOLE + LOOP)
    assert found.loops == 0
    assert all("another loop" in why for _, why in found.left)


def test_a_name_that_other_code_writes_before_it_reads_is_not_the_steps() -> None:
    """A validation with a `loss` of its own leaves the division to go; one that reads the step's does not."""
    apart = WHOLE.replace(
        "print(losses)", "for x, y in data:\n    loss = F.mse_loss(model(x), y)\n    print(loss)"
    ).replace("    losses.append(round(loss.item(), 3))\n", "")
    text = whole(apart).text
    assert "    norm = train_step(x, y)" in text
    assert "return norm" in text
    read = apart.replace("    loss = F.mse_loss(model(x), y)\n    print", "    print")
    assert "    return loss, norm" in whole(read).text


def test_who_reads_the_loss_before_and_after_it_is_divided() -> None:
    """A sum of divided losses stays one, and one of whole losses, too."""
    after = WHOLE.replace(
        "(loss / 4).backward()\n    losses", "loss = loss / 4\n    losses"
    ).replace("round(loss.item(), 3))\n", "round(loss.item(), 3))\n    loss.backward()\n")
    text = whole(after).text
    assert "    loss = loss / 4\n    loss.backward()\n" in text
    assert 'reduction="sum"' in text
    before = WHOLE.replace(
        "    (loss / 4).backward()\n    losses.append(round(loss.item(), 3))\n",
        "    losses.append(round(loss.item(), 3))\n    loss = loss / 4\n    loss.backward()\n",
    )
    text = whole(before).text
    assert "/ 4" not in text
    assert "gradient_accumulation_steps=4)\n" in text
    assert convert(before.replace("    if step", "    losses.append(loss)\n    if step")).left

    earlier = WHOLE.replace("    loss = F", "    out = model(x)\n    print(loss)\n    loss = F")
    ((_, why),) = convert(earlier.replace("F.mse_loss(model(x), y)", "F.mse_loss(out, y)")).left
    assert "other values behind the step" in why
