"""A process that makes code for GPUs: takes a job's name and arguments, answers with its result or error; all pickled.

    python -m tests.cross.worker compile      JOBS["compile"]: code is made, down to the cubin
    python -m tests.cross.worker interpret    JOBS["interpret"]: made code runs in Triton's interpreter

They are two: Triton compiles in a process or interprets in it. Both stay for a session: importing takes seconds.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import sys
import traceback
import warnings
from typing import Any


# Of each kind of process, what it can be asked for.
JOBS = {
    "compile": {
        "lower": "tests.cross.lowered",
        "record": "tests.cross.replays",
        "watch": "tests.cross.waits",
    },
    "interpret": {"compare": "tests.cross.interpret", "replay": "tests.cross.replays"},
}


def main(kind: str) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what compilers print is no answer
    warnings.simplefilter("ignore")
    if kind == "interpret":
        os.environ["TRITON_INTERPRET"] = "1"
    while True:
        try:
            job, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            os._exit(0)  # taking down all that was made would take seconds
        try:
            answer = done(kind, job, arguments)
        except Exception:
            answer = traceback.format_exc()
        pickle.dump(answer, answers)
        answers.flush()


def done(kind: str, job: str, arguments: tuple[Any, ...]) -> Any:
    work = getattr(importlib.import_module(JOBS[kind][job]), job)
    gc.collect()
    gc.disable()  # thousands of nodes live until a job ends: it would look through all of them, again and again
    try:
        return work(*arguments)
    finally:
        gc.enable()


if __name__ == "__main__":
    main(sys.argv[1])
