"""Processes of one host compile a program once: the first does, the others wait, and load it from Inductor's cache.

rank 0   lock, compile, store, mark, unlock
rank 1   lock ...................... (waits)  unlock, load
rank 2   lock ...................... (waits)  unlock, load

The lock is the operating system's, on a file beside the cache: it is free as soon as its holder ends, however it ends.
With the mark, ranks load side by side; also in the next run. A mark that says too much, as the cache was emptied round
it, costs a second compilation, no more.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch.fx import GraphModule

from gradsync_fx._torch import inductor_cache_dir, inductor_config
from gradsync_fx.disk_cache import note_used


log = logging.getLogger("gradsync_fx")

# Seconds to wait for another process: longer than compilations take, shorter than the time until somebody looks.
PATIENCE = 900.0


@contextmanager
def compile_once(
    module: GraphModule, inputs: list[Any], patches: Mapping[str, Any], patience: float = PATIENCE
) -> Iterator[None]:
    """The block compiles `module`, by Inductor with these patches; no other process of this host does so meanwhile.

    Where another one has done it, the block is held up by nobody: it loads. After `patience` seconds it runs all the
    same: whoever holds the lock is stuck, and the work is done twice.
    """
    if not inductor_config.fx_graph_cache or inductor_config.force_disable_caches:
        yield  # nothing to load from
        return
    folder = Path(inductor_cache_dir(), "gradsync_fx")
    folder.mkdir(parents=True, exist_ok=True)
    name = program_fingerprint(module, inputs, patches)
    mark, lock = folder / f"{name}.done", FileLock(folder / f"{name}.lock", patience)
    try:
        if not mark.exists():
            lock.acquire()
        if mark.exists():
            lock.release()
    except Timeout:
        log.warning(
            "another process of this host has been compiling the same program for %.0f s: compiling it here as well",
            patience,
        )
    try:
        yield
        mark.touch()
        note_used(mark)
    finally:
        lock.release()


def program_fingerprint(module: GraphModule, inputs: list[Any], patches: Mapping[str, Any]) -> str:
    """Equal for equal programs. Two that share one by accident wait for each other, or do not: no more."""
    forms = [
        (v.dtype, v.device, v.shape, v.stride()) if isinstance(v, torch.Tensor) else v
        for v in inputs
    ]
    text = f"{torch.__version__}{module.code}{forms}{sorted(patches.items())}"
    return hashlib.sha256(text.encode()).hexdigest()
