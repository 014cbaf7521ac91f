"""What compilers ask of the machine is found out ahead of them, once, and a failure is left to them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from gradsync_fx import _torch_cpp
from gradsync_fx.lowering import ahead
from tests.drive import plain_step, quick


pytestmark = pytest.mark.captured


@pytest.fixture
def _nothing_looked_at() -> Iterator[None]:
    ahead.look_ahead.cache_clear()
    yield
    ahead.look_ahead.cache_clear()


@pytest.mark.usefixtures("_nothing_looked_at")
def test_it_is_asked_once_and_waited_for() -> None:
    asked, go_on = list[str](), threading.Event()

    def pick() -> None:
        go_on.wait(60)
        asked.append(threading.current_thread().name)

    with mock.patch.object(ahead, "pick_vec_isa", pick):
        first = ahead.look_ahead()
        assert ahead.look_ahead() is first
        go_on.set()
        ahead.looked()
    assert len(asked) == 1
    assert asked != [threading.current_thread().name]


@pytest.mark.usefixtures("_nothing_looked_at")
def test_a_failure_is_left_to_the_compiler() -> None:
    with mock.patch.object(ahead, "pick_vec_isa", side_effect=OSError("no compiler")):
        ahead.look_ahead()
        ahead.looked()


@pytest.mark.usefixtures("_nothing_looked_at")
def test_nobody_asks_where_nothing_is_compiled() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ahead.looked()
    with mock.patch.object(_torch_cpp, "pick_vec_isa") as pick:
        quick(plain_step, 1)(model, optimizer, torch.ones(1, 2), torch.ones(1, 1))
    assert not pick.called
    assert ahead.look_ahead.cache_info().currsize == 0
