"""The tables of docs/gpus.md, of programs as code for GPUs: what was made of each, and what each optimization is worth.

python -m tests.cross.table [models]      as Markdown on stdout, by default of all four; takes some minutes
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace

from tests.cross.cases import TARGETS, Case
from tests.cross.lowered import lower
from tests.cross.results import Lowered


MODELS = ("mlp", "gpt", "bert", "resnet")
LEFT_OUT = ("in_place", "products", "updates", "overlap")
# Small, and yet of both kinds: with and without attention.
COMPARED = {"mlp": Case("mlp", tail=False), "gpt": Case("gpt", blocks=2, tail=False)}
Row = tuple[object, ...]


def made(models: Iterable[str], targets: Iterable[str] = TARGETS) -> Iterator[Row]:
    """One row for each program of each model on each target, after the titles."""
    yield (
        "model", "target", "program", "Triton kernels", "cubins", "launches", "of libraries", "CUDA graph",
    )  # fmt: skip
    for model in models:
        for target in targets:
            for program in lower(Case(model, target=target)).values():
                yield model, target, program.program, *counted(program)


def counted(program: Lowered) -> Row:
    """Kernels, cubins of them, launches of a call, those that are a library's, and what torch can record."""
    kernels = {*program.kernels}
    cubins = {name for name, _, size in program.binaries if size}
    library = len(program.of("extern"))
    return (
        len(kernels), len(cubins), program.launches, library, program.recording.verdict,
    )  # fmt: skip


def without_each(models: Iterable[str]) -> Iterator[Row]:
    """With all optimizations, without each of them, and without any, after the titles."""
    yield "model", "program", "optimizations", "launches", "temporaries", "copies", "fills"
    for model in models:
        case = COMPARED[model]
        ways = {"all": (), **{f"without {n}": (n,) for n in LEFT_OUT}, "none": LEFT_OUT}
        for way, left_out in ways.items():
            for program in lower(replace(case, without=left_out)).values():
                copies, fills = len(program.of("copy")), len(program.of("fill"))
                yield (
                    model,
                    program.program,
                    way,
                    program.launches,
                    temporaries(program),
                    copies,
                    fills,
                )


def temporaries(program: Lowered) -> int:
    """Buffers that a program makes for itself in a call."""
    return program.source.count("= empty_strided_cuda(")


def lines(rows: Iterator[Row]) -> Iterator[str]:
    titles = next(rows)
    yield f"| {' | '.join(map(str, titles))} |"
    yield "|" + "---|" * len(titles)
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def main() -> None:
    warnings.simplefilter("ignore")
    models = sys.argv[1:] or MODELS
    for rows in (without_each(m for m in models if m in COMPARED), made(models)):
        for line in lines(rows):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
        sys.stdout.write("\n")


if __name__ == "__main__":
    main()
