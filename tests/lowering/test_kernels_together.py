"""C++ kernels that are compiled together, and beside other work: when they are there, and what they compute."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import gradsync_fx
from gradsync_fx._torch import inductor_config
from gradsync_fx._torch_cpp import AsyncCompile, CppCompileError
from gradsync_fx.lowering import kernel_libraries
from gradsync_fx.lowering import kernels_together as together
from gradsync_fx.lowering.kernel_libraries import kernels_of
from tests.drive import plain_step
from tests.lowering.kernels import ADD, TYPES, adding, libraries, result


pytestmark = [pytest.mark.inductor, pytest.mark.captured]


def program(*numbers: str) -> dict[str, Any]:
    """What Inductor's code does: it names its kernels, and asks for them."""
    compiling = AsyncCompile()
    scope: dict[str, Any] = {
        f"add_{number}": compiling.cpp_pybinding(TYPES, ADD % number) for number in numbers
    }
    compiling.wait(scope)
    return scope


def test_with_one_thread_a_kernel_is_there_when_it_is_named(cache: Path) -> None:
    """And found by later processes, as with several."""
    with inductor_config.patch({"compile_threads": 1}), together.kernels_together():
        compiling = AsyncCompile()
        kernels = [compiling.cpp_pybinding(TYPES, ADD % n) for n in ("1.0f", "2.0f")]
    assert [result(kernel) for kernel in kernels] == [[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]]
    assert len(libraries(cache)) == 2
    with mock.patch.object(kernel_libraries, "started_library") as compiled:
        kernels_of([adding("1.0f"), adding("2.0f")])
    assert not compiled.called


def test_kernels_are_there_when_a_program_has_asked_for_them(cache: Path) -> None:
    with together.kernels_together():
        made = program("1.0f")
    assert result(made["add_1.0f"]) == [1.0, 2.0, 3.0, 4.0]


def test_later_kernels_are_there_at_the_end_of_the_outermost_block(cache: Path) -> None:
    with together.kernels_later():
        with together.kernels_later(), together.kernels_together():
            one = program("1.0f")
        assert together.kernels_on_their_way()
        with together.kernels_together():
            both = program("1.0f", "2.0f")  # one of them is under way: it is compiled once
        assert not callable(both["add_2.0f"])
    assert not together.kernels_on_their_way()
    assert result(one["add_1.0f"]) == [1.0, 2.0, 3.0, 4.0]
    assert result(both["add_2.0f"]) == [2.0, 3.0, 4.0, 5.0]
    assert both["add_1.0f"] is one["add_1.0f"]
    assert len(libraries(cache)) == 2


def test_what_is_on_disk_is_not_put_off(cache: Path) -> None:
    kernels_of([adding("1.0f")])
    with together.kernels_later(), together.kernels_together():
        made = program("1.0f")
        assert not together.kernels_on_their_way()
        assert result(made["add_1.0f"]) == [1.0, 2.0, 3.0, 4.0]


def test_a_failure_comes_at_the_end_of_the_block_and_from_the_kernel(cache: Path) -> None:
    """All other kernels are there."""
    made: list[dict[str, Any]] = []

    def both() -> None:
        with together.kernels_later():
            for number in ("nonsense", "1.0f"):
                with together.kernels_together():
                    made.append(program(number))

    with pytest.raises(CppCompileError):
        both()
    assert result(made[1]["add_1.0f"]) == [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(CppCompileError):
        result(made[0]["add_nonsense"])
    assert not together.kernels_on_their_way()


def test_a_torn_library_is_compiled_beside_the_cache(cache: Path) -> None:
    load, torn = kernel_libraries.loaded_kernel, []

    def loaded(library: Path, name: str) -> Any:
        if not torn:
            torn.append(library)
            raise ImportError("file too short")
        return load(library, name)

    with (
        mock.patch.object(kernel_libraries, "loaded_kernel", loaded),
        pytest.warns(gradsync_fx.GradSyncWarning, match="damaged"),
        together.kernels_later(),
        together.kernels_together(),
    ):
        made = program("1.0f")
    assert result(made["add_1.0f"]) == [1.0, 2.0, 3.0, 4.0]


def net_and_step(**options: Any) -> tuple[nn.Module, Any, gradsync_fx.OptimizedStep]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return (
        model,
        optimizer,
        gradsync_fx.optimize(plain_step, gradient_accumulation_steps=2, **options),
    )


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(2, 8, generator=generator), torch.randn(2, 1, generator=generator))
        for _ in range(4)
    ]


def test_both_programs_of_a_window_are_made_while_compilers_work(cache: Path) -> None:
    """In the first call; and they train as those of a backend that compiles nothing."""
    model, optimizer, step = net_and_step()
    step(model, optimizer, *batches()[0])
    seconds = {p.name: p.compile_seconds for p in step.report().programs}
    assert seconds["accumulate"]
    assert seconds["boundary"]
    for batch in batches()[1:]:
        step(model, optimizer, *batch)
    other, its_optimizer, plain = net_and_step(backend="aot_eager")
    for batch in batches():
        plain(other, its_optimizer, *batch)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_first_call_that_is_interrupted_while_it_waits_can_be_made_again(cache: Path) -> None:
    model, optimizer, step = net_and_step()
    wait = kernel_libraries.StartedKernels.wait
    with (
        mock.patch.object(kernel_libraries.StartedKernels, "wait", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        step(model, optimizer, *batches()[0])
    assert together.interrupted()
    assert kernel_libraries.StartedKernels.wait is wait
    for batch in batches():
        step(model, optimizer, *batch)
    assert not together.interrupted()
    other, its_optimizer, plain = net_and_step(backend="aot_eager")
    for batch in batches():
        plain(other, its_optimizer, *batch)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_kernels_that_fail_together_are_compiled_alone(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The step trains all the same, and the log says so."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    broken = mock.patch.object(kernel_libraries, "joined", return_value="int broken")
    before = model.weight.detach().clone()
    step = gradsync_fx.optimize(plain_step, gradient_accumulation_steps=2)
    with broken, caplog.at_level(logging.WARNING):
        for _ in range(2):
            step(model, optimizer, torch.ones(2, 8), torch.zeros(2, 1))
    assert "do not compile together" in caplog.text
    assert not torch.equal(before, model.weight)


SCRIPT = """
import sys
from contextlib import nullcontext
from unittest import mock
import torch, gradsync_fx
from gradsync_fx.lowering import lower
if sys.argv[1] == "alone":
    mock.patch.object(lower, "kernels_together", nullcontext).start()
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Linear(64, 1)
)
optimizer = torch.optim.AdamW(model.parameters())
def train_step(x, y):
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss
step = gradsync_fx.optimize(train_step, gradient_accumulation_steps=2)
for _ in range(4):
    step(torch.randn(8, 32), torch.randn(8, 1))
print(sum(hash(v) for p in model.parameters() for v in p.flatten().tolist()))
"""


def test_the_same_bits_as_alone(tmp_path: Path) -> None:
    root = str(Path(gradsync_fx.__file__).parents[1])
    said, made = {}, {}
    for way in ("together", "alone"):
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / way), "PYTHONPATH": root}
        command = [sys.executable, "-c", SCRIPT, way]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        said[way], made[way] = done.stdout, len(libraries(tmp_path / way))
    assert said["together"] == said["alone"]
    assert made["together"] < made["alone"] / 2
