"""C++ kernels that are compiled together: which, where they are found again, and that they compute the same."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import gradsync_fx
from gradsync_fx._torch import fresh_cache, inductor_cache_dir, inductor_config
from gradsync_fx._torch_cpp import AsyncCompile
from gradsync_fx.lowering import kernels_together as together
from gradsync_fx.lowering.kernels_together import Source, grouped, joined, kernels_of
from tests.drive import plain_step


pytestmark = [pytest.mark.inductor, pytest.mark.captured]

ADD = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(const float* in, float* out)
{
    for (int64_t i = 0; i < 4; i++) out[i] = in[i] + %s;
}
"""


def adding(number: str) -> Source:
    return Source(("const float*", "float*"), ADD % number)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """A cache folder of its own, and a process that knows no kernel."""
    with fresh_cache(dir=str(tmp_path)), mock.patch.object(together, "_LOADED", {}):
        yield Path(inductor_cache_dir())


def result(kernel: Any) -> list[float]:
    out = torch.empty(4)
    kernel(torch.arange(4.0), out)
    return out.tolist()


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.main.so"))


def test_one_library_holds_several_kernels(cache: Path) -> None:
    one, two = adding("1.0f"), adding("2.0f")
    made = kernels_of([one, two])
    assert result(made[one]) == [1.0, 2.0, 3.0, 4.0]
    assert result(made[two]) == [2.0, 3.0, 4.0, 5.0]
    assert len(libraries(cache)) == 1
    # Another program has one of them, and one more: only that is compiled.
    three = adding("3.0f")
    again = kernels_of([two, three])
    assert again[two] is made[two]
    assert result(again[three]) == [3.0, 4.0, 5.0, 6.0]
    assert len(libraries(cache)) == 2


def test_with_one_thread_a_kernel_is_there_when_it_is_named(cache: Path) -> None:
    """And found by later processes, as with several."""
    with inductor_config.patch({"compile_threads": 1}), together.kernels_together():
        compiling = AsyncCompile()
        kernels = [
            compiling.cpp_pybinding(["const float*", "float*"], ADD % n) for n in ("1.0f", "2.0f")
        ]
    assert [result(kernel) for kernel in kernels] == [[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]]
    assert len(libraries(cache)) == 2
    with mock.patch.object(together, "started_library") as compiled:
        kernels_of([adding("1.0f"), adding("2.0f")])
    assert not compiled.called


def test_a_kernel_is_found_on_disk(cache: Path) -> None:
    one, two = adding("1.0f"), adding("2.0f")
    kernels_of([one, two])
    with (
        mock.patch.object(together, "_LOADED", {}),
        mock.patch.object(together, "started_library") as compiled,
    ):
        again = kernels_of([two])
    assert not compiled.called
    assert result(again[two]) == [2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("note", ["", "nonsense", "../outside.so", "missing.so", "\0", "locks"])
def test_a_note_that_says_nothing_sensible_is_no_note(cache: Path, note: str) -> None:
    one = adding("1.0f")
    (cache.parent / "outside.so").touch()
    kernels_of([one])
    (written,) = (p for p in (cache / "gradsync_fx" / "kernels").rglob("*") if p.is_file())
    written.write_text(note)
    with mock.patch.object(together, "_LOADED", {}):
        again = kernels_of([one])
    assert result(again[one]) == [1.0, 2.0, 3.0, 4.0]
    assert written.read_text() != note


def test_a_note_that_leads_to_another_library_leads_to_no_kernel(cache: Path) -> None:
    """It is compiled anew: the other library has no kernel of that name."""
    one, two = adding("1.0f"), adding("2.0f")
    kernels_of([one])
    kernels_of([two])
    notes = [p for p in (cache / "gradsync_fx" / "kernels").rglob("*") if p.is_file()]
    told = [note.read_text() for note in notes]
    for note, text in zip(notes, reversed(told), strict=True):
        note.write_text(text)
    with mock.patch.object(together, "_LOADED", {}):
        made = kernels_of([one, two])
    assert result(made[one]) == [1.0, 2.0, 3.0, 4.0]
    assert result(made[two]) == [2.0, 3.0, 4.0, 5.0]


def test_what_is_no_kernel_of_the_command_is_compiled_anew(cache: Path) -> None:
    """Other settings of the compiler are other kernels."""
    one = adding("1.0f")
    kernels_of([one])
    with inductor_config.patch({"cpp.enable_floating_point_contract_flag": "fast"}):
        kernels_of([one])
    assert len(libraries(cache)) == 2


def test_a_source_with_macros_stays_alone() -> None:
    assert adding("1.0f").can_be_joined
    assert Source((), "#include <x>\n  #pragma omp parallel\n").can_be_joined
    assert not Source((), "#include <x>\n#define LANES 8\n").can_be_joined
    assert not Source((), "  #ifdef LANES\n").can_be_joined


def test_includes_stand_outside_of_namespaces() -> None:
    text = joined({"kernel_a": adding("1.0f"), "kernel_b": adding("2.0f")})
    before, *_ = text.split("namespace", 1)
    assert before.count("#include <torch/csrc/inductor/cpp_prefix.h>") == 1
    assert text.count("#include") == before.count("#include")


def test_files_for_each_thread_where_there_is_enough() -> None:
    kernels = [Source((), f"{i} " + "x" * together.LEAST) for i in range(5)]
    assert [len(g) for g in grouped(kernels, 2)] == [3, 2]
    assert len(grouped(kernels, 32)) == 5
    assert [len(g) for g in grouped([adding("1.0f"), adding("2.0f")], 32)] == [2]
    assert grouped([], 2) == []


def test_kernels_that_fail_together_are_compiled_alone(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The step trains all the same, and the log says so."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    broken = mock.patch.object(together, "joined", return_value="int broken")
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
