"""Every row of docs/constructs.md, tried: its outcome, and its numbers beside eager PyTorch's."""

from __future__ import annotations

import copy
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from tests.constructs import HEADINGS, ROWS, Row, State, table
from tests.drive import quick
from tests.models import mlp
from tests.reference import accumulation, regression


PAGE = Path(__file__).parent.parent / "docs" / "constructs.md"
EAGERLY = """\
An eager run follows the step as it goes (every operation, and what is read from and put into `.grad` and `.data`), and
its effects have the rules of [effects.md](effects.md): what depends on gradients or on updated parameters is written
where a window ends, and again by `flush`. Three things it cannot have, and says so:

- a Python number that the step changes on each call and that goes into such a write (the count of an average), or a
  value read from a gradient (`norm.item()`) that does: `CaptureError` at the second call of a window, with the tensor
  and the line. Take the count from `step.optimizer_step`, or keep such values in tensors;
- a value of updated parameters that is read on the host before such a write, where `flush` ends the window;
- with `gradient_accumulation_steps="manual"`, gradients that the step changes by its own code.

Values that the step itself reads on a call that closes no window are this micro-step's. Following costs about 35 us
an operation: 2.4 ms in place of 1.0 ms for a call of an MLP of two layers, 82 in place of 72 ms for eight layers of
width 512 with 256 rows (AdamW, one thread, medians of one run)."""
IDS = [r.name for r in ROWS]


def step_of(found: Row, state: State) -> Any:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
        loss = found.loss(model, x, y)
        result = found.inside(state, model, optimizer, loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss if result is None else result

    return step


def run(found: Row, **options: Any) -> tuple[gradsync_fx.OptimizedStep, State]:
    """Three windows of 2; parameters equal to eager accumulation's."""
    random.seed(0)
    torch.manual_seed(0)
    model = mlp()
    other = copy.deepcopy(model)
    found.prepare(model)
    state, windows = State(), regression(3, 2)
    optimizer, theirs = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, other))
    step = quick(step_of(found, state), 2, **options)
    with warnings.catch_warnings():
        # torch warns of its own class for functions while it traces one.
        warnings.filterwarnings("ignore", ".* should not be instantiated", DeprecationWarning)
        for window in windows:
            for batch in window:
                step(model, optimizer, *batch)
            assert step.sync_gradients
    accumulation(other, theirs, windows, found.loss)
    for ours, eager in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, eager, atol=1e-6, rtol=0)
    return step, state


def refusal(found: Row, **options: Any) -> gradsync_fx.GradSyncError:
    with pytest.raises(gradsync_fx.GradSyncError) as caught:
        run(found, **options)
    return caught.value


def of(*outcomes: str) -> Any:
    rows = [r for r in ROWS if r.outcome in outcomes]
    return pytest.mark.parametrize("found", rows, ids=[r.name for r in rows])


@of("captured", "moved")
def test_what_is_captured(found: Row) -> None:
    step, state = run(found)
    assert step.optimizer_step == 3
    assert bool(step.report().moved) is (found.outcome == "moved")
    eager, other = run_eagerly(found)
    assert eager.optimizer_step == 3
    assert state.losses == pytest.approx(other.losses)
    assert (state.calls, len(state.seen)) == (other.calls, len(other.seen))
    assert state.total == pytest.approx(other.total)


@of("eager")
def test_what_runs_eagerly(found: Row) -> None:
    error = refusal(found)
    assert error.seen
    assert error.fix
    assert ".py:" in error.culprit or ".py:" in error.seen
    step, _ = run_eagerly(found, refuse=False)
    assert step.optimizer_step == 3
    (why,) = step.report().refusals
    assert error.culprit in why
    assert "runs eagerly" in step.report().warnings[0]


@of("refused")
def test_what_is_refused(found: Row) -> None:
    assert refusal(found).fix
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the step runs eagerly")
        assert refusal(found, on_unsupported="eager").fix


def run_eagerly(found: Row, *, refuse: bool = True) -> tuple[gradsync_fx.OptimizedStep, State]:
    """The same windows without a capture: where the step could be captured, one is refused."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.filterwarnings("ignore", "the step runs eagerly")
        if refuse:
            patch.setattr(gradsync_fx.dispatch, "traced", lambda *args, **kwargs: _refused)
        return run(found, on_unsupported="eager")


def _refused(*args: Any, **kwargs: Any) -> None:
    raise gradsync_fx.CaptureError("the tests", seen="they ask for an eager run")


def test_the_page_is_made_from_the_rows() -> None:
    assert set(HEADINGS) == {r.outcome for r in ROWS}
    assert PAGE.read_text() == page(), "run: python tests/test_constructs.py"


# Tried in test_ranks_remaining.py.
SEVERAL_RANKS = [
    "## On several ranks",
    "",
    "A collective that reduces no gradient is an effect: every rank runs it, in the order of the step, whether it",
    "uses the result or not.",
    "",
    "| collective of the step | accumulate call | boundary | tail |",
    "|---|---|---|---|",
    "| of data and parameters: an averaged metric, gathered features | runs | runs | no |",
    "| of gradients: an averaged norm | no | runs | runs |",
    "| of gradients and data together | no | runs | no |",
    "| a hand-written reduction of gradients | no | runs, on the window's sum | runs |",
    "",
    "- The tail (`flush`, and `skip` in a last slot) is an update without a micro-step: no forward is there to",
    "  run, and so none of its collectives.",
    "- Where a step holds one of the first row, its calls tell the other ranks of themselves, by one small all-gather",
    "  in each. A rank that has no data for a call in which others run such a collective (or one of the third row)",
    "  could only hang them: all ranks raise `RanksDisagreeError`, with the collective's line, before anything runs.",
    "- Ranks whose collectives differ, in kind, order, group, dtype or (where it is fixed) size, raise the same error",
    "  on all ranks when such calls first meet, with all lines. A branch on the rank around a collective is such a",
    "  case; a branch around the use of its result (`if rank == 0: print(total)`) is none.",
    "- `dist.all_reduce(x)` in forward writes x and has no gradient of its own, as in eager PyTorch. Where the",
    "  backward needs the value that was overwritten, the step is refused: reduce a clone.",
    "- `dist.broadcast`, `dist.reduce` and collectives of objects cannot be traced: the step is refused with the line,",
    '  and runs with `on_unsupported="eager"`.',
]


def page() -> str:
    """docs/constructs.md."""
    lines = [
        "# What a step may hold",
        "",
        "Each row is a test (tests/constructs.py). A step that cannot be captured whole raises an error that names the",
        'line, what stands there and the way out. With `on_unsupported="eager"` it runs in the same windows without',
        "the rewrite, and the report says why.",
        *table(),
        "",
        EAGERLY,
        "",
        *SEVERAL_RANKS,
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
