"""Cases for hypothesis to draw."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.fuzz.cases import ANY, GENTLE, LOSSES, MODELS, SCHEDULES, STATISTICS, TOKENS, Case, Do


@st.composite
def cases(draw: Any, ranks: int = 1) -> Case:
    """A case that its user may write: what is refused by name is left out."""
    dtype = draw(st.sampled_from(("float64", "float64", "float32", "bfloat16")))
    models = [m for m in MODELS if ranks == 1 or m != "dropout"]
    model = draw(st.sampled_from(models))
    reduction = draw(st.sampled_from(("mean", "mean", "sum", "weighted")))
    nonfinite = draw(st.sampled_from((False, False, False, True)))
    wrap = draw(st.sampled_from(("plain", "ddp", "hand"))) if ranks > 1 else "plain"
    one_way = wrap == "hand"
    if one_way:
        reduction, nonfinite = "mean", False
    way = draw(st.sampled_from(("captured", "captured", "captured", "eager")))
    if one_way:
        way = "captured"
    bad = nonfinite and model not in (*TOKENS, *STATISTICS)
    return Case(
        model=model,
        optimizer=draw(st.sampled_from(ANY if dtype == "float64" else GENTLE)),
        k=draw(st.integers(1, 4)),
        script=draw(_scripts(ranks, bad=bad, branches=model == "branches" and not one_way)),
        reduction=reduction,
        dtype=dtype,
        loss=draw(st.sampled_from(LOSSES)),
        zero=draw(st.sampled_from(("before", "between", "after", "both"))),
        zeroed=draw(st.sampled_from(("optimizer", "model"))),
        clip=draw(st.sampled_from(("none", "none", "norm", "value", "infinity"))),
        schedule=draw(st.sampled_from(("none", "none", *SCHEDULES))),
        weight=draw(st.sampled_from(("number", "tensor"))),
        wrap=wrap,
        ranks=ranks,
        skip_nonfinite=nonfinite,
        bucket_cap_mb=draw(st.sampled_from((25.0, 0.0001))),
        broadcast_buffers=draw(st.sampled_from(("window_start", "window_start", "never", "every"))),
        sync_each_batch=way == "captured" and draw(st.sampled_from((False, False, False, True))),
        way=way,
    )


@st.composite
def _scripts(draw: Any, ranks: int, *, bad: bool, branches: bool) -> tuple[Do, ...]:
    everyone = (True,) * ranks

    def call(runs: tuple[bool, ...]) -> Do:
        return Do(
            "call",
            seed=draw(st.integers(0, 99)),
            runs=runs,
            rows=draw(st.sampled_from((4, 4, 4, 3))),
            branch=draw(st.sampled_from(("both", "a", "b"))) if branches else "both",
            bad=bad and draw(st.sampled_from((False, False, True))),
        )

    script = [call(everyone)]  # before it nothing is captured, and nothing can be closed
    whats = ("call",) * 6 + ("skip", "flush", "discard", "reload", "steps")
    closes, reloaded = ("flush", "skip"), False
    for what in draw(st.lists(st.sampled_from(whats), min_size=3, max_size=10)):
        if what == "call" or (reloaded and what in closes):
            script.append(call(everyone))
            reloaded = False  # now its programs are there again
        elif what == "skip":
            script.append(call(tuple(draw(st.booleans()) for _ in everyone)))
        elif what == "steps":
            script.append(Do("steps", k=draw(st.integers(1, 4))))
        else:
            script.append(Do(what))
            reloaded = reloaded or what == "reload"
    return tuple(script)
