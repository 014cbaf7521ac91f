"""What a schema says of memory is what torch does: results of real calls share memory where it says so."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch.fx import Graph

from gradsync_fx.ir.memory import aliased, base_of, viewed, written


aten = torch.ops.aten
X = torch.arange(6.0).view(2, 3)
CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.view.default, (X, [3, 2])),
    (aten.permute.default, (X, [1, 0])),
    (aten.slice.Tensor, (X, 0, 0, 1)),
    (aten.expand.default, (X, [4, 2, 3])),
    (aten.split.Tensor, (X, 1)),
    (aten.unbind.int, (X,)),
    (operator.getitem, ([X, X.clone()], 0)),
    (aten.clone.default, (X,)),
    (aten.add.Tensor, (X, X)),
    (aten.mm.default, (X, X.t())),
    (aten.native_layer_norm.default, (X, [3], None, None, 1e-5)),
    (aten.add_.Tensor, (X, 1)),
    (aten.copy_.default, (X, X + 1)),
]


def storages(value: Any) -> set[int]:
    tensors = value if isinstance(value, list | tuple) else [value]
    return {t.untyped_storage().data_ptr() for t in tensors if isinstance(t, torch.Tensor)}


@pytest.mark.parametrize(("target", "args"), CALLS, ids=lambda v: str(v) if callable(v) else "")
def test_results_share_memory_where_it_says_so(target: Any, args: tuple[Any, ...]) -> None:
    given = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in given]
    result = target(*given)
    index = aliased(target)
    shared = [i for i, a in enumerate(given) if storages(a) & storages(result)]
    assert shared == ([] if index is None else [index])
    changed = tuple(
        i
        for i, (a, b) in enumerate(zip(given, before, strict=True))
        if isinstance(a, torch.Tensor) and not torch.equal(a, b)
    )
    assert written(target) == changed
    assert viewed(target) == (None if changed else index)


def test_the_base_of_a_view_of_a_part() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    parts = graph.call_function(aten.split.Tensor, (x, 1))
    part = graph.call_function(operator.getitem, (parts, 0))
    turned = graph.call_function(aten.permute.default, (part, [1, 0]))
    copied = graph.call_function(aten._to_copy.default, (turned,))
    norm = graph.call_function(aten.native_layer_norm.default, (copied, [1], None, None, 1e-5))
    first = graph.call_function(operator.getitem, (norm, 0))
    assert base_of(turned) is x
    assert base_of(copied) is copied
    assert base_of(copied, {aten._to_copy.default}) is x
    assert base_of(first) is norm
    assert base_of(graph.call_function(operator.getitem, ([x, norm], 0))).target is operator.getitem
