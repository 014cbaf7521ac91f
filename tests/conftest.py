"""Fixtures: a fresh seed for every test, and one pair of gloo processes for the tests of a file."""

from __future__ import annotations

import math
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gradsync_fx import progress
from tests.eagerly import asked, eagerly
from tests.workers import Ranks


@pytest.fixture(autouse=True)
def _seed() -> None:
    """The same random numbers for every test, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _silent() -> None:
    """Compilations under test say nothing on stderr, which some tests read."""
    progress.PATIENCE = math.inf


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> Iterator[None]:
    """Shells start what runs in the background deaf to interrupts, which some tests send."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    """With the flag of tests/eagerly.py, every step runs eagerly; tests of what only a capture has are left out."""
    if not asked():
        yield
        return
    if request.node.get_closest_marker("captured"):
        pytest.skip("about programs, compilations or captures, which an eager run does not have")
    with eagerly(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the step runs eagerly")
        yield


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two processes in one gloo group: `ranks(scenario, *args)` gives the results in rank order."""
    pair = Ranks(tmp_path_factory.mktemp("ranks"))
    yield pair
    pair.stop()


@pytest.fixture
def three_ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Three processes, for one test: two cores are few for them."""
    three = Ranks(tmp_path, world=3)
    yield three
    three.stop()
