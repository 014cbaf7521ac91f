"""A process that makes code for GPUs: takes pickled arguments, answers with what its job returns, or its error.

    python -m tests.cross.worker lower      a `Case` -> its programs as code for a GPU
    python -m tests.cross.worker compare    a `Case` and that code -> how far its values are from the CPU's

They are two: Triton compiles in a process or interprets in it.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any


def job(name: str) -> Callable[..., Any]:
    """Imports torch and Triton, as this job wants them."""
    if name == "compare":
        os.environ["TRITON_INTERPRET"] = "1"
        from tests.cross.interpret import compare

        return compare
    from tests.cross.lowered import lower

    return lower


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what compilers print is no answer
    warnings.simplefilter("ignore")
    work = job(sys.argv[1])
    while True:
        try:
            arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = work(*arguments)
        except Exception:
            answer = traceback.format_exc()
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
