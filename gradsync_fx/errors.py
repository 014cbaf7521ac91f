"""Every error and warning of the package; each names culprit, seen, wanted, and what to do."""

from __future__ import annotations

from typing import Any


class GradSyncError(Exception):
    """Base of all errors raised by gradsync_fx.

    The message is composed from `culprit` (parameter, node, or ``file:line`` of the user's code), what was `seen`,
    what was `wanted`, and the way out (`fix`); all four stay readable as attributes.
    """

    def __init__(self, culprit: str, *, seen: str, wanted: str = "", fix: str = "") -> None:
        self.culprit, self.seen, self.wanted, self.fix = culprit, seen, wanted, fix
        text = f"{culprit}: {seen}"
        if wanted:
            text += f"\n  wanted: {wanted}"
        if fix:
            text += f"\n  what to do: {fix}"
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception would call the class with the whole message; process pools and copy.copy need the four parts.
        parts = {"seen": self.seen, "wanted": self.wanted, "fix": self.fix}
        return _made_again, (type(self), self.culprit, parts), self.__dict__


def _made_again(kind: type[GradSyncError], culprit: str, parts: dict[str, str]) -> GradSyncError:
    made = kind.__new__(kind, culprit)
    GradSyncError.__init__(made, culprit, **parts)  # a subclass may take other arguments
    return made


class OptionError(GradSyncError, ValueError):
    """An argument is unknown or has a value that is not legal."""


class VersionError(GradSyncError):
    """The installed torch lies outside the tested range, or lacks a private name that is needed."""


class ToolchainError(GradSyncError):
    """A compiler that the code of a target takes is not installed, or too old."""


class CaptureError(GradSyncError):
    """The step cannot be traced whole."""


class NoOptimizerError(CaptureError):
    """The step never reaches an optimizer."""


class NoBackwardError(CaptureError):
    """The step never calls backward."""


class NoGradientError(CaptureError):
    """Backward runs, and no parameter of the step ever receives a gradient."""


class ForeignParameterError(CaptureError):
    """An optimizer holds a parameter that no module of the step holds."""


class ParallelismError(CaptureError):
    """The step is parallel in another way than by data: sharded parameters, pipelines, sharded optimizers."""


class UpdateError(CaptureError):
    """The optimizer's update can neither be traced nor run as it is."""


class ShareError(UpdateError):
    """The optimizer's update cannot be divided among the ranks."""


class LeftOutError(GradSyncError):
    """A call that cannot be traced, and so runs after the program, touches what the step is made of."""


class ReadBeforeBoundaryError(GradSyncError):
    """A gradient is read before the window closes, in a way that deferral would change."""


class VerificationError(GradSyncError):
    """A program breaks its own specification; a fault of this package, not of the user."""


class WindowError(GradSyncError):
    """A call that the state of the window does not allow."""


class RanksDisagreeError(WindowError):
    """The ranks stand at different positions in the window, or run different programs."""


class RankLostError(RanksDisagreeError):
    """A rank was killed, ended, or did not come within the timeout."""


class ReplicaMismatchError(GradSyncError):
    """The ranks' copies of the model differ at the first call: parameters, buffers, their shapes or values."""


class StateError(GradSyncError):
    """A saved state does not fit this step, or its file cannot be written or read."""


class GradSyncWarning(UserWarning):
    """Class of all warnings of gradsync_fx."""
