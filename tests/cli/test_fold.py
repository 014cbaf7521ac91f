"""What a diff of two long programs leaves out, and what it never does."""

from __future__ import annotations

import itertools

import torch
from torch import nn

import gradsync_fx
from gradsync_fx.cli.diff import codes, input_names, readable_code
from gradsync_fx.cli.fold import ADDED, CONTEXT, FOLDED, REMOVED, SAME, SHOWN, Row, folded
from tests.drive import plain_step
from tests.models import mlp


def texts(rows: list[Row]) -> list[str]:
    return [f"{row.kind} {(row.right or row.left).strip()}" for row in rows]


def test_unchanged_lines_are_folded_away_from_the_changes() -> None:
    left = [f"a{i} = f(x{i})" for i in range(40)]
    right = [*left[:20], "new = g(y)", *left[20:]]
    found = texts(folded(left, right))
    kept = 2 * CONTEXT
    assert found == [
        f"{FOLDED} ... {20 - CONTEXT} unchanged lines",
        *(f"{SAME} {line}" for line in left[20 - CONTEXT : 20]),
        f"{ADDED} new = g(y)",
        *(f"{SAME} {line}" for line in left[20 : 20 + CONTEXT]),
        f"{FOLDED} ... {20 - CONTEXT} unchanged lines",
    ]
    assert len(found) == kept + 3


def test_what_comes_once_for_each_parameter_is_shown_once() -> None:
    right = list(
        itertools.chain.from_iterable(
            (f"u{i} = adamw(parameter_{i}, g{i})", f"a{i} = u{i}[0]", f"b{i} = u{i}[1]")
            for i in range(24)
        )
    )
    assert texts(folded([], right)) == [
        *(f"{ADDED} {line}" for line in right[:3]),
        f"{FOLDED} ... 69 more lines: these 3, 23 times",
    ]
    removed = [f"c{i} = copy_(accumulator_{i}, s{i})" for i in range(5)]
    (first, rest) = folded(removed, [])
    assert (first.kind, first.left, first.right) == (REMOVED, removed[0], "")
    assert (rest.left.strip(), rest.right) == ("... 4 more lines like this", "")


def test_other_inputs_are_another_line() -> None:
    right = ["a = copy_(parameter_1, x)"] * 3 + ["a = copy_(state_1, x)"] * 3
    assert texts(folded([], right)) == [
        f"{ADDED} {right[0]}",
        f"{FOLDED} ... 2 more lines like this",
        f"{ADDED} {right[3]}",
        f"{FOLDED} ... 2 more lines like this",
    ]


def test_changes_like_those_above_are_counted() -> None:
    left, right = [], []
    for i in range(20):
        unchanged = [f"m{i}_{j} = op{j}(x)" for j in range(10)]
        left += unchanged
        right += [*unchanged, f"r{i} = all_reduce(sum_{i})"]
    right[-1] = "last = all_reduce(sum_last)"
    found = texts(folded(left, right))
    shown = [text for text in found if "all_reduce" in text]
    assert len(shown) == SHOWN + 1
    assert shown[-1] == f"{ADDED} last = all_reduce(sum_last)"
    assert f"among them {20 - SHOWN - 1} more changes like those above" in " ".join(found)


def test_a_change_of_another_kind_is_never_folded() -> None:
    left = [f"a{i} = f(x{i})" for i in range(200)]
    right = list(left)
    for i in range(150, 10, -10):
        right.insert(i, f"d{i} = div(sum_{i})")
    right.insert(75, "odd = div(parameter_1)")
    assert f"{ADDED} odd = div(parameter_1)" in texts(folded(left, right))


def test_a_deep_model_fits_on_some_screens_with_its_all_reduce() -> None:
    deep = nn.Sequential(
        *(layer for _ in range(30) for layer in (nn.Linear(8, 8), nn.ReLU())), mlp()
    )
    optimizer = torch.optim.AdamW(deep.parameters())
    data = torch.randn(4, 8), torch.randn(4, 1)
    report = gradsync_fx.explain(
        plain_step, deep, optimizer, *data, gradient_accumulation_steps=2, world_size=2
    )
    names = input_names(report)
    left, right = (readable_code(code, names).splitlines() for code in codes(report).values())
    assert len(left) + len(right) > 1000
    rows = folded(left, right)
    assert len(rows) < 100
    assert [row for row in rows if row.kind == ADDED and "all_reduce" in row.right]
    assert not [row for row in rows if row.kind != ADDED and "all_reduce" in row.left + row.right]
