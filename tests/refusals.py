"""Looks at an error of gradsync_fx as a user meets it: its parts, and the text made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import gradsync_fx


def refused(
    kind: type[gradsync_fx.GradSyncError], culprit: str, call: Callable[..., Any], *args: Any
) -> gradsync_fx.GradSyncError:
    """The error of `call(*args)`: of exactly this kind, its culprit as told, its other parts there and in its text."""
    with pytest.raises(kind) as caught:
        call(*args)
    error = caught.value
    assert type(error) is kind
    assert error.culprit
    assert culprit in error.culprit, str(error)
    assert error.seen
    assert error.fix
    assert str(error).startswith(error.culprit)
    assert error.seen in str(error)
    assert error.fix in str(error)
    return error
