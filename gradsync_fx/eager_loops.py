"""`diagnose`: finds mistakes in eager training loops that accumulate gradients without `optimize`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from gradsync_fx.diagnosis.findings import Diagnosis
from gradsync_fx.diagnosis.judgement import judged, world_of
from gradsync_fx.diagnosis.watch import watching
from gradsync_fx.diagnosis.windows import windows
from gradsync_fx.errors import NoGradientError, OptionError
from gradsync_fx.user_lines import user_line


def diagnose(
    fn: Callable[..., Any],
    *args: Any,
    micro_steps: int,
    process_group: dist.ProcessGroup | None = None,
    **kwargs: Any,
) -> Diagnosis:
    """Runs `fn(*args, **kwargs)` once, for real, and says which easy mistakes of gradient accumulation it makes.

    For eager loops with plain DDP and `no_sync`, or with Accelerate's `accumulate`; not for a step that `optimize`
    made, nor for one under `torch.compile` or FSDP.

    >>> batches = [(x, y)] * 4  # two windows of two
    >>> print(gradsync_fx.diagnose(train, model, optimizer, batches, micro_steps=2))
    warning loss-never-divided
    ...

    fn: your own loop, over a few batches: a whole number of windows and at least two, so `2 * micro_steps`
        micro-steps or more. A micro-step is one `backward`. It trains for real: weights change as they do without us.
    micro_steps: how many micro-steps the loop means to put into one update.
    process_group: the ranks that train together; by default those of the DDP module, or the default group.

    On several ranks call it on every rank, as you would call `fn`. It sends nothing itself; each rank says what it saw
    of itself. What it wraps while it watches it puts back, also when `fn` raises; the error is `fn`'s own then.
    A loop without a backward is a `NoGradientError`.
    """
    line = user_line()
    if isinstance(micro_steps, bool) or not isinstance(micro_steps, int) or micro_steps < 1:
        raise OptionError(
            "micro_steps",
            seen=f"{micro_steps!r}",
            wanted="a whole number of 1 or more",
            fix="pass the number of micro-steps that the loop means to put into one update",
        )
    with watching(process_group) as watch:
        fn(*args, **kwargs)
    seen = windows(watch.events)
    if not any(w.micro_steps for w in seen):
        raise NoGradientError(
            line,
            seen="the function ran, and no backward in it reached a parameter that an optimizer trains",
            wanted=f"at least {2 * micro_steps} micro-steps with a backward each",
            fix="pass a function that runs your training loop over a few batches, eagerly",
        )
    return judged(watch, seen, micro_steps, world_of(watch, process_group))
