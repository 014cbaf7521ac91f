"""The code of GPUs without one: processes that make it, for the session; and why there are none, where so."""

from __future__ import annotations

import hashlib
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

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


@dataclass(slots=True, eq=False)
class Shared:
    """Programs of cases, each lowered once for all processes that run tests: kept in a folder of the session."""

    folder: Path
    workers: Workers
    read: dict[Path, Lowered] = field(default_factory=dict)

    def __call__(self, case: Case) -> dict[str, Lowered]:
        names = {name: self._path(case, name) for name in case.programs}
        if not self.read.keys() >= {*names.values()}:
            with FileLock(self._path(case, "lock")):
                missing = tuple(name for name, path in names.items() if not path.exists())
                if missing:
                    made = self.workers("compile", "lower", replace(case, programs=missing))
                    for name, program in made.items():
                        names[name].write_bytes(pickle.dumps(program))
            self.read |= {path: pickle.loads(path.read_bytes()) for path in names.values()}
        return {name: self.read[path] for name, path in names.items()}

    def _path(self, case: Case, what: str) -> Path:
        alike = repr(replace(case, programs=()))
        return self.folder / f"{hashlib.sha256(alike.encode()).hexdigest()[:16]}.{what}"


@pytest.fixture(scope="session")
def lower(workers: Workers, tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Lower:
    """`lower(case)` gives the programs of a case, as data."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "lowered"
    folder.mkdir(exist_ok=True)
    return Shared(folder, workers)


@pytest.fixture(scope="session")
def compare(workers: Workers) -> Compare:
    """`compare(case, sources)`: how each program's kernels, interpreted, compare with the CPU."""
    return lambda case, sources: workers("interpret", "compare", case, sources)
