"""Runs a job in a copy of this process, so that nothing of what it changes remains: neither on success nor on errors.

job() -> answer     in a fork, with all objects of this process as they are; the answer comes back pickled, as do
                    an error, which is raised here, and warnings of this package, which are given here
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from gradsync_fx.errors import GradSyncError, GradSyncWarning


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Answer:
    """value: pickled, of the job or its error. trace: of the error, as text. warned: what `warn_explicit` takes."""

    value: bytes
    trace: str
    warned: tuple[tuple[Any, ...], ...]


def apart(job: Callable[[], T], culprit: str) -> T:
    """The job's answer. Raises what the job raises, and `GradSyncError` where its process dies."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or both write what is still held
    context: Any = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(job, sender))
    child.start()
    sender.close()
    try:
        answer: _Answer = receiver.recv()
    except EOFError:
        child.join()
        raise GradSyncError(
            culprit,
            seen=f"the process that makes the code ended with status {child.exitcode}",
            wanted="an answer from it",
            fix="where it was killed, memory may be short: give it a smaller model, or one on the meta device",
        ) from None
    finally:
        receiver.close()
        if child.is_alive() and sys.exc_info()[0] is not None:
            child.kill()
        child.join()
    for message, category, file, line in answer.warned:
        warnings.warn_explicit(message, category, file, line)
    value: Any = pickle.loads(answer.value)
    if not answer.trace:
        return value
    value.add_note(f"In the process that makes the code:\n{answer.trace}")
    raise value


def _child(job: Callable[[], Any], sender: Connection) -> None:
    torch.set_num_threads(1)  # of OpenMP's threads a fork has none
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")  # advice of torch's on this machine
        warnings.filterwarnings("always", category=GradSyncWarning)
        try:
            value, trace = job(), ""
        except Exception as error:
            value, trace = error, traceback.format_exc()
    warned = [(str(w.message), w.category, w.filename, w.lineno) for w in caught]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    sender.send(_Answer(_pickled(value, trace), trace, tuple(warned)))


def _pickled(value: Any, trace: str) -> bytes:
    try:
        pickled = pickle.dumps(value)
        pickle.loads(pickled)
    except Exception:
        if not trace:
            raise
        return pickle.dumps(RuntimeError(f"{type(value).__name__}: {value}"))
    return pickled
