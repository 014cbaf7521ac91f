"""What one process exports, others start from: nothing is compiled there, the numbers are the same to the bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import gradsync_fx
from gradsync_fx._torch import fresh_cache, inductor_config
from gradsync_fx.errors import OptionError, StateError, WindowError
from gradsync_fx.lowering import kernel_libraries
from gradsync_fx.runtime import artifact as files
from gradsync_fx.runtime import artifact_fit
from tests.drive import plain_step
from tests.models import mlp


pytestmark = [pytest.mark.captured, pytest.mark.inductor]
ROOT = Path(gradsync_fx.__file__).parents[1]
EXPORTED = Path(__file__).with_name("exported.py")
X, Y = torch.ones(4, 8), torch.ones(4, 1)


def run(what: str, row: str, folder: Path, world: int) -> tuple[list[dict[str, Any]], list[str]]:
    """What ranks of new processes with an empty cache find, and the calls of the C++ compiler that compile or link."""
    results, compiler, calls = folder / what, folder / "g++", folder / f"{what}.calls"
    results.mkdir()
    calls.touch()
    real = shutil.which("g++")
    compiler.write_text(f'#!/bin/sh\necho "$*" >> "$COMPILER_CALLS"\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    env = {
        **os.environ,
        "CXX": str(compiler),
        "COMPILER_CALLS": str(calls),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / f"cache-{what}"),
        "PYTHONPATH": str(ROOT),
    }
    env.pop("TORCHINDUCTOR_VEC_ISA_OK", None)  # the probe of instructions is compiled, too
    start = [sys.executable]
    if world > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    words = [*start, str(EXPORTED), what, str(folder / "step.artifact"), row, str(results)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads((results / f"rank{rank}.json").read_text()) for rank in range(world)]
    return found, [line for line in calls.read_text().splitlines() if " -o" in line]


def failed(folder: Path) -> list[str]:
    """Probes of instructions that the exporting run's compiler did not know: whoever loads tries them again."""
    sources = (folder / "cache-export").glob("??/*.cpp")
    return [
        source.name
        for source in sources
        if ".main." not in source.name and not source.with_suffix(".so").exists()
    ]


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("row", "world"),
    [
        # What two ranks do, with layers that repeat.
        pytest.param("gpt", 1, marks=pytest.mark.long),
        ("many options", 2),
        ("shards", 2),
    ],
)
def test_a_process_that_loads_an_artifact_compiles_nothing(
    row: str, world: int, tmp_path: Path
) -> None:
    exported, compiled = run("export", row, tmp_path, world)
    assert [line for line in compiled if ".main.cpp" in line]
    assert [line for line in compiled if ".main.cpp" not in line], "the probe"
    loaded, compiled = run("load", row, tmp_path, world)
    assert [line for line in compiled if not any(probe in line for probe in failed(tmp_path))] == []
    for there, here in zip(exported, loaded, strict=True):
        assert here["told"] == []
        assert here["compiled"] == 0
        assert here["loaded"] >= 2
        assert here["updates"] == there["updates"] == 3
        assert len(set(here["losses"])) == 5, "nothing was trained"
        for same in ("losses", "digest"):
            assert here[same] == there[same]
    assert len({found["digest"] for found in loaded}) == 1


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path) -> Iterator[None]:
    """A cache folder of its own, and a process that knows no kernel and no artifact."""
    with (
        fresh_cache(dir=str(tmp_path)),
        mock.patch.object(kernel_libraries, "_LOADED", {}),
        mock.patch.object(files, "_LOADED", {}),
    ):
        yield


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """Of a step of one rank, with windows of two micro-steps."""
    model, optimizer = trained()
    step = gradsync_fx.optimize(plain_step, gradient_accumulation_steps=2)
    step.prepare(model, optimizer, X, Y)
    step.export(tmp_path / "step.artifact")
    return tmp_path / "step.artifact"


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture
def elsewhere(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """From here on another cache folder, which is empty."""
    folder = artifact.parent / "elsewhere"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    return folder


def changed(artifact: Path, about: Callable[[dict[str, Any]], Any], **parts: bytes) -> None:
    """The file with other contents."""
    with zipfile.ZipFile(artifact) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    data = json.loads(contents["about.json"])
    about(data)
    contents |= {"about.json": json.dumps(data).encode(), **parts}
    with zipfile.ZipFile(artifact, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)


def told_by(**options: Any) -> list[str]:
    """Warnings of a step that is made with these options, and trains a window."""
    given: dict[str, Any] = {"gradient_accumulation_steps": 2, "x": X, "y": Y, **options}
    model, optimizer = trained()
    x, y = given.pop("x"), given.pop("y")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = gradsync_fx.optimize(plain_step, **given)
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            step(model, optimizer, x, y)
    pairs = zip(before, model.parameters(), strict=True)
    assert any(not torch.equal(old, new) for old, new in pairs), "nothing was trained"
    return [str(w.message) for w in caught if "artifact" in str(w.message)]


def test_what_fits_is_not_talked_of(artifact: Path) -> None:
    assert told_by(artifact=artifact) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"skip_nonfinite": True}, "skip_nonfinite is False there and True here"),
        ({"without": ("in_place", "updates")}, "without is [] there and ['in_place', 'updates'] here"),
        ({"options": {"epilogue_fusion": False}}, "options is [] there and [('epilogue_fusion', False)] here"),
        ({"x": torch.ones(3, 8), "y": torch.ones(3, 1)}, "data x is (4, 8)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_once_and_compiled(
    artifact: Path, options: dict[str, Any], says: str
) -> None:
    (told,) = told_by(artifact=artifact, **options)
    assert says in told
    assert "which is compiled" in told


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("torch", "torch is 2.0 there and"),
        ("the processor", "the processor is 2.0 there and"),
        ("gradsync_fx", "gradsync_fx is 2.0 there and"),
    ],
)
def test_another_version_or_processor(
    artifact: Path, elsewhere: Path, name: str, says: str
) -> None:
    changed(artifact, lambda about: about["machine"].update({name: "2.0"}))
    with pytest.warns(gradsync_fx.GradSyncWarning, match="does not fit") as caught:
        gradsync_fx.optimize(plain_step, artifact=artifact)
    assert says in str(caught[0].message)
    assert not list(elsewhere.rglob("*.so")), "something was put into the cache"


