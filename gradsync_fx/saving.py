"""Between the runtime and a state dict: what is gathered from whom, and where it goes back to."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from gradsync_fx.executor import Executor
from gradsync_fx.state import Saved, foreign_state, pack, restore, unpack


def save(executor: Executor) -> dict[str, Any]:
    """The open window of this rank; see `state.pack`."""
    held = executor.accumulators
    executor.saved = executor.window
    saved = Saved(
        executor.window,
        held.sums,
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
    names = set(saved.sums)
    if held.sums and names and names != set(held.sums):
        raise foreign_state(min(names ^ set(held.sums)), list(held.sums))
    if held.sums:
        for name, value in saved.sums.items():
            restore(name, held.sums[name], value)
    else:
        held.restored = dict(saved.sums)
    for part, weight in enumerate(saved.weights):
        if part in held.weights:
            held.weights[part] = weight.clone().to(held.weights[part].device)
    held.in_window = dict.fromkeys(saved.in_window)
    executor.buffers.restore(saved.buffers, saved.buffers_wait, saved.own_buffers)
    executor.window, executor.sync_gradients = saved.window, False
    executor.saved = saved.window


def _place(executor: Executor) -> tuple[int, int]:
    if executor.captures:
        setting = executor.captures[0].setting
        return setting.rank, setting.world
    group = executor.options.process_group
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    return 0, 1
