"""`gradsync-fx convert`: the difference on stdout, reasons on stderr, and no file written over that is not meant."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gradsync_fx.cli.main import app
from tests.conversion.training import CARRIED, TAIL


def convert(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TAIL)
    return path


def test_the_difference_goes_to_stdout(script: Path) -> None:
    result = convert(script)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[:2] == [f"--- {script}", f"+++ {script}"]
    assert "+def train_step(inputs, targets):" in lines
    assert "-        loss.backward()" in lines
    assert f"{script}:16: a short last window" in result.stderr
    assert script.read_text() == TAIL


def test_files(script: Path) -> None:
    """A file that exists is written over when that is said."""
    new = script.with_name("new.py")
    assert convert(script, "--output", new).exit_code == 0
    text = new.read_text()
    assert "@gradsync_fx.optimize(" in text
    new.write_text("mine")
    for target in (new, script):
        result = convert(script, "--output", target)
        assert result.exit_code == 2
        assert "--force" in result.stderr
    assert (new.read_text(), script.read_text()) == ("mine", TAIL)
    assert convert(script, "--output", new, "--force").exit_code == 0
    assert new.read_text() == text
    assert convert(script, "--output", new, "--in-place").exit_code == 2
    assert convert(script, "--in-place").exit_code == 0
    assert script.read_text() == text


def test_what_is_left_is_said(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CARRIED.replace("(i + 1) % k == 0", "loss.item() < 1"))
    result = convert(script)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"{script}:17: left as it is: `loss.item() < 1` is no count" in result.stderr
    script.write_text("print(1)\n")
    result = convert(script)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no backward is found" in result.stderr


def test_what_is_no_script(script: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def broken(:\n")
    latin = tmp_path / "latin.py"
    latin.write_bytes(b"# caf\xe9\n")
    for given, says in (
        (bad, "bad.py:1: is no Python"),
        (latin, "cannot be read"),
        (tmp_path, "is a folder"),
        (tmp_path / "none.py", "there is no such file"),
    ):
        result = convert(given)
        assert result.exit_code == 2
        assert says in result.stderr
    assert convert(script).exit_code == 0


def test_without_the_library(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libcst", None)
    result = convert(script)
    assert result.exit_code == 1
    assert "pip install 'gradsync_fx[convert]'" in result.stderr
