"""The tables of docs/gpus.md, of programs as code for GPUs: what was made of each, and what each optimization is worth.

python -m tests.cross.table      writes them anew; takes some minutes
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from tests.cross.cases import MICRO_STEPS, TARGETS, Case, plain
from tests.cross.moved import fewest, moved
from tests.cross.results import Lowered


PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "gpus.md"
TABLES = re.compile(r"(?<=<!-- tables -->\n).*?(?=<!-- end of tables -->)", re.DOTALL)
MODELS = ("mlp", "gpt", "bert", "resnet")
LEFT_OUT = ("in_place", "products", "updates", "overlap")
# Small, and yet of both kinds: with and without attention.
COMPARED = {
    "mlp": Case("mlp", programs=MICRO_STEPS),
    "gpt": Case("gpt", blocks=2, programs=MICRO_STEPS),
}
Lower = Callable[[Case], dict[str, Lowered]]
Row = tuple[object, ...]


def made(model: str, lower: Lower) -> Iterator[Row]:
    """One row for each program of a model, or for each target where they differ."""
    programs = {target: lower(plain(model, target)) for target in TARGETS}
    for name in programs[TARGETS[0]]:
        rows = {target: counted(found[name]) for target, found in programs.items()}
        for row in dict.fromkeys(rows.values()):
            alike = ", ".join(target for target, other in rows.items() if other == row)
            yield model, alike, name, *row


def counted(program: Lowered) -> Row:
    """Kernels, cubins of them, launches of a call, those that are a library's, and what torch can record."""
    cubins = {name for name, _, size in program.binaries if size}
    library = len(program.of("extern"))
    kernels = len({*program.kernels})
    return kernels, len(cubins), program.launches, library, program.recording.verdict


def without_each(model: str, lower: Lower) -> Iterator[Row]:
    """With all optimizations, without each of them, and without any."""
    ways = {"all": (), **{f"without `{n}`": (n,) for n in LEFT_OUT}, "none": LEFT_OUT}
    found = {way: lower(replace(COMPARED[model], without=names)) for way, names in ways.items()}
    for name in found["all"]:
        for way, programs in found.items():
            program = programs[name]
            copies, fills = len(program.of("copy")), len(program.of("fill"))
            temporaries = program.source.count("= empty_strided_cuda(")  # in a call
            bytes_moved = f"{moved(program):.1f}", f"{fewest(program):.1f}"
            yield model, name, way, program.launches, temporaries, copies, fills, *bytes_moved


def table(titles: str, rows: Iterable[Row]) -> str:
    """In Markdown."""
    names = titles.split(", ")
    lines = [names, ["---"] * len(names), *(map(str, row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def tables(lower: Lower) -> str:
    kernels = table(
        "model, target, program, Triton kernels, cubins, launches, of libraries, CUDA graph",
        (row for model in MODELS for row in made(model, lower)),
    )
    compared = table(
        "model, program, optimizations, launches, temporaries, copies, fills, bytes, at least",
        (row for model in COMPARED for row in without_each(model, lower)),
    )
    return f"""
Small models (an MLP of three layers, a GPT of one block, one layer of BERT, two blocks of a ResNet), AdamW, float32,
k = 4, eight ranks, buckets of 0.05 MB. Launches are of one call; a library's call may be several kernels on a card.

{kernels}
With the optimizations, and without; for sm_90, the GPT with two blocks. `overlap` changes the order, not the number of
launches; in a GPT more buffers are alive for it. Bytes are those that kernels read and write, for each element of a
parameter, of sums, gradients with a tensor of their own, parameters that are updated, and states; at least: each sum is
read and written for a micro-step, and each sum, parameter and state for an update. The gradient of an embedding counts
three times, whole: it is filled with zeros, rows of the batch are added to it, and it is read.

{compared}
"""


def main() -> None:
    # Makes this process one for code of GPUs.
    from tests.cross.lowered import lower

    def told(case: Case) -> dict[str, Lowered]:
        sys.stderr.write(f"{case} {' '.join(case.without)}\n")
        return lower(case)

    warnings.simplefilter("ignore")
    made_anew = tables(told)
    PAGE.write_text(TABLES.sub(lambda _: made_anew, PAGE.read_text()))


if __name__ == "__main__":
    main()
