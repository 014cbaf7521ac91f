"""Between the runtime and a state dict: what is gathered from whom, and where it goes back to."""

from __future__ import annotations

from typing import Any

from gradsync_fx.executor import Executor
from gradsync_fx.presence import in_job
from gradsync_fx.state import Saved, check_fits, foreign_state, pack, unpack


def save(executor: Executor) -> dict[str, Any]:
    """The open window of this rank; see `state.pack`."""
    held = executor.accumulators
    executor.saved = executor.window
    saved = Saved(
        executor.window,
        {**held.sums, **held.restored},  # loaded ones wait for the first call
        list(held.weights.values()),
        list(held.in_window),
        executor.buffers.own(),
        executor.buffers.fetched,
        executor.buffers.waiting,
    )
    return pack(saved, list(executor.options.steps), *_place(executor))


def load(executor: Executor, given: Any) -> None:
    """Takes what `save` gave. Raises `StateError` where it does not fit; nothing is changed then."""
    saved = unpack(given, list(executor.options.steps), *_place(executor))
    held = executor.accumulators
    steps = executor.catalogue.steps
    known = {name for step in steps for name in step.capture.parameters}
    for name, value in saved.sums.items():
        if name in held.sums:
            check_fits(name, held.sums[name], value)
        elif steps and name not in known:
            raise foreign_state(name, sorted(known))
    held.replace(saved.sums, steps)
    for part, weight in enumerate(saved.weights):
        if part in held.weights:
            held.weights[part] = weight.clone().to(held.weights[part].device)
    held.in_window = dict.fromkeys(saved.in_window)
    executor.buffers.restore(saved.buffers, saved.buffers_wait, saved.own_buffers)
    executor.window, executor.sync_gradients = saved.window, False
    executor.saved = saved.window


def _place(executor: Executor) -> tuple[int, int]:
    setting = executor.setting
    if setting is not None:
        return setting.rank, setting.world
    return in_job(executor.options.process_group) or (0, 1)
