"""Cases for hypothesis to draw."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.fuzz.cases import ANY, GENTLE, LOSSES, MODELS, SCHEDULES, STATISTICS, TOKENS, Case, Do
from tests.fuzz.graphs import COLLECTIVES, OPS, Round, Sketch


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


NUMBERS = st.integers(0, 30)


def _ops(names: tuple[str, ...], most: int) -> Any:
    return st.lists(st.tuples(st.sampled_from(names), NUMBERS, NUMBERS), max_size=most).map(tuple)


@st.composite
def sketches(draw: Any) -> Sketch:
    """A step as a graph, and windows of it."""
    parameters = draw(
        st.lists(
            st.tuples(st.sampled_from((0, 1, 2)), st.sampled_from((0, 0, 0, 0, 0, 1, 2))),
            min_size=1,
            max_size=4,
        )
    )
    coarse = any(dtype == 2 for _, dtype in parameters)
    metric = st.one_of(st.none(), st.none(), NUMBERS)
    weighted = draw(st.sampled_from((False, False, True)))
    return Sketch(
        rounds=tuple(draw(_round(coarse)) for _ in range(draw(st.sampled_from((1, 1, 2))))),
        parameters=tuple(parameters),
        buffers=draw(_shapes(0, 2)),
        data=draw(_shapes(1, 3)),
        writes=draw(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=3).map(tuple)),
        outputs=draw(st.lists(NUMBERS, max_size=4).map(tuple)),
        metric=draw(metric),
        weight=draw(NUMBERS) if weighted else None,
        reduction="weighted" if weighted else draw(st.sampled_from(("mean", "mean", "sum"))),
        finite=draw(st.sampled_from((False, False, False, True))),
        every=draw(st.sampled_from((False, False, False, True))),
        apart=draw(st.booleans()),
        world=draw(st.sampled_from((1, 2, 4))),
        cap=draw(st.sampled_from((25.0, 0.00002))),
        script=draw(_windows()),
        bad=draw(st.sampled_from((0, 0, 0, 1, 2, 5))),
    )


def _shapes(least: int, most: int) -> Any:
    return st.lists(st.sampled_from((0, 1, 2)), min_size=least, max_size=most).map(tuple)


def _windows() -> Any:
    """All windows of one call; or any, the end of a window without data included."""
    event = st.tuples(st.sampled_from(("call", "call", "call", "tail")), st.integers(0, 3))
    some = st.lists(event, min_size=1, max_size=6).map(lambda events: (("call", 0), *events))
    return st.one_of(st.just((("call", 1),) * 2), some, some)


@st.composite
def _round(draw: Any, coarse: bool) -> Round:
    optimizers = GENTLE if coarse else (*GENTLE, "Adam-l2", "AdamW", "own")
    rare = st.sampled_from((False, False, False, True))
    return Round(
        forward=draw(_ops((*OPS, *COLLECTIVES), 6)),
        sources=tuple(draw(st.lists(NUMBERS, min_size=1, max_size=3))),
        again=draw(st.booleans()),
        peeks=draw(rare),
        twice=draw(rare),
        sync=draw(st.sampled_from(("none", "none", "hand", "flat"))),
        between=draw(_ops(OPS, 4)),
        clip=draw(st.sampled_from(("none", "norm", "mixed"))),
        update=draw(st.sampled_from((*optimizers, "by hand", "none"))),
        decayed=draw(rare),
        projected=draw(rare),
        behind=draw(_ops(OPS, 4)),
    )
