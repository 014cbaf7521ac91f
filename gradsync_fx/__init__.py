"""Gradient accumulation under data parallelism, in the compiler: a plain train step in, two programs out.

The command line shows its help without torch, and torch's compiler, which takes seconds to import, is imported with
the first name here that needs it.
"""

import random
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradsync_fx.errors import (
    CaptureError,
    ForeignParameterError,
    GradSyncError,
    GradSyncWarning,
    LeftOutError,
    NoBackwardError,
    NoGradientError,
    NoOptimizerError,
    OptionError,
    ParallelismError,
    RankLostError,
    RanksDisagreeError,
    ReadBeforeBoundaryError,
    ReplicaMismatchError,
    ShareError,
    StateError,
    ToolchainError,
    UpdateError,
    VerificationError,
    VersionError,
    WindowError,
)
from gradsync_fx.version import VERSION


if TYPE_CHECKING:
    from gradsync_fx.api import optimize
    from gradsync_fx.backend import window
    from gradsync_fx.calibration import calibrate
    from gradsync_fx.capture.markers import micro_batch_weight
    from gradsync_fx.eager_loops import diagnose
    from gradsync_fx.explanation import explain
    from gradsync_fx.optimized_step import OptimizedStep
    from gradsync_fx.options import BackendOptions
    from gradsync_fx.runtime.load_planner import WindowLoadPlanner
    from gradsync_fx.runtime.optimizer_shards import OptimizerShards
    from gradsync_fx.update_record import UpdateRecord


__version__ = VERSION

__all__ = [
    "BackendOptions",
    "CaptureError",
    "ForeignParameterError",
    "GradSyncError",
    "GradSyncWarning",
    "LeftOutError",
    "NoBackwardError",
    "NoGradientError",
    "NoOptimizerError",
    "OptimizedStep",
    "OptimizerShards",
    "OptionError",
    "ParallelismError",
    "RankLostError",
    "RanksDisagreeError",
    "ReadBeforeBoundaryError",
    "ReplicaMismatchError",
    "ShareError",
    "StateError",
    "ToolchainError",
    "UpdateError",
    "UpdateRecord",
    "VerificationError",
    "VersionError",
    "WindowError",
    "WindowLoadPlanner",
    "calibrate",
    "diagnose",
    "explain",
    "micro_batch_weight",
    "optimize",
    "window",
]

# Where the names are that are all imported when the first of them is asked for.
_LATE = {
    "BackendOptions": "options",
    "OptimizedStep": "optimized_step",
    "OptimizerShards": "runtime.optimizer_shards",
    "UpdateRecord": "update_record",
    "WindowLoadPlanner": "runtime.load_planner",
    "calibrate": "calibration",
    "diagnose": "eager_loops",
    "explain": "explanation",
    "micro_batch_weight": "capture.markers",
    "optimize": "api",
    "window": "backend",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # What is imported draws random numbers here and there: the user's come out as without it.
    state = random.getstate()
    found = {name: getattr(import_module(f"{__name__}.{at}"), name) for name, at in _LATE.items()}
    random.setstate(state)
    globals().update(found)
    return found[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
