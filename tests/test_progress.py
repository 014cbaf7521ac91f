"""What a long call says of itself: on a terminal, in a log, on other ranks, and not at all."""

from __future__ import annotations

import io
import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import gradsync_fx
from gradsync_fx import progress
from gradsync_fx.progress import LongCall, detail, stage


LONGEST = 60.0  # seconds to wait for what has to be said


class Stream(io.StringIO):
    """Where it is said; `until` waits for a text."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal, self._written = terminal, threading.Condition()

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> int:
        with self._written:
            self._written.notify_all()
            return super().write(text)

    def until(self, text: str) -> None:
        with self._written:
            assert self._written.wait_for(lambda: text in self.getvalue(), LONGEST), self.getvalue()


def stream(monkeypatch: pytest.MonkeyPatch, *, terminal: bool = False) -> Stream:
    """In place of stderr, for calls that take too long from their first stage on."""
    found = Stream(terminal=terminal)
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    return found


def test_a_log_gets_one_line_for_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    err = stream(monkeypatch)
    with LongCall(verbose=True):
        with stage("tracing"):
            err.until("tracing")
        with stage("compiling"):
            detail("1/2")
            with stage("slicing"):
                pass
    assert err.getvalue() == "".join(
        f"gradsync_fx: {doing}\n" for doing in ("tracing", "compiling", "slicing")
    )


def test_a_terminal_gets_one_line_that_is_gone_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    err = stream(monkeypatch, terminal=True)
    with LongCall(verbose=True), stage("compiling"):
        err.until("gradsync_fx: compiling (0 s)")
        detail("3/7")
        err.until("compiling 3/7")
    assert "\n" not in err.getvalue()
    assert err.getvalue().endswith("\r\x1b[K")


def test_the_outer_call_speaks_for_the_inner(monkeypatch: pytest.MonkeyPatch) -> None:
    err = stream(monkeypatch)
    with LongCall(verbose=True), LongCall(verbose=False), stage("checking"):
        err.until("checking")
    with LongCall(verbose=False), LongCall(verbose=True), stage("compiling"):
        assert not [t for t in threading.enumerate() if t.name == "gradsync_fx progress"]


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def rank() -> int:
        asked.set()
        return 1

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", rank)
    err = stream(monkeypatch)
    with LongCall(verbose=True):
        with stage("tracing"):
            assert asked.wait(LONGEST)
        with stage("compiling"):
            pass
    assert err.getvalue() == ""


def test_nothing_is_said_of_a_short_call_and_no_thread_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    err = stream(monkeypatch)
    monkeypatch.setattr(progress, "PATIENCE", 1e6)
    before = threading.enumerate()
    with LongCall(verbose=True), stage("tracing"):
        assert threading.enumerate() != before
    assert threading.enumerate() == before
    assert err.getvalue() == ""


@pytest.mark.parametrize("gone", ["closed", "none"])
def test_a_stream_that_is_gone_ends_no_call(monkeypatch: pytest.MonkeyPatch, gone: str) -> None:
    err = stream(monkeypatch)
    with LongCall(verbose=True):
        with stage("tracing"):
            err.until("tracing")
        if gone == "closed":
            err.close()
        else:
            monkeypatch.setattr(sys, "stderr", None)
        with stage("compiling"):
            pass


def train_step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.captured
@pytest.mark.parametrize("verbose", [True, False])
def test_a_step_names_its_stages_once(monkeypatch: pytest.MonkeyPatch, verbose: bool) -> None:
    told: list[tuple[bool, str]] = []
    plain = LongCall.enter

    def enter(call: LongCall, doing: str) -> None:
        told.append((call.verbose, doing))
        plain(call, doing)

    monkeypatch.setattr(LongCall, "enter", enter)
    model, x, y = torch.nn.Linear(4, 2), torch.randn(3, 4), torch.randn(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    step = gradsync_fx.optimize(
        train_step, gradient_accumulation_steps=2, backend="aot_eager", verbose=verbose
    )
    for _ in range(4):
        step(model, optimizer, x, y)
    assert told == [
        (verbose, doing)
        for doing in (
            "tracing train_step",
            "slicing a program out of the step",
            "compiling the accumulate program",
            "tracing AdamW.step",
            "slicing a program out of the step",
            "compiling the boundary program",
        )
    ]
