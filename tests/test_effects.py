"""Every row of docs/effects.md, tried: accumulate, boundary and tail, on one rank and two, captured and eagerly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gradsync_fx
from gradsync_fx.capture.effects import EFFECTS, Rule
from tests.effects import TRIED
from tests.scenarios.effects import each_alone, together, with_effects
from tests.workers import Ranks


RIGHT = [t.name for t in TRIED if t.effect.rule not in (Rule.EAGERLY, Rule.REFUSED)]
EAGERLY = [t.name for t in TRIED if t.effect.rule is Rule.EAGERLY]
APART = ["gradients that are values", "update that no trace sees", "hook of the update"]
SEEDED = ["random numbers of forward", "noise in gradients"]  # Inductor draws by another scheme
# One step with several effects at once. Gradients that are values, and what replaces the optimizer, exclude others.
TOGETHER = [
    [n for n in RIGHT if n not in (*SEEDED, *APART, "gradient of an input", "renormed embedding")],
    ["renormed embedding", "gradients that are values", "update that no trace sees", "scheduler"],
]
PAGE = Path(__file__).parent.parent / "docs" / "effects.md"
INTRODUCTION = """# What becomes of a step's effects

A step is written as if each call were a whole batch. In a window of k calls each of its effects happens by one of these
rules. The table is gradsync_fx/capture/effects.py; each row is a test: in calls that accumulate, at the boundary and
at the end of a window without data (`flush`, `skip`), on one rank and on two, captured and run eagerly.
"""
REFUSED = [t.name for t in TRIED if t.effect.rule is Rule.REFUSED]


def test_each_row_has_its_code() -> None:
    assert [t.name for t in TRIED] == [effect.name for effect in EFFECTS]


@pytest.mark.captured
@pytest.mark.parametrize("name", RIGHT)
def test_captured(name: str) -> None:
    with_effects(0, [name])


@pytest.mark.parametrize("name", [n for n in RIGHT if n != "number of the update"])
def test_eagerly(name: str) -> None:
    with_effects(0, [name], eager=True)


def test_a_number_of_the_update_is_refused_eagerly() -> None:
    with pytest.raises(gradsync_fx.CaptureError, match=r"effects\.py:\d+"):
        with_effects(0, ["number of the update"], eager=True)


@pytest.mark.captured
@pytest.mark.parametrize("name", EAGERLY)
def test_what_no_program_holds(name: str) -> None:
    with pytest.raises(gradsync_fx.CaptureError, match=r"effects\.py:\d+"):
        with_effects(0, [name])
    with_effects(0, [name], on_unsupported="eager")


@pytest.mark.captured
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("mode", ["error", "eager"])
def test_what_is_refused(name: str, mode: str) -> None:
    with pytest.raises(gradsync_fx.GradSyncError):
        with_effects(0, [name], on_unsupported=mode)


def same_on_both(found: list[dict[str, Any]]) -> None:
    first, other = (f["parameters"] for f in found)
    for p, q in zip(first, other, strict=True):
        assert torch.equal(p, q)


@pytest.mark.gloo
@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eagerly"])
def test_two_ranks(ranks: Ranks, eager: bool) -> None:
    """Row by row; parameters that are written from each rank's data differ, as in plain PyTorch."""
    names = [n for n in RIGHT if not (eager and n == "number of the update")]
    for found in zip(*ranks(each_alone, names, eager), strict=True):
        same_on_both(list(found))


@pytest.mark.gloo
@pytest.mark.inductor
@pytest.mark.parametrize("names", TOGETHER, ids=["first", "second"])
def test_two_ranks_compiled(ranks: Ranks, names: list[str]) -> None:
    same_on_both(ranks(together, names))


def test_the_page() -> None:
    """docs/effects.md is made from the table: `python -m tests.test_effects` writes it."""
    assert PAGE.read_text(encoding="utf-8") == page()


def page() -> str:
    kinds = {
        Rule.EVERY_CALL: "What depends on the call's data: the k micro-steps of a window each have theirs.",
        Rule.PER_UPDATE: "What depends on gradients or on updated parameters, what a parameter becomes of itself "
        "alone, and counts that only such effects read.",
        Rule.PER_WINDOW: "What takes gradients away.",
        Rule.AFTER: "Calls that touch nothing that is computed with: after the program, on every call, with its "
        "numbers.",
        Rule.EAGERLY: 'What no program can hold: refused with its line, or, with `on_unsupported="eager"`, the step '
        "runs in the same windows without being compiled, with the rules above.",
        Rule.REFUSED: "By name, either way.",
    }
    lines = [INTRODUCTION]
    for rule, text in kinds.items():
        lines += [
            f"## {rule.value.capitalize()}",
            "",
            text,
            "",
            "| effect | for example | note |",
            "|---|---|---|",
        ]
        lines += [f"| {e.name} | {e.example} | {e.note} |" for e in EFFECTS if e.rule is rule]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
