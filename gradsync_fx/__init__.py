"""Gradient accumulation under data parallelism, in the compiler: a plain train step in, two programs out."""

from gradsync_fx.api import optimize
from gradsync_fx.backend import window
from gradsync_fx.calibration import calibrate
from gradsync_fx.capture.markers import micro_batch_weight
from gradsync_fx.diagnose import diagnose
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
from gradsync_fx.explanation import explain
from gradsync_fx.optimized_step import OptimizedStep
from gradsync_fx.options import BackendOptions
from gradsync_fx.runtime.optimizer_shards import OptimizerShards
from gradsync_fx.version import VERSION


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
    "VerificationError",
    "VersionError",
    "WindowError",
    "calibrate",
    "diagnose",
    "explain",
    "micro_batch_weight",
    "optimize",
    "window",
]
