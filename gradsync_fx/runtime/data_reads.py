"""Who could have written a tensor without changing its version: by its `.data`, or as another look at its memory.

`torch.Tensor.data` is a property of ours as long as somebody watches a tensor, and torch's own again afterwards.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from gradsync_fx._torch import users_of_memory


class DataReads:
    """Counts how often `.data` of each watched tensor was asked for: what was handed out may be written at any time."""

    def __init__(self) -> None:
        self._watchers: Counter[int] = Counter()
        self._reads: Counter[int] = Counter()

    def watch(self, watcher: object, tensors: Iterable[torch.Tensor]) -> None:
        """As long as `watcher` lives."""
        ids = [id(t) for t in tensors]
        if not self._watchers:
            self._install()
        self._watchers.update(ids)
        weakref.finalize(watcher, self._leave, ids)

    def of(self, tensor: torch.Tensor) -> int:
        """How often it was asked for while it was watched."""
        return self._reads[id(tensor)]

    def _install(self) -> None:
        torchs: Any = torch.Tensor.data

        def read(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in self._watchers:
                self._reads[id(tensor)] += 1
            found: torch.Tensor = torchs.__get__(tensor)
            return found

        torch.Tensor.data = property(read, torchs.__set__)  # type: ignore[assignment]

    def _leave(self, ids: list[int]) -> None:
        self._watchers.subtract(ids)
        for gone in [i for i in ids if not self._watchers[i]]:
            self._watchers.pop(gone, None)
            self._reads.pop(gone, None)
        if not self._watchers:
            del torch.Tensor.data


DATA_READS = DataReads()


def unread(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal at two times only where nothing can have written a watched tensor between them.

    With another look at its memory around it is never equal to anything.
    """
    if users_of_memory(tensor) > 1:
        return (object(),)
    return tensor.data_ptr(), tensor._version, DATA_READS.of(tensor)
