"""Whose line it was: the nearest frame of the user's own code, below torch, us and libraries that wrap both."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType

import torch


# They call training code or torch in the user's name, so a line of theirs tells the user nothing.
_WRAPPERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")


def is_users(file: str) -> bool:
    """Whether a source file is the user's: not torch's, ours, the standard library's, or a wrapping library's."""
    if file.startswith(("<frozen", "<eval_with_key")) or file.startswith(_LIBRARIES):
        return False
    _, installed, path = file.rpartition(f"{os.sep}site-packages{os.sep}")
    if installed:
        return path.split(os.sep)[0] not in _WRAPPERS
    return not file.startswith(_STANDARD)


def warn_user(message: str, category: type[Warning]) -> None:
    """`warnings.warn` at the user's line, however many calls of libraries are between."""
    warnings.warn(message, category, stacklevel=len(up_to_users()))


def up_to_users() -> list[FrameType]:
    """The calling frame, the one that called it, and so on to the nearest of the user's; all, where none is."""
    frame = sys._getframe(1)
    found = [frame]
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
        found.append(frame)
    return found


def _folder(file: str | None) -> str:
    return os.path.join(os.path.dirname(os.path.abspath(file or "")), "")


_LIBRARIES = (_folder(torch.__file__), _folder(__file__))
_STANDARD = _folder(os.__file__)
