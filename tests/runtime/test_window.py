"""The counter: pure values."""

from __future__ import annotations

import pytest

from gradsync_fx.runtime.window import Part, WindowState


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_every_kth_call_closes(k: int) -> None:
    state, closing = WindowState(), []
    for _ in range(3 * k):
        parts = state.closing((k,))
        closing.append(bool(parts))
        state = state.called(summed=True)
        if parts:
            state = state.closed(parts).updated()
    assert closing == ([False] * (k - 1) + [True]) * 3
    assert state == WindowState(micro_step=3 * k, optimizer_step=3)


def test_parts_close_each_at_its_own_k() -> None:
    state, closing = WindowState.fresh(2), []
    for _ in range(6):
        parts = state.closing((1, 3))
        closing.append(sorted(parts))
        state = state.called(summed=True).closed(parts).updated()
    assert closing == [[0], [0], [0, 1]] * 2
    assert state == WindowState(6, 6, (Part(), Part()))


def test_a_skipped_slot_is_a_slot_without_a_term() -> None:
    state = WindowState().called(summed=True).called(summed=False)
    assert (state.micro_step, state.pending, state.parts) == (2, 2, (Part(2, 1),))


def test_a_window_without_update_counts_no_update() -> None:
    state = WindowState().called(summed=True).closed({0})
    assert state == WindowState(micro_step=1)


def test_a_state_is_a_value() -> None:
    state = WindowState()
    with pytest.raises(AttributeError):
        state.micro_step = 1  # type: ignore[misc]
    assert state == WindowState()
