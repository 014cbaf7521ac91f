"""What a rank writes down for the others to read: that it compiles, in any of its threads."""

from __future__ import annotations

import threading

import pytest

from gradsync_fx.comm import liveness
from gradsync_fx.comm.liveness import Compilations, compiling


class Store:
    """What ranks write and read."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.held[key] = value

    def get(self, key: str) -> bytes:
        return self.held[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.held for key in keys)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    held = Store()
    monkeypatch.setattr(liveness, "default_store", lambda: held)
    monkeypatch.setattr(liveness, "in_job", lambda: (0, 1))
    monkeypatch.setattr(liveness.dist, "get_world_size", lambda: 1)
    return held


def test_one_thread_that_ends_does_not_speak_for_another(store: Store) -> None:
    """Both threads of a rank compile: the rank does until the last of them has ended."""
    began, end = threading.Event(), threading.Event()

    def other() -> None:
        with compiling(1.0):
            began.set()
            end.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    assert began.wait(60)
    with compiling(1.0):
        assert Compilations().run()
    assert Compilations().run()
    end.set()
    thread.join(60)
    assert not Compilations().run()


def test_nothing_is_written_without_a_timeout(store: Store) -> None:
    with compiling(None):
        assert not store.held


def test_a_compilation_that_hangs_is_told_from_one_after_the_other(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(liveness.time, "monotonic", lambda: now)
    waiting = Compilations()
    for _ in range(3):  # three, each of which takes almost that long
        with compiling(1.0):
            assert waiting.run()
            now += Compilations.LONGEST - 1
            assert waiting.run()
            assert waiting.hanging() == []
    with compiling(1.0):
        assert waiting.run()
        now += Compilations.LONGEST
        assert not waiting.run()
        assert waiting.hanging() == [0]
    assert waiting.hanging() == []
