"""The counter: pure values."""

from __future__ import annotations

import pytest

from gradsync_fx.window import WindowState


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_every_kth_call_closes(k: int) -> None:
    state, closing = WindowState(), []
    for _ in range(3 * k):
        closes = state.closes(k)
        closing.append(closes)
        state = state.accumulated()
        if closes:
            state = state.closed(updated=True)
    assert closing == ([False] * (k - 1) + [True]) * 3
    assert state == WindowState(micro_step=3 * k, optimizer_step=3)


def test_a_skipped_slot_is_a_slot_without_a_term() -> None:
    state = WindowState().accumulated().skipped()
    assert (state.micro_step, state.pending, state.summed) == (2, 2, 1)


def test_a_window_without_update_counts_no_update() -> None:
    state = WindowState().accumulated().closed(updated=False)
    assert state == WindowState(micro_step=1)


def test_a_state_is_a_value() -> None:
    state = WindowState()
    with pytest.raises(AttributeError):
        state.pending = 1  # type: ignore[misc]
    assert state == WindowState()
