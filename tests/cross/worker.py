"""The process with the guard: takes pickled `Case`s on stdin, and answers with what `lower` made, or with its error."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
import warnings

from tests.cross import guard


def main() -> None:
    guard.load()
    # Kept over runs: what is slow is Triton, and its cache knows a kernel by its source and its target.
    os.environ.setdefault("TRITON_CACHE_DIR", str(guard.cache_folder() / "triton"))
    warnings.simplefilter("ignore")
    from tests.cross.lowered import lower  # after the guard

    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what compilers print is no answer
    while True:
        try:
            case = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = lower(case)
        except Exception:
            answer = traceback.format_exc()
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
