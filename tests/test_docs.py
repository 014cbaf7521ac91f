"""The README's code and the examples run as they stand.

As a script it writes the README's layout table anew.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import gradsync_fx


ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
EXAMPLES = (
    "train_text.py",
    "train_digits.py",
    "finetune_bert.py",
    "token_weighted.py",
    "resume_mid_window.py",
    "private_digits.py",
)
# What these two print in the end; they look at steps, and train nothing.
LOOKING = {"inspect_step.py": "speed-up", "diagnose_loop.py": "looks right"}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
TABLE = re.compile(r"(?<=<!-- layout -->\n).*?(?=<!-- end of layout -->)", re.DOTALL)
# A block of Python and, where a block of text comes right after it, what it prints.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)


def layout_table() -> str:
    """One line per module: its path, and the first line of its docstring."""
    modules = sorted(ROOT.glob("gradsync_fx/**/*.py"), key=lambda p: (len(p.parts), p))
    rows = []
    for path in modules:
        says = ast.get_docstring(ast.parse(path.read_text()))
        first = says.splitlines()[0].replace("|", r"\|") if says else ""
        rows.append(f"| `{path.relative_to(ROOT).as_posix()}` | {first} |\n")
    return "| file | what it is |\n|---|---|\n" + "".join(rows)


def test_readme_layout_is_what_the_modules_say() -> None:
    found = TABLE.search(README.read_text())
    assert found is not None
    assert found[0] == layout_table(), "the table is behind: make format renews it"


def test_readme_code_runs_and_prints_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks continue each other, in one namespace; aot_eager stands in for Inductor."""
    quick = functools.partial(gradsync_fx.optimize, backend="aot_eager")
    monkeypatch.setattr(gradsync_fx, "optimize", quick)
    module = types.ModuleType("readme")
    monkeypatch.setitem(sys.modules, "readme", module)
    text = README.read_text()
    blocks = list(BLOCK.finditer(text))
    assert blocks
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        code = compile("\n" * line + block[1], str(README), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, module.__dict__)
        if block[2] is not None:
            assert printed.getvalue() == block[2]


@pytest.mark.parametrize("name", [*EXAMPLES, *LOOKING])
def test_example_is_short_and_public(name: str) -> None:
    source = (ROOT / "examples" / name).read_text()
    tree = ast.parse(source)
    assert len(source.splitlines()) < 120
    assert ast.get_docstring(tree)
    assert "main" in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    imported = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    assert not [m for m in imported if m.startswith("gradsync_fx")], "import gradsync_fx instead"
    public = {*gradsync_fx.__all__, "__version__"}
    assert set(re.findall(r"\bgradsync_fx\.(\w+)", source)) <= public


@pytest.mark.parametrize("name", LOOKING)
def test_example_that_looks(name: str) -> None:
    assert LOOKING[name] in run(f"examples/{name}")


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_alone(name: str) -> None:
    check(name, run(f"examples/{name}", "--quick", "--backend", "aot_eager"))


@pytest.mark.gloo
@pytest.mark.inductor
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_as_its_own_line_says(name: str) -> None:
    """On two ranks, whole, with the default backend."""
    docstring = ast.get_docstring(ast.parse((ROOT / "examples" / name).read_text())) or ""
    (line,) = re.findall(r"^\s*(torchrun .*)$", docstring, re.MULTILINE)
    assert line == f"torchrun --nproc-per-node 2 examples/{name}"
    check(name, run(*TORCHRUN, f"examples/{name}", timeout=1000), quick=False)


def check(name: str, printed: str, *, quick: bool = True) -> None:
    """Looks for the last thing that the example prints, once: rank 0 alone speaks."""
    last = {
        "train_text.py": r"gradient bytes",
        "train_digits.py": rf"epoch {2 if quick else 8}: loss \d\.\d+, ",
        "finetune_bert.py": rf"epoch {1 if quick else 6}: loss \d\.\d+, ",
        "token_weighted.py": r'reduction="mean": \d',
        "private_digits.py": rf"epoch {2 if quick else 8}: test accuracy 0\.[5-9]",
        "resume_mid_window.py": rf"after call {12 if quick else 60}: bitwise",
    }
    assert len(re.findall(last[name], printed)) == 1, printed
    if name == "train_text.py":
        losses = re.search(r"validation loss (\d\.\d+) -> (\d\.\d+)", printed)
        assert losses is not None, printed
        assert float(losses[2]) < float(losses[1])


def run(*arguments: str, timeout: int = 150) -> str:
    """What a Python process prints. Warnings of ours are errors in it."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::UserWarning"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        printed, complaints = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its ranks on this
            process.communicate()
    assert process.returncode == 0, complaints
    return printed


if __name__ == "__main__":
    README.write_text(TABLE.sub(lambda _: layout_table(), README.read_text()))
