"""Entries on disk: bounded, whole whoever writes beside, and never in the way."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from gradsync_fx import disk_cache
from gradsync_fx.disk_cache import clear_entries, held_entries, key_of, read_entry, write_entry


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "gradsync_fx" / "graphs"


def test_what_was_written_is_read() -> None:
    data = {"a": [1, 2.5, None, True, "b"]}
    write_entry(key_of("x"), data)
    assert read_entry(key_of("x")) == data
    assert read_entry(key_of("y")) is None
    assert held_entries()[0] == 1
    assert clear_entries() == 1
    assert held_entries() == (0, 0)


def test_keys_tell_their_parts_apart() -> None:
    assert key_of("a", "b") != key_of("ab", "")


def test_the_one_that_was_not_used_for_longest_goes_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [key_of(i) for i in range(4)]
    for age, key in enumerate(keys[:3]):
        write_entry(key, [0])
        os.utime(folder / key, (1000 + age, 1000 + age))
    assert read_entry(keys[0]) == [0]  # which is a use
    monkeypatch.setattr(disk_cache, "LIMIT", 3 * held_entries()[1] // 3)
    write_entry(keys[3], [0])
    assert {path.name for path in folder.iterdir()} == {keys[0], keys[2], keys[3]}


def test_the_entry_that_was_just_written_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "LIMIT", 1)
    write_entry(key_of("x"), [0])
    assert read_entry(key_of("x")) == [0]


def test_many_writers_leave_one_whole_entry(caplog: pytest.LogCaptureFixture) -> None:
    key, data = key_of("x"), list(range(20_000))

    def write() -> None:
        for _ in range(20):
            write_entry(key, data)

    write_entry(key, data)
    writers = [threading.Thread(target=write) for _ in range(4)]
    with caplog.at_level(logging.INFO, "gradsync_fx"):
        for thread in writers:
            thread.start()
        while any(thread.is_alive() for thread in writers):
            assert read_entry(key) == data
        for thread in writers:
            thread.join()
    assert caplog.records == []
    assert held_entries()[0] == 1


def test_a_folder_that_cannot_be_written_to_keeps_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "gradsync_fx").write_text("a file")
    with caplog.at_level(logging.INFO, "gradsync_fx"):
        write_entry(key_of("x"), [0])
    (record,) = caplog.records
    assert "nothing is kept for later processes" in record.getMessage()
    assert held_entries() == (0, 0)
    assert clear_entries() == 0
