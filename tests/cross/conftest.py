"""The code of GPUs without one: processes that make it, for the session; and why there are none, where so."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from gradsync_fx.errors import ToolchainError
from gradsync_fx.lowering.target.cards import check_toolchain
from tests.cross.cases import Case, Compared
from tests.cross.results import Lowered


Lower = Callable[[Case], dict[str, Lowered]]
Compare = Callable[[Case, dict[str, str]], dict[str, Compared]]


@dataclass(slots=True, eq=False)
class Workers:
    """Processes of worker.py, each started by the first job that is asked of it; a job's error fails the test."""

    stack: ExitStack
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __call__(self, kind: str, job: str, *arguments: Any) -> Any:
        if kind not in self.running:
            command = [sys.executable, "-m", "tests.cross.worker", kind]
            piped = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self.running[kind] = self.stack.enter_context(piped)  # closes the pipe, which ends it
        worker = self.running[kind]
        assert worker.stdin is not None
        assert worker.stdout is not None
        pickle.dump((job, arguments), worker.stdin)
        worker.stdin.flush()
        answer = pickle.load(worker.stdout)
        if isinstance(answer, str):
            pytest.fail(f"{job} of {arguments} failed:\n{answer}", pytrace=False)
        return answer


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """`workers(kind, job, ...)`: what a job of worker.py answers."""
    try:
        check_toolchain("cuda:sm_90")
    except ToolchainError as error:
        pytest.skip(str(error))
    with ExitStack() as stack:
        yield Workers(stack)


@pytest.fixture(scope="session")
def lower(workers: Workers) -> Lower:
    """`lower(case)` gives the programs of a case, as data; what serves several cases is made once."""
    made: dict[Case, dict[str, Lowered]] = {}

    def lowered(case: Case) -> dict[str, Lowered]:
        other = next((other for other in made if other.serves(case)), case)
        if other not in made:
            made[other] = workers("compile", "lower", other)
        return {name: made[other][name] for name in case.programs}

    return lowered


@pytest.fixture(scope="session")
def compare(workers: Workers) -> Compare:
    """`compare(case, sources)`: how each program's kernels, interpreted, compare with the CPU."""
    return lambda case, sources: workers("interpret", "compare", case, sources)
