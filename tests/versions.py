"""The core of the test-suite with another torch, in an environment of its own.

As a script (`make test-torch TORCH=2.15.0`) it makes the environment `.venv-torch-2.15.0`, runs the core in it, and
writes what came out into the table of docs/versions.md.
"""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from collections import Counter
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from xml.etree import ElementTree


ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "versions.md"
TABLE = re.compile(r"(?<=<!-- versions -->\n).*?(?=<!-- end of versions -->)", re.DOTALL)
HEAD = """\
| torch | Python | day | passed | failed | skipped |
|---|---|---|---|---|---|
"""

# What each part of torch that is leant on most is tried by; the rest of the suite asks more of us than of torch.
CORE = tuple(
    f"tests/{name}.py"
    for name in (
        "runtime/test_window", "capture/test_patches", "ir/test_regions", "test_forms_of_steps",
        "capture/test_deferred_calls", "test_backend", "test_gradients", "test_buffers", "test_weights",
        "test_equivalence", "test_saved_windows", "test_errors", "test_torch_names", "comm/test_inplace_all_reduce",
        "test_ranks",
    )
)  # fmt: skip
# torch brings what it needs, and the package what it needs; these are the tests' own.
TOOLS = ("numpy", "pytest", "pytest-timeout", "pytest-xdist", "tqdm")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of the core. torch, python: versions. skipped: how many tests for which reason."""

    torch: str
    python: str
    day: str
    passed: int
    failed: int
    skipped: dict[str, int]

    def row(self) -> str:
        left_out = "; ".join(f"{n}: {reason}" for reason, n in self.skipped.items()) or "0"
        return (
            f"| {self.torch} | {self.python} | {self.day} | {self.passed} | {self.failed} "
            f"| {left_out} |\n"
        )


def read(report: str, torch: str, python: str, day: str) -> Outcome:
    """From pytest's report in JUnit's XML."""
    passed = failed = 0
    skipped: Counter[str] = Counter()
    for case in ElementTree.fromstring(report).iter("testcase"):
        skip = case.find("skipped")
        if skip is not None:
            skipped[skip.get("message", "").replace("|", r"\|")] += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        else:
            passed += 1
    return Outcome(torch, python, day, passed, failed, dict(skipped))


def rows(text: str) -> dict[str, str]:
    """The rows of the table, by torch's version."""
    found = TABLE.search(text)
    assert found is not None, "docs/versions.md has no table of versions"
    lines = found[0].splitlines(keepends=True)[2:]
    return {line.split("|")[1].strip(): line for line in lines}


def with_row(text: str, outcome: Outcome) -> str:
    """The page's text, with one row of the table new."""
    known = {version: row for version, row in rows(text).items() if version != outcome.torch}
    known[outcome.torch] = outcome.row()
    newest_first = sorted(known, key=lambda v: [int(n) for n in v.split(".")], reverse=True)
    table = HEAD + "".join(known[version] for version in newest_first)
    return TABLE.sub(lambda _: table, text)


def pinned(names: tuple[str, ...], constraints: str) -> list[str]:
    """`name==version` of some of the packages in constraints.txt."""
    return [line for line in constraints.splitlines() if line.partition("==")[0] in names]


def environment(torch: str) -> Path:
    """The Python of an environment with this torch, made where it is not there."""
    folder = ROOT / f".venv-torch-{torch}"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    tools = pinned(TOOLS, (ROOT / "constraints.txt").read_text())
    wanted = [f"torch=={torch}", *tools, "--editable", str(ROOT)]
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-cache-dir", *wanted], check=True)
    return python


def main(torch: str, *arguments: str) -> int:
    if not re.fullmatch(r"\d+\.\d+\.\d+", torch):
        sys.exit(f"{torch!r} is no version of torch: make test-torch TORCH=2.15.0")
    print(f"Installing torch {torch} (large: this can take some minutes) ...", flush=True)
    python = environment(torch)
    report = python.parent.parent / "core.xml"
    report.unlink(missing_ok=True)
    tests = [str(python), "-m", "pytest", f"--junitxml={report}", *arguments, *CORE]
    code = subprocess.run(tests, cwd=ROOT).returncode
    if code not in (0, 1):  # stopped, or nothing collected: no outcome
        return code
    of_python = f"{sys.version_info.major}.{sys.version_info.minor}"
    outcome = read(report.read_text(), torch, of_python, date.today().isoformat())
    PAGE.write_text(with_row(PAGE.read_text(), outcome))
    print(outcome.row(), end="")
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
