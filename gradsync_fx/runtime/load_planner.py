"""`WindowLoadPlanner`: what `torch.distributed.checkpoint` needs to load an open window on another number of ranks.

A checkpoint loads into what is there already. A rank's `step.state_dict()` has its own sums alone: here the sums of all
ranks of the checkpoint join it, and `step.load_state_dict` shares them out (other_ranks.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from gradsync_fx.runtime.other_ranks import ranks_in


class WindowLoadPlanner(DefaultLoadPlanner):
    """As torch's own planner, with the windows of ranks that are there no more. Every rank passes one.

    >>> states = {"model": model, "optimizer": optimizer, "step": step}  # after step.prepare(...)
    >>> dcp.load(states, checkpoint_id=folder, planner=gradsync_fx.WindowLoadPlanner())
    """

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Makes room for what the checkpoint has of each window."""
        saved = {} if metadata is None else metadata.planner_data or {}
        for name, window in state_dict.items():
            if not isinstance(window, dict) or not {"world_size", "optimizer_step"} <= set(window):
                continue
            groups: set[str] = set()
            for key in ranks_in(window):
                own = window.pop(key)
                groups |= {name for name, held in own.items() if isinstance(held, dict)}
            for key, path in saved.items():
                if len(path) > 2 and path[0] == name and ranks_in([str(path[1])]):
                    assert metadata is not None
                    # A group without entries has left no trace in the checkpoint.
                    window.setdefault(path[1], {group: {} for group in groups})
                    _put(window, path[1:], _room(metadata.state_dict_metadata[key]))
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _room(saved: Any) -> Any:
    if isinstance(saved, TensorStorageMetadata):
        return torch.empty(saved.size, dtype=saved.properties.dtype)
    return saved


def _put(holder: dict[str, Any], path: Any, value: Any) -> None:
    *outer, last = path
    for key in outer:
        holder = holder.setdefault(key, {})
    holder[last] = value
