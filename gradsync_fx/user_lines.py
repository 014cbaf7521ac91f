"""Finds the user's line for messages: whose code a frame is (torch's, ours, a library's, the user's).

Every message names the nearest line of the user's own code, below frames of torch, of this package and of libraries
that call both for the user.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable
from types import FrameType

import torch

from gradsync_fx.errors import GradSyncWarning


def _folder(file: str | None) -> str:
    return os.path.join(os.path.dirname(os.path.abspath(file or "")), "")


TORCHS, OURS = _folder(torch.__file__), _folder(__file__)
# File names of frozen modules, and of functions that torch generates from graphs.
_GENERATED = ("<frozen", "<eval_with_key")
_STANDARD = _folder(os.__file__)
_INSTALLED = tuple({sysconfig.get_path(key) for key in ("stdlib", "purelib", "platlib")})
# They call training code or torch for the user, so a line of theirs tells the user nothing.
_WRAPPERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
NOWHERE = "a line that torch did not record"


def is_library(file: str | None) -> bool:
    """Whether a source file belongs to torch, to us, to the standard library or to anything that is installed."""
    return file is None or file.startswith((*_GENERATED, TORCHS, OURS, *_INSTALLED))


def is_users(file: str) -> bool:
    """Whether a line of this file tells the user something: it is the user's, or of a model library, say."""
    if file.startswith((*_GENERATED, TORCHS, OURS)):
        return False
    _, installed, path = file.rpartition(f"{os.sep}site-packages{os.sep}")
    if installed:
        return path.split(os.sep)[0] not in _WRAPPERS
    return not file.startswith(_STANDARD)


def user_line() -> str:
    """`file:line` where the user's code is now."""
    last = up_to_users()[-1]
    file = last.f_code.co_filename
    return f"{file}:{last.f_lineno}" if is_users(file) else NOWHERE


def users_among(lines: Iterable[tuple[str, int | str]]) -> str | None:
    """`file:line` of the last of these lines, outermost first, that is the user's; None where none is."""
    own = [f"{file}:{line}" for file, line in lines if is_users(file)]
    return own[-1] if own else None


def lines_in(text: str) -> list[tuple[str, str]]:
    """File and line of each entry of a printed stack, outermost first."""
    found: list[tuple[str, str]] = re.findall(r'File "([^"]+)", line (\d+)', text)
    return found


def warn_user(message: str, *, otherwise: str = "") -> None:
    """A `GradSyncWarning` at the user's line, however many calls of libraries are between.

    otherwise: `file:line` to name where no code of the user's is running, as at the end of the process.
    """
    frames = up_to_users()
    file, _, line = otherwise.rpartition(":")
    if file and not is_users(frames[-1].f_code.co_filename):
        warnings.warn_explicit(message, GradSyncWarning, file, int(line))
    else:
        warnings.warn(message, GradSyncWarning, stacklevel=len(frames))


def up_to_users() -> list[FrameType]:
    """The calling frame, the one that called it, and so on to the nearest of the user's; all, where none is."""
    frame = sys._getframe(1)
    found = [frame]
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
        found.append(frame)
    return found
