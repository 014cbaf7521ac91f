"""The code of GPUs without one: processes that make it, for the session; and why there are none, where so."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gradsync_fx.errors import ToolchainError
from gradsync_fx.lowering.target.cards import check_toolchain
from tests.cross.cases import Case, Compared
from tests.cross.results import Lowered


Lower = Callable[[Case], dict[str, Lowered]]
Compare = Callable[[Case, dict[str, str]], dict[str, Compared]]


@pytest.fixture(scope="session")
def lower() -> Iterator[Lower]:
    """`lower(case)` gives the accumulate, the boundary and the tail program of a case, each case made once."""
    with _worker("lower") as ask:
        yield functools.cache(ask)


@pytest.fixture(scope="session")
def compare() -> Iterator[Compare]:
    """`compare(case, sources)`: how each program's kernels, interpreted, compare with the CPU."""
    with _worker("compare") as ask:
        yield ask


def skip_without_toolchain() -> None:
    try:
        check_toolchain("cuda:sm_90")
    except ToolchainError as error:
        pytest.skip(str(error))


@contextmanager
def _worker(job: str) -> Iterator[Callable[..., Any]]:
    skip_without_toolchain()
    command = [sys.executable, "-m", "tests.cross.worker", job]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        asked, answered = worker.stdin, worker.stdout

        def ask(*arguments: Any) -> Any:
            pickle.dump(arguments, asked)
            asked.flush()
            answer = pickle.load(answered)
            if isinstance(answer, str):
                pytest.fail(f"{job} of {arguments[0]} failed:\n{answer}", pytrace=False)
            return answer

        yield ask
        asked.close()
