"""The code of README.md and docs/ and the examples run as they stand.

As a script it writes the layout table of docs/layout.md anew.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradsync_fx
from tests import pages
from tests.long import long_but
from tests.pages import PAGES, printed_as_said


ROOT = Path(__file__).resolve().parent.parent
LAYOUT = ROOT / "docs" / "layout.md"
EXAMPLES = (
    "train_text.py",
    "train_digits.py",
    "finetune_bert.py",
    "token_weighted.py",
    "resume_mid_window.py",
    "preemptible.py",
    "private_digits.py",
    "sharded_optimizer.py",
)
USUAL = ("train_text.py", "sharded_optimizer.py")  # each takes a minute or two
# What these two print in the end; they look at steps, and train nothing.
LOOKING = {"inspect_step.py": "speed-up", "diagnose_loop.py": "looks right"}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
TABLE = re.compile(r"(?<=<!-- layout -->\n).*?(?=<!-- end of layout -->)", re.DOTALL)
# integrations.md is run by test_integrations_docs.py, with what its loops need.
RUNNING = [
    page
    for page in PAGES
    if page.name != "integrations.md"
    and any(b.why is None and b.kind in pages.RUN for b in pages.blocks(page, page.read_text()))
]


def layout_table() -> str:
    """One line per module: its path, and the first line of its docstring."""
    modules = sorted(ROOT.glob("gradsync_fx/**/*.py"), key=lambda p: (len(p.parts), p))
    rows = []
    for path in modules:
        says = ast.get_docstring(ast.parse(path.read_text()))
        first = says.splitlines()[0].replace("|", r"\|") if says else ""
        rows.append(f"| `{path.relative_to(ROOT).as_posix()}` | {first} |\n")
    return "| file | what it is |\n|---|---|\n" + "".join(rows)


def test_layout_is_what_the_modules_say() -> None:
    found = TABLE.search(LAYOUT.read_text())
    assert found is not None
    assert found[0] == layout_table(), "the table is behind: make format renews it"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    for block in pages.blocks(page, page.read_text()):
        if block.why is not None:
            assert len(block.why.split()) > 1, f"{block}: no reason"
        else:
            assert block.kind in pages.RUN or re.fullmatch(r"\{[\w:-]+\}", block.kind), (
                f"{block}: a block of kind {block.kind!r}"
            )


@pytest.mark.parametrize("page", RUNNING, ids=lambda page: page.name)
def test_code_runs_and_prints_what_it_says(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """aot_eager stands in for Inductor."""
    quick = functools.partial(gradsync_fx.optimize, backend="aot_eager")
    monkeypatch.setattr(gradsync_fx, "optimize", quick)
    monkeypatch.setitem(sys.modules, "page", None)
    for block, printed in pages.play(page, page.read_text(), tmp_path):
        if block.prints is not None:
            assert printed_as_said(printed, block.prints), f"{block} printed\n{printed}"


def test_a_page_that_is_wrong_is_noticed(tmp_path: Path) -> None:
    """A planted mistake of each kind."""
    page = tmp_path / "page.md"

    def prints(text: str) -> str:
        ((_, printed),) = pages.play(page, text, tmp_path)
        return printed

    (block,) = pages.blocks(page, "```python\nprint(6 * 7)\n```\n\n```text\n43\n```\n")
    assert not printed_as_said(prints("```python\nprint(6 * 7)\n```\n"), str(block.prints))
    with pytest.raises(ZeroDivisionError):
        prints("```python\n1 / 0\n```\n")
    with pytest.raises(AssertionError, match="there is no such file"):
        prints("```sh\ngradsync-fx inspect examples/nowhere.py:gpt\n```\n")
    with pytest.raises(ValueError, match="no command"):
        prints("```sh\nrm -rf build\n```\n")
    (skipped,) = pages.blocks(page, "<!-- not run: -->\n```python\nx\n```\n")
    assert skipped.why == ""
    (bare,) = pages.blocks(page, "```\nx\n```\n")
    assert bare.kind == ""


def test_what_a_page_leaves_out_of_an_output() -> None:
    assert printed_as_said("a\nb\nc\nd\n", "a\n...\nd\n")
    assert printed_as_said("step  (/x/y.py:3)\n", "step  (...)\n")
    assert not printed_as_said("a\nb\nc\n", "a\nc\n")
    assert not printed_as_said("a\nb\n", "a\n...\nc\n")


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


@pytest.mark.parametrize("name", ["train_text.py", "private_digits.py"])
def test_example_alone(name: str) -> None:
    """On one rank, and in short; what the examples have in common parses the arguments."""
    check(name, run(f"examples/{name}", "--quick", "--backend", "aot_eager"))


@pytest.mark.gloo
@pytest.mark.inductor
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", long_but(EXAMPLES, USUAL))
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
        "finetune_bert.py": rf"epoch {5 if quick else 6}: loss \d\.\d+, test accuracy 0\.[3-9]",
        "token_weighted.py": r'reduction="mean": \d',
        "private_digits.py": rf"epoch {2 if quick else 8}: test accuracy 0\.[5-9]",
        "sharded_optimizer.py": r"with and without are 0 apart",
        "preemptible.py": rf"{6 if quick else 400} updates: loss \d\.\d+",
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
    LAYOUT.write_text(TABLE.sub(lambda _: layout_table(), LAYOUT.read_text()))