def test_another_command_of_the_compiler(artifact: Path, elsewhere: Path) -> None:
    changed(
        artifact, lambda about: about.update(compiler=about["compiler"].replace(" -O3", " -O7"))
    )
    with pytest.warns(gradsync_fx.GradSyncWarning, match="called with '-O7' there"):
        gradsync_fx.optimize(plain_step, artifact=artifact)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-300])


def _another_byte(path: Path) -> None:
    """Inside of what is packed."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def _no_archive(path: Path) -> None:
    path.write_text("nothing")


def _other_format(path: Path) -> None:
    changed(path, lambda about: about.update(format=7))


def _torchs_part(path: Path) -> None:
    changed(path, lambda about: None, torch=b"nothing")


def _a_library(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        (name, *_) = [n for n in archive.namelist() if n.endswith(".so")]
    changed(path, lambda about: None, **{name: b"nothing"})


def _outside(path: Path) -> None:
    digest = files._digest(b"x")
    changed(
        path,
        lambda about: about["digests"].update({"../../outside.so": digest}),
        **{"files/../../outside.so": b"x"},
    )


@pytest.mark.parametrize(
    "damage", [_cut, _another_byte, _no_archive, _other_format, _torchs_part, _a_library, _outside]
)
def test_a_damaged_file_is_named_and_nothing_of_it_is_used(
    artifact: Path,
    elsewhere: Path,
    damage: Callable[[Path], None],
) -> None:
    damage(artifact)
    with pytest.warns(
        gradsync_fx.GradSyncWarning, match="it is damaged, or no file of step.export"
    ):
        step = gradsync_fx.optimize(plain_step, artifact=artifact)
    assert not list(elsewhere.rglob("*.so")), "something was put into the cache"
    assert not list(elsewhere.parent.rglob("outside.so"))
    model, optimizer = trained()
    assert step(model, optimizer, X, Y).isfinite()


def test_a_file_that_is_gone_by_the_first_call(artifact: Path) -> None:
    """All of it that is needed was read when the step was made."""
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "skip_nonfinite": True}
    step = gradsync_fx.optimize(plain_step, artifact=artifact, **options)
    artifact.unlink()
    with pytest.warns(gradsync_fx.GradSyncWarning, match="skip_nonfinite is False there"):
        step(*trained(), X, Y)


def test_what_is_there_already_stays(artifact: Path, elsewhere: Path) -> None:
    """A cache is the machine's own: an artifact adds to it."""
    gradsync_fx.optimize(plain_step, artifact=artifact)
    (library, *_) = sorted(elsewhere.rglob("*.main.so"))
    library.write_bytes(b"its own")
    with mock.patch.object(files, "_LOADED", {}):
        gradsync_fx.optimize(plain_step, artifact=artifact)
    assert library.read_bytes() == b"its own"


def test_refusals(tmp_path: Path) -> None:
    path = tmp_path / "step.artifact"
    with pytest.raises(OptionError, match="which cannot be read"):
        gradsync_fx.optimize(plain_step, artifact=path)
    with pytest.raises(OptionError, match="argument 'artifact'"):
        gradsync_fx.optimize(plain_step, artifact=3)  # type: ignore[call-overload]
    with pytest.raises(OptionError, match="arguments 'backend' and 'artifact'"):
        gradsync_fx.optimize(plain_step, artifact=path, backend="aot_eager")
    step = gradsync_fx.optimize(plain_step, gradient_accumulation_steps=2)
    with pytest.raises(WindowError, match=r"step\.export"):
        step.export(path)
    step.prepare(*trained(), X, Y)
    with pytest.raises(StateError, match="could not be written"):
        step.export(tmp_path / "nowhere" / "step.artifact")
    with (
        inductor_config.patch({"force_disable_caches": True}),
        pytest.raises(StateError, match="in torch's caches"),
    ):
        step.export(path)
    eager = gradsync_fx.optimize(plain_step, backend="aot_eager")
    eager.prepare(*trained(), X, Y)
    with pytest.raises(OptionError, match=r"step\.export: backend='aot_eager'"):
        eager.export(path)
    assert not path.exists()
    step.export(path)  # the way out of each
    assert told_by(artifact=path) == []


def test_the_first_words_that_differ() -> None:
    assert artifact_fit.command_apart("g++ -O3 a", "g++ -O2 a") == (
        "the C++ compiler was called with '-O3' there, and '-O2' here"
    )
    assert artifact_fit.differences({"a": "1", "b": "2"}, {"b": "2", "c": "3"}) == [
        "a is 1 there and nothing here",
        "c is nothing there and 3 here",
    ]
