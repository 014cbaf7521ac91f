"""Refuses sparse gradients (embeddings with `sparse=True`) by parameter: no trace holds them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from gradsync_fx.capture.trace_state import observed, real_tensors, refuse


_EMBEDDINGS = (F.embedding, F.embedding_bag)


def refuse_sparse(tx: Any, leaves: Sequence[Any]) -> None:
    """Ends the trace where a backward to these leaves (Dynamo's variables) would give one a sparse gradient."""
    weights = {leaf.as_proxy().node: leaf for leaf in leaves}
    for node in tx.output.graph.nodes:
        if node.op == "call_function" and node.target in _EMBEDDINGS:
            given = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments
            weight = given["weight"]
            if given.get("sparse") and isinstance(weight, Node) and weight in weights:
                real = next((t for t, var in real_tensors(tx) if var is weights[weight]), None)
                refuse(
                    tx,
                    f"parameter {_name(real)!r}",
                    seen="its gradient is sparse (an embedding with sparse=True)",
                    wanted="dense gradients: what is summed over a window and reduced over ranks is dense",
                    fix="pass sparse=False to the embedding, and use an optimizer of dense gradients; or pass "
                    'on_unsupported="eager", which makes gradients dense',
                )


def _name(real: torch.Tensor | None) -> str:
    for _, root in observed().roots():
        for name, parameter in root.named_parameters():
            if parameter is real:
                return name
    return "of an embedding"
