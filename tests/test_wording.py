"""One thing is one thing, wherever a message counts."""

from __future__ import annotations

import re
from pathlib import Path

from gradsync_fx.wording import name_of, number_of


PACKAGE = Path(__file__).resolve().parent.parent / "gradsync_fx"
# A number of things, put into a text: `{n} ranks`, `{len(x)} pending micro-steps`. After one of these words there is
# never one of them: an update after every k, where k is above 1, or a reason that needs two things.
COUNT = re.compile(
    r"\{(?P<number>[^{}]+)\} (?:[\w-]+ )?(?:ranks|micro-steps|parameters|updates|calls|programs|collectives|gradients"
    r"|windows|modules|optimizers|tensors|processes|groups|inputs|slots|lines|nodes|buckets)\b"
)


def test_counted() -> None:
    assert number_of(1, "rank") == "1 rank"
    assert number_of(8, "rank") == "8 ranks"
    assert number_of(0, "micro-step") == "0 micro-steps"
    assert number_of(12_000, "node") == "12,000 nodes"
    assert number_of(2, "box", "boxes") == "2 boxes"


def test_no_message_counts_by_itself() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {match[0]}"
        for path in sorted(PACKAGE.glob("**/*.py"))
        for match in COUNT.finditer(path.read_text())
        if match["number"] not in MORE_THAN_ONE
    ]
    assert found == []


# Numbers that are at least two where they are said.
MORE_THAN_ONE = {
    "len(options.steps)",  # windows side by side
    "len(groups)",  # process groups of one step, where several are refused
    "len(ddps)",  # the modules that have them
    "2 * micro_steps",
    "2 * loop.k",
    "what",  # a text
    "loop.world",  # where a reduction is missing
}


def test_name_of() -> None:
    class Trainer:
        def __call__(self) -> None: ...

        def fit(self) -> None: ...

    assert name_of(test_name_of) == "test_name_of"
    assert name_of(Trainer().fit) == "fit"
    assert name_of(Trainer()) == "Trainer"
