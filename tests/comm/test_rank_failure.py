"""The error of a lost rank names what NCCL wrote down, where it did."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradsync_fx.comm import rank_failure
from gradsync_fx.comm.rank_failure import lost


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*rank_failure._RECORDS, *rank_failure._BUFFERS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_nothing_is_said_of_a_record_that_is_not_there() -> None:
    assert lost("gone", "").fix.startswith("see whether a rank was killed")


def test_a_record_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(tmp_path / "trace_"))
    monkeypatch.setattr(rank_failure, "_STARTED", 0.0)
    (tmp_path / "trace_0").write_bytes(b"")
    assert f"flight record in {tmp_path / 'trace_0'}" in lost("gone", "").fix


def test_a_record_of_an_earlier_job_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "trace_"))
    (tmp_path / "trace_0").write_bytes(b"")
    monkeypatch.setattr(rank_failure, "_STARTED", float("inf"))
    assert "flight record" not in lost("gone", "").fix


def test_one_that_is_still_to_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")
    assert "flight record" not in lost("gone", "").fix  # of a job over gloo
    monkeypatch.setattr(rank_failure, "_uses_nccl", lambda: True)
    assert "when its own timeout ends" in lost("gone", "").fix
