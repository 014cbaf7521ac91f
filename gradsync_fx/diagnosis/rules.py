"""Rules about windows: when gradients are reduced, and when a window ends. One generator for each mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gradsync_fx.diagnosis.events import Forward
from gradsync_fx.diagnosis.findings import ERROR, NOTE, WARNING, Finding
from gradsync_fx.diagnosis.rules_of_gradients import GRADIENT_RULES
from gradsync_fx.diagnosis.windows import Loop, Window, events_of
from gradsync_fx.wording import number_of


def findings(loop: Loop) -> tuple[Finding, ...]:
    """All findings, errors first, each code once for a line: where it was seen first."""
    rules = NOT_JUDGED if loop.apart or loop.closures else RULES
    found: dict[tuple[str, str], Finding] = {}
    for rule in rules:
        for finding in rule(loop):
            found.setdefault((finding.code, finding.line), finding)
    rank = (ERROR, WARNING, NOTE).index
    return tuple(sorted(found.values(), key=lambda f: rank(f.severity)))


def _late_no_sync(loop: Loop) -> Iterator[Finding]:
    for window in loop.windows:
        late = sum(m.late_no_sync for m in window.micro_steps)
        for micro_step in window.micro_steps:
            if micro_step.late_no_sync:
                yield Finding(
                    "no-sync-around-backward-only",
                    WARNING,
                    micro_step.backward.no_sync,
                    f"no_sync is entered around `backward` only; the forward ran outside of it at "
                    f"{micro_step.forwards[-1].line}, and DDP decides there: {_wasted(loop, window, late)}",
                    "forward and backward of a micro-step inside of the same no_sync",
                    "move the call of the model into the `with` block",
                )


def _reduced_always(loop: Loop) -> Iterator[Finding]:
    for window in loop.closed:
        early = [m for m in window.micro_steps[:-1] if m.reduces and not m.late_no_sync]
        if early and window.last.reduces:
            yield Finding(
                "reduced-every-micro-step",
                WARNING,
                early[0].backward.line,
                _wasted(loop, window, len(early)),
                "one reduction per update: in the micro-step before optimizer.step()",
                "run the other micro-steps, forward and backward, under `ddp.no_sync()` "
                "(with Accelerate: under `accelerator.accumulate(model)`)",
            )


def _wasted(loop: Loop, window: Window, extra: int) -> str:
    total = len(window.micro_steps)
    reduced = sum(m.reduces for m in window.micro_steps)
    return (
        f"{reduced} of the window's {number_of(total, 'micro-step')} reduced, {loop.bytes:,} bytes of gradients each; "
        f"{extra * loop.bytes:,} bytes per window and rank are sent for nothing"
    )


def _not_reduced(loop: Loop) -> Iterator[Finding]:
    """Nothing reduced at the boundary: no DDP forward at all, or one under no_sync."""
    if loop.sharded:
        return
    for window in loop.closed:
        last = window.last
        if last.reduces or window.sent_by_hand:
            continue
        if any(m.forwards for m in window.micro_steps):
            yield _open_boundary(window)
        elif loop.wrapped & window.parameters:
            inner = [f for f in events_of(Forward, window.all_events) if f.bypassed]
            yield Finding(
                "wrapper-bypassed",
                ERROR,
                inner[0].line if inner else last.backward.line,
                "the module inside of DistributedDataParallel is called, not DDP itself: no gradient is reduced "
                f"(world size {loop.world})",
                "every forward that is trained through the DDP module",
                "call the DDP module: `ddp(x)`, not `ddp.module(x)`",
            )
        elif loop.world > 1:
            yield Finding(
                "no-reduction",
                ERROR,
                last.backward.line,
                f"no gradient is reduced in the window, by DDP or by hand, though the group has {loop.world} ranks: "
                "each rank trains a model of its own",
                "the gradients' mean over the ranks before optimizer.step()",
                "wrap the model in DistributedDataParallel and call that (with Accelerate: "
                "`accelerator.prepare(model)`)",
            )


def _open_boundary(window: Window) -> Finding:
    total = len(window.micro_steps)
    reduced = [i + 1 for i, m in enumerate(window.micro_steps) if m.reduces]
    seen = (
        f"the last of the window's {number_of(total, 'micro-step')}, before optimizer.step() at "
        f"{window.steps[0].line}, is not reduced"
    )
    if reduced:
        where = ", ".join(map(str, reduced))
        seen += f" (micro-step {where} is): what came after it stays on its rank"
    else:
        seen += ", nor is any other"
    last = window.last
    return Finding(
        "boundary-not-reduced",
        ERROR,
        last.backward.no_sync or (last.forwards[-1].line if last.forwards else last.backward.line),
        seen,
        "the reduction in the micro-step before optimizer.step(): its forward and backward outside of no_sync",
        "let one condition decide both: `last = (i + 1) % micro_steps == 0`, no_sync unless `last`, step if `last`",
    )


def _no_update(loop: Loop) -> Iterator[Finding]:
    if not loop.closed:
        yield Finding(
            "no-update",
            ERROR,
            loop.windows[-1].last.backward.line,
            f"{number_of(loop.micro_steps, 'micro-step')}, and no optimizer.step()",
            f"an update after every {number_of(loop.k, 'micro-step')}",
            "call optimizer.step() at the boundary; if it was never reached, let the function run for longer",
        )


def _lengths(loop: Loop) -> Iterator[Finding]:
    lengths = [len(w.micro_steps) for w in loop.closed]
    if loop.k > 1 and lengths and set(lengths) == {1}:
        yield Finding(
            "stepped-every-micro-step",
            ERROR,
            loop.closed[0].steps[0].line,
            "optimizer.step() runs after every micro-step",
            f"an update after every {number_of(loop.k, 'micro-step')}",
            f"step (and zero) only where `(i + 1) % {loop.k} == 0` (with Accelerate: prepare the optimizer, and step "
            "inside of `accelerator.accumulate(model)`)",
        )
        return
    for i, (window, length) in enumerate(zip(loop.closed, lengths, strict=True)):
        flushed = window is loop.closed[-1] and length < loop.k and not _open(loop)
        if length != loop.k and not flushed:
            first = i == 0 and length == 1
            yield Finding(
                "window-length",
                ERROR,
                window.steps[0].line,
                f"update {i + 1} closes a window of {number_of(length, 'micro-step')} "
                f"(lengths: {', '.join(map(str, lengths[:8]))})",
                f"windows of {number_of(loop.k, 'micro-step')}",
                f"`i % {loop.k} == 0` is true for the first micro-step: write `(i + 1) % {loop.k} == 0`"
                if first
                else "count micro-steps where the loop decides to step, or pass the number it means as micro_steps",
            )
            return


def _open(loop: Loop) -> bool:
    return bool(loop.windows and not loop.windows[-1].steps and loop.windows[-1].micro_steps)


def _left_open(loop: Loop) -> Iterator[Finding]:
    if loop.closed and _open(loop) and not loop.cut:
        window = loop.windows[-1]
        yield Finding(
            "window-left-open",
            NOTE,
            window.last.backward.line,
            f"the loop ends with {number_of(len(window.micro_steps), 'micro-step')} that no update follows",
            "every micro-step in an update",
            "step once more after the loop, reducing there, or let the number of batches be a multiple of micro_steps",
        )


def _too_short(loop: Loop) -> Iterator[Finding]:
    if loop.micro_steps < 2 * loop.k:
        yield Finding(
            "too-short",
            NOTE,
            loop.windows[-1].last.backward.line
            if _open(loop)
            else loop.closed[-1].last.backward.line,
            number_of(loop.micro_steps, "micro-step"),
            f"two windows, {2 * loop.k} micro-steps: some mistakes show in the second only",
            "let the function run over more batches",
        )


def _closures(loop: Loop) -> Iterator[Finding]:
    for backward in loop.closures:
        yield Finding(
            "closure",
            NOTE,
            backward.line,
            "the optimizer runs forward and backward itself, as often as it likes: nothing was judged",
            "an optimizer that steps on gradients that are there (not LBFGS)",
            "diagnose the loop with such an optimizer instead",
        )


def _apart(loop: Loop) -> Iterator[Finding]:
    if not loop.apart or loop.closures:
        return
    yield Finding(
        "optimizers-apart",
        NOTE,
        loop.closed[0].steps[0].line,
        "several optimizers that step at different times: nothing was judged",
        "one optimizer, or several that step together",
        "diagnose a function that trains with one of them",
    )


LoopRule = Callable[[Loop], Iterator[Finding]]
RULES: tuple[LoopRule, ...] = (
    _no_update, _not_reduced, _lengths, *GRADIENT_RULES, _late_no_sync, _reduced_always, _left_open, _too_short,
)  # fmt: skip
NOT_JUDGED: tuple[LoopRule, ...] = (_closures, _apart)
