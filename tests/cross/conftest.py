"""The code of GPUs without one: a process that has the guard, for the session; and why there is none, where so."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.cross import guard
from tests.cross.cases import Case
from tests.cross.results import Lowered


Lower = Callable[[Case], dict[str, Lowered]]


@pytest.fixture(scope="session")
def lower() -> Iterator[Lower]:
    """`lower(case)` gives the accumulate, the boundary and the tail program of a case, each case made once."""
    reason = guard.missing()
    if reason:
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.cross.worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        asked, answered = worker.stdin, worker.stdout

        @functools.cache
        def ask(case: Case) -> dict[str, Lowered]:
            pickle.dump(case, asked)
            asked.flush()
            answer = pickle.load(answered)
            if isinstance(answer, str):
                pytest.fail(f"{case} could not be lowered:\n{answer}", pytrace=False)
            return answer

        yield ask
        asked.close()
