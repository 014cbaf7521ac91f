"""Saves and loads a window: gathers the runtime's state into a state dict or file, and puts it back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradsync_fx.comm.liveness import in_job
from gradsync_fx.errors import StateError
from gradsync_fx.runtime.atomic_files import FilePath, read_data, write_data
from gradsync_fx.runtime.consistency import MEETING, SUMS, UPDATE
from gradsync_fx.runtime.executor import Executor
from gradsync_fx.runtime.state_format import Saved, check_fits, foreign_state, pack, unpack


def save(executor: Executor) -> dict[str, Any]:
    """The open window of this rank; see `state.pack`. Raises `WindowError` where it is void."""
    executor.integrity.check("state_dict", allowed=MEETING)
    executor.settle_all()
    held = executor.accumulators
    held.fold()
    executor.saved = executor.window
    saved = Saved(
        executor.window,
        {**held.sums, **held.restored},  # loaded ones wait for the first call
        list(held.weights.values()),
        list(held.read_in_window()),
        executor.buffers.own(),
        executor.buffers.fetched,
        executor.buffers.waiting,
    )
    return pack(saved, list(executor.options.steps), *_place(executor))


def load(executor: Executor, given: Any) -> None:
    """Takes what `save` gave. Raises `StateError` where it does not fit; nothing is changed then."""
    executor.integrity.check("load_state_dict", allowed=SUMS | UPDATE)
    executor.settle_all()
    setting = executor.setting
    ignored = setting.ignored if setting is not None else ()
    saved = unpack(given, *_place(executor), executor.options, ignored)
    held = executor.accumulators
    steps = executor.catalogue.steps
    known = {n: p for step in reversed(steps) for n, p in step.objects.parameters.items()}
    for name, value in saved.sums.items():
        if name in held.sums:
            check_fits(name, held.sums[name], value)
        elif steps and name not in known:
            raise foreign_state(name, sorted(known))
    for name in saved.in_window:
        if name not in saved.sums:
            raise foreign_state(name, sorted(saved.sums))
    executor.integrity.writes(updates=True)
    held.replace(saved.sums, known, executor.options)
    for part, weight in enumerate(saved.weights):
        if part in held.weights:
            held.weights[part] = weight.clone().to(held.weights[part].device)
    held.restore_in_window(saved.in_window)
    executor.buffers.restore(saved.buffers, saved.buffers_wait, saved.own_buffers)
    executor.window, executor.sync_gradients = saved.window, False
    executor.saved = saved.window
    if executor.watch is not None:
        executor.watch.discarded()
    executor.integrity.over()


def save_file(executor: Executor, path: FilePath, states: dict[str, Any]) -> None:
    """The window and further states in one file; see `files.write_data`."""
    before = executor.saved
    try:
        write_data(path, {"window": save(executor), "states": states})
    except BaseException:
        executor.saved = before
        raise


def load_files(executor: Executor, paths: Sequence[FilePath]) -> dict[str, Any]:
    """Takes the window from the files of all ranks, in order, and gives back this rank's further states.

    Those of rank 0, where there were fewer ranks.
    """
    found = [_read(path) for path in paths]
    whole: dict[str, Any] = {}
    for path, one in zip(paths, found, strict=True):
        window = one["window"]
        for key, value in window.items():
            if isinstance(value, int) and whole.get(key, value) != value:
                raise StateError(
                    f"file {str(path)!r}",
                    seen=f"{key} is {value}, and {whole[key]} in {str(paths[0])!r}",
                    wanted="files that were saved at one point in time",
                    fix="give the files of all ranks of one save",
                )
        whole |= window
    load(executor, whole)
    rank, _ = _place(executor)
    return dict(found[rank if rank < len(found) else 0]["states"])


def load_file(executor: Executor, path: FilePath) -> dict[str, Any]:
    """Takes the window from a file of `save_file`, and gives back the further states."""
    found = _read(path)
    load(executor, found["window"])
    return dict(found["states"])


def _read(path: FilePath) -> dict[str, Any]:
    found = read_data(path)
    if not isinstance(found, dict) or set(found) != {"window", "states"}:
        keys = sorted(map(str, found)) if isinstance(found, dict) else type(found).__name__
        raise StateError(
            f"file {str(path)!r}",
            seen=f"it holds {keys}",
            wanted="a file of step.save(path, ...)",
            fix="load it with torch.load, and the window in it with step.load_state_dict",
        )
    return found


def _place(executor: Executor) -> tuple[int, int]:
    setting = executor.setting
    if setting is not None:
        return setting.rank, setting.world
    return in_job(executor.options.process_group) or (0, 1)
