"""The error for gradient scalers, shared by captured and eager steps."""

from __future__ import annotations

from gradsync_fx.errors import CaptureError


def refused(what: str) -> CaptureError:
    """The error for an enabled `GradScaler`."""
    return CaptureError(
        what,
        seen="a gradient scaler: its check for infinities decides on the host, in the middle of the update",
        wanted="a step without GradScaler",
        fix="train in bfloat16 (torch.autocast(..., dtype=torch.bfloat16)), which needs no scaler; or scale the loss "
        "by a constant and pass skip_nonfinite=True; GradScaler(enabled=False) may stay",
    )
