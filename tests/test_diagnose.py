"""Each easy mistake of an eager loop is found at its line, and the right loops are left alone.

A loop marks the line that is to be blamed with a comment, `# culprit: NAME`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

import gradsync_fx
from gradsync_fx.diagnosis.findings import Diagnosis, Finding
from gradsync_fx.eager_loops import diagnose
from tests.models import mlp
from tests.refusals import refused
from tests.scenarios import loops
from tests.workers import Ranks


K = 2
Batches = list[tuple[Tensor, Tensor]]


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process alone in a gloo group: DDP runs its reducer as it does with others."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def batches(count: int = 2 * K) -> Batches:
    return [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(count)]


def parts() -> tuple[DistributedDataParallel, Optimizer]:
    ddp = DistributedDataParallel(mlp())
    return ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-3)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def line_of(name: str, file: str = __file__) -> str:
    """`file:line` of the line that is marked with the name."""
    lines = Path(file).read_text().splitlines()
    (found,) = [i for i, text in enumerate(lines, 1) if text.endswith(f"# culprit: {name}")]
    return f"{file}:{found}"


def only(diagnosis: Diagnosis, code: str, severity: str, culprit: str, *words: str) -> Finding:
    """The one finding, looked at as a user meets it."""
    (finding,) = diagnosis.findings
    assert (finding.code, finding.severity) == (code, severity), str(diagnosis)
    assert finding.line == line_of(culprit)
    printed = " ".join(str(diagnosis).split())  # without its line breaks
    for part in (finding.line, finding.seen, finding.wanted, finding.fix):
        assert part
        assert part in printed
    for word in words:
        assert word in " ".join(str(finding).split()), str(finding)
    assert diagnosis.ok == (severity == "note")
    assert ("looks right" in str(diagnosis)) == (diagnosis.ok and diagnosis.judged)
    return finding


# The right loops.


def right(ddp: DistributedDataParallel, optimizer: Optimizer, data: Batches) -> list[float]:
    losses = []
    for i, (x, y) in enumerate(data):
        last = (i + 1) % K == 0
        with nullcontext() if last else ddp.no_sync():
            loss = loss_of(ddp, x, y)
            (loss / K).backward()
        losses.append(loss.item())
        if last:
            clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def test_a_right_loop_says_so_and_what_was_seen() -> None:
    ddp, optimizer = parts()
    diagnosis = diagnose(right, ddp, optimizer, batches(), micro_steps=K)
    assert diagnosis.findings == ()
    assert diagnosis.ok
    assert diagnosis.gradient_bytes == 4 * sum(p.numel() for p in ddp.parameters())
    assert [(w.micro_steps, w.reduced, w.collectives) for w in diagnosis.windows] == [(K, 1, 1)] * 2
    text = str(diagnosis)
    assert text.startswith("the loop looks right")
    assert "4 micro-steps, 2 updates" in text
    assert f"{diagnosis.gradient_bytes:,}" in text


def test_json_has_it_all() -> None:
    ddp, optimizer = parts()
    found = json.loads(diagnose(right, ddp, optimizer, batches(), micro_steps=K).to_json())
    assert found["version"] == 1
    assert found["ok"] is True
    assert found["findings"] == []
    assert found["windows"][0]["reduced"] == 1


def test_watching_changes_nothing() -> None:
    """The watched loop gives bitwise what the same loop gives alone, and nothing of the watch is left behind."""
    names: list[tuple[Any, str]] = [
        (torch.autograd, "backward"), (nn.utils, "clip_grad_norm_"), (dist, "all_reduce"),
        (DistributedDataParallel, "forward"), (DistributedDataParallel, "no_sync"),
        (Optimizer, "zero_grad"), (nn.Module, "zero_grad"), (torch.amp.GradScaler, "step"),
        (StepLR, "step"),
    ]  # fmt: skip
    before = [getattr(owner, name) for owner, name in names]
    data = batches()
    results = []
    for watched in (False, True):
        torch.manual_seed(1)
        ddp, optimizer = parts()
        losses: list[float] = []
        if watched:
            diagnose(
                lambda d, o, b, out: out.extend(right(d, o, b)),
                ddp, optimizer, data, losses, micro_steps=K,
            )  # fmt: skip
        else:
            losses = right(ddp, optimizer, data)
        assert not ddp.module._forward_pre_hooks
        results.append((losses, [p.detach().clone() for p in ddp.parameters()]))
    assert results[0][0] == results[1][0]
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(a, b)
    assert [getattr(owner, name) for owner, name in names] == before


def test_an_error_of_the_loop_is_its_own_and_the_watch_ends() -> None:
    before = torch.autograd.backward

    def broken() -> None:
        assert torch.autograd.backward is not before
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        diagnose(broken, micro_steps=K)
    assert torch.autograd.backward is before


def test_a_module_imported_while_it_is_watched_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_late.py").write_text(
        "from torch.autograd import backward\n\ndef run(x, call=backward):\n    call(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plain = torch.autograd.backward

    def loop(ddp: nn.Module, optimizer: Optimizer, data: list[Any]) -> None:
        import imported_late  # type: ignore[import-not-found]

        assert imported_late.backward is not plain
        right(ddp, optimizer, data)

    ddp, optimizer = parts()
    diagnose(loop, ddp, optimizer, batches(), micro_steps=K)
    late = sys.modules.pop("imported_late")
    assert late.backward is plain

    # A default argument cannot be put back: what stands there watches no more.
    weight = torch.ones(2, requires_grad=True)
    late.run((weight * 3).sum())
    assert weight.grad.tolist() == [3, 3]


def test_nothing_to_diagnose_is_an_error() -> None:
    refused(gradsync_fx.NoGradientError, "test_diagnose.py:", lambda: diagnose(int, micro_steps=K))
    refused(gradsync_fx.OptionError, "micro_steps", lambda: diagnose(int, micro_steps=0))


def divided(how: str, each: Tensor) -> Tensor:
    if how == "factor":
        return 0.25 * each.mean()
    if how == "half":
        return 0.25 * each.mean() / 4
    if how == "per sample":
        return (each / 4).mean() + each.mean() * 0.25
    if how == "tokens":
        return each.sum() / torch.tensor(13.0)
    return each.sum() / 4 / 4 if how == "mean" else each.mean()


@pytest.mark.parametrize("how", ["factor", "half", "per sample", "gradients", "tokens", "mean"])
def test_ways_to_divide_once(how: str) -> None:
    """All of them are right, a mean over a batch that has as many samples as the window micro-steps included."""

    def train(ddp: DistributedDataParallel, optimizer: Optimizer, data: Batches) -> None:
        for i, (x, y) in enumerate(data):
            last = (i + 1) % 4 == 0
            with nullcontext() if last else ddp.no_sync():
                loss = divided(how, (ddp(x) - y) ** 2)
                loss.backward()
            if last:
                if how == "gradients":
                    for p in ddp.parameters():
                        p.grad.div_(4)
                optimizer.step()
                ddp.zero_grad(set_to_none=False)

    assert diagnose(train, *parts(), batches(8), micro_steps=4).findings == ()


def test_a_plain_module_alone_needs_no_reduction() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for i, (x, y) in enumerate(batches()):
            (loss_of(model, x, y) / K).backward()
            if i % K == 1:
                optimizer.step()
                for p in model.parameters():
                    p.grad = None

    assert diagnose(train, micro_steps=K).findings == ()


def test_optimizers_that_step_together_close_one_window() -> None:
    ddp, first = parts()
    second = torch.optim.SGD(list(ddp.parameters())[:1], lr=0.1)

    def train() -> None:
        for i, (x, y) in enumerate(batches()):
            last = i % K == 1
            with nullcontext() if last else ddp.no_sync():
                (loss_of(ddp, x, y) / K).backward()
            if last:
                first.step()
                clip_grad_norm_(ddp.parameters(), 1.0)
                second.step()
                ddp.zero_grad()

    assert diagnose(train, micro_steps=K).findings == ()


def test_optimizers_apart_are_not_judged() -> None:
    a, b = mlp(), mlp()
    first = torch.optim.SGD(a.parameters(), lr=0.1)
    second = torch.optim.SGD(b.parameters(), lr=0.1)

    def train() -> None:
        for x, y in batches():
            loss_of(a, x, y).backward()
            first.step()  # culprit: apart
            loss_of(b, x, y).backward()
            second.step()

    only(diagnose(train, micro_steps=K), "optimizers-apart", "note", "apart")


def test_closures_are_not_judged() -> None:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def train() -> None:
        for x, y in batches():

            def again(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, x, y)
                loss.backward()  # culprit: closure
                return loss

            optimizer.step(again)

    only(diagnose(train, micro_steps=1), "closure", "note", "closure")


# 1 to 4: who reduces, and when.


def test_no_sync_round_backward_only() -> None:
    def train(ddp: DistributedDataParallel, optimizer: Optimizer, data: Batches) -> None:
        for i, (x, y) in enumerate(data):
            last = i % K == 1
            loss = loss_of(ddp, x, y)
            with nullcontext() if last else ddp.no_sync():  # culprit: late
                (loss / K).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()

    diagnosis = diagnose(train, *parts(), batches(), micro_steps=K)
    size = f"{diagnosis.gradient_bytes:,} bytes per window"
    only(diagnosis, "no-sync-around-backward-only", "warning", "late", size, "2 of the window's 2")
    assert [w.reduced for w in diagnosis.windows] == [K, K]


def test_reduced_on_every_micro_step() -> None:
    def train(ddp: DistributedDataParallel, optimizer: Optimizer, data: Batches) -> None:
        for i, (x, y) in enumerate(data):
            (loss_of(ddp, x, y) / 4).backward()  # culprit: every
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()

    diagnosis = diagnose(train, *parts(), batches(8), micro_steps=4)
    size = f"{3 * diagnosis.gradient_bytes:,} bytes per window"
    only(diagnosis, "reduced-every-micro-step", "warning", "every", size, "4 of the window's 4")
    assert diagnosis.windows[0].bytes == 4 * diagnosis.gradient_bytes


def test_the_wrapper_is_bypassed() -> None:
    def train(ddp: DistributedDataParallel, optimizer: Optimizer, data: Batches) -> None:
        for i, (x, y) in enumerate(data):
            out = ddp.module(x)  # culprit: bypassed
            (nn.functional.mse_loss(out, y) / K).backward()
            if i % K == 1:
                optimizer.step()
                optimizer.zero_grad()

    diagnosis = diagnose(train, *parts(), batches(), micro_steps=K)
    only(diagnosis, "wrapper-bypassed", "error", "bypassed", "ddp.module(x)")


def test_the_boundary_is_off_by_one() -> None:
    def train(ddp: DistributedDataParallel, optimizer: Optimizer, data: Batches) -> None:
        for i, (x, y) in enumerate(data):
            with nullcontext() if i % K == 0 else ddp.no_sync():  # culprit: off by one
                (loss_of(ddp, x, y) / K).backward()
            if i % K == 1:
                optimizer.step()
                optimizer.zero_grad()

    diagnosis = diagnose(train, *parts(), batches(), micro_steps=K)
    only(diagnosis, "boundary-not-reduced", "error", "off by one", "(micro-step 1 is)")


def test_no_sync_round_everything() -> None:
    def train(ddp: DistributedDataParallel, optimizer: Optimizer, data: Batches) -> None:
        with ddp.no_sync():  # culprit: around everything
            for i, (x, y) in enumerate(data):
                (loss_of(ddp, x, y) / K).backward()
                if i % K == 1:
                    optimizer.step()
                    optimizer.zero_grad()

    diagnosis = diagnose(train, *parts(), batches(), micro_steps=K)
    only(diagnosis, "boundary-not-reduced", "error", "around everything", "nor is any other")


# 5 to 9: one loop for all, with a place for each mistake.


def loop(
    *,
    before: Callable[..., object] = lambda *_: None,
    micro: Callable[..., object] = lambda *_: None,
    boundary: Callable[..., object] | None = None,
    divide: float = K,
    zero: bool = True,
    closes: Callable[[int], bool] = lambda i: i % K == 1,
) -> Callable[[DistributedDataParallel, Optimizer, Batches], None]:
    """before: called before each forward. micro: after each backward. boundary: in place of the step."""

    def train(ddp: DistributedDataParallel, optimizer: Optimizer, data: Batches) -> None:
        for i, (x, y) in enumerate(data):
            before(ddp, optimizer)
            with nullcontext() if closes(i) else ddp.no_sync():
                loss = loss_of(ddp, x, y)
                (loss / divide).backward()
            micro(ddp, optimizer)
            if closes(i):
                if boundary:
                    boundary(ddp, optimizer)
                else:
                    optimizer.step()  # culprit: step
                if zero:
                    optimizer.zero_grad()

    return train


def seen(train: Callable[..., object], count: int = 2 * K, k: int = K) -> Diagnosis:
    return diagnose(train, *parts(), batches(count), micro_steps=k)


@pytest.mark.parametrize("how", ["k squared", "loss and gradients"])
def test_divided_twice(how: str) -> None:
    def train(ddp: DistributedDataParallel, optimizer: Optimizer, data: Batches) -> None:
        for i, (x, y) in enumerate(data):
            last = i % K == 1
            with nullcontext() if last else ddp.no_sync():
                loss = loss_of(ddp, x, y) / K
                (loss / K if how == "k squared" else loss).backward()  # culprit: twice
            if last:
                if how != "k squared":
                    for p in ddp.parameters():
                        p.grad /= K
                clip_grad_norm_(ddp.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    only(seen(train), "loss-divided-twice", "error", "twice")


def test_never_divided() -> None:
    def train(ddp: DistributedDataParallel, optimizer: Optimizer, data: Batches) -> None:
        for i, (x, y) in enumerate(data):
            last = i % K == 1
            with nullcontext() if last else ddp.no_sync():
                loss_of(ddp, x, y).backward()  # culprit: never
            if last:
                optimizer.step()
                optimizer.zero_grad()

    only(seen(train), "loss-never-divided", "warning", "never", f"loss / {K}")


def test_clipped_inside_a_window() -> None:
    def clip(ddp: nn.Module, _: Optimizer) -> None:
        clip_grad_norm_(ddp.parameters(), 1.0)  # culprit: clip inside

    only(seen(loop(micro=clip)), "clip-inside-window", "error", "clip inside")


def test_clipped_after_the_step() -> None:
    def update(ddp: nn.Module, optimizer: Optimizer) -> None:
        optimizer.step()
        torch.nn.utils.clip_grad_value_(ddp.parameters(), 1.0)  # culprit: clip after

    only(seen(loop(boundary=update)), "clip-after-step", "error", "clip after")


@pytest.mark.parametrize("unscaled", [False, True])
def test_clipped_before_unscale(unscaled: bool) -> None:
    scaler = torch.amp.GradScaler("cpu")

    def train(ddp: DistributedDataParallel, optimizer: Optimizer, data: Batches) -> None:
        for i, (x, y) in enumerate(data):
            last = i % K == 1
            with nullcontext() if last else ddp.no_sync():
                scaler.scale(loss_of(ddp, x, y) / K).backward()
            if last:
                if unscaled:
                    scaler.unscale_(optimizer)
                clip_grad_norm_(ddp.parameters(), 1.0)  # culprit: scaled clip
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

    diagnosis = seen(train)
    if unscaled:
        assert diagnosis.findings == ()
    else:
        only(diagnosis, "clip-before-unscale", "error", "scaled clip")


def test_a_scaler_is_no_division() -> None:
    scaler = torch.amp.GradScaler("cpu")

    def train(ddp: DistributedDataParallel, optimizer: Optimizer, data: Batches) -> None:
        for i, (x, y) in enumerate(data):
            last = i % K == 1
            with nullcontext() if last else ddp.no_sync():
                scaler.scale(loss_of(ddp, x, y)).backward()  # culprit: scaled sum
            if last:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

    only(seen(train), "loss-never-divided", "warning", "scaled sum")


def test_an_update_that_a_scaler_leaves_out_closes_its_window() -> None:
    scaler = torch.amp.GradScaler("cpu")

    def train(ddp: DistributedDataParallel, optimizer: Optimizer, data: Batches) -> None:
        for i, (x, y) in enumerate(data):
            last = i % K == 1
            with nullcontext() if last else ddp.no_sync():
                loss = loss_of(ddp, x, y) / K
                scaler.scale(loss * float("inf") if i == 1 else loss).backward()
            if last:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

    assert seen(train).findings == ()


@pytest.mark.parametrize("how", ["optimizer", "none"])
def test_zeroed_inside_a_window(how: str) -> None:
    def zero(ddp: nn.Module, optimizer: Optimizer) -> None:
        if how == "optimizer":
            optimizer.zero_grad(set_to_none=False)  # culprit: zeroed
        else:
            for p in ddp.parameters():
                p.grad = None

    diagnosis = seen(loop(before=zero))
    if how == "optimizer":
        only(diagnosis, "zeroed-inside-window", "error", "zeroed")
    else:
        (finding,) = diagnosis.findings
        assert finding.code == "zeroed-inside-window"


def test_zeroed_before_the_step() -> None:
    def update(_: nn.Module, optimizer: Optimizer) -> None:
        optimizer.zero_grad()  # culprit: zeroed first
        optimizer.step()

    only(seen(loop(boundary=update)), "zeroed-before-step", "error", "zeroed first")


def test_never_zeroed() -> None:
    only(seen(loop(zero=False)), "never-zeroed", "error", "step", "4 of 4 parameters")


def test_stepped_on_every_micro_step() -> None:
    diagnosis = seen(loop(closes=lambda i: True))
    only(diagnosis, "stepped-every-micro-step", "error", "step")


def test_windows_of_another_length() -> None:
    diagnosis = seen(loop(closes=lambda i: i % 3 == 2, divide=3), 6)
    only(diagnosis, "window-length", "error", "step", "lengths: 3, 3")


def test_the_first_micro_step_closes_a_window() -> None:
    diagnosis = seen(loop(closes=lambda i: i % K == 0), 5)
    only(diagnosis, "window-length", "error", "step", "(i + 1) % 2 == 0")


def test_a_ragged_end_is_a_note() -> None:
    def train(ddp: DistributedDataParallel, optimizer: Optimizer, data: Batches) -> None:
        for i, (x, y) in enumerate(data):
            last = i % K == 1
            with nullcontext() if last else ddp.no_sync():
                (loss_of(ddp, x, y) / K).backward()  # culprit: ragged
            if last:
                optimizer.step()
                optimizer.zero_grad()

    only(seen(train, 5), "window-left-open", "note", "ragged", "1 micro-step that")


def test_a_flushed_end_is_right() -> None:
    assert seen(loop(closes=lambda i: i in (1, 3, 4)), 5).findings == ()


def test_too_few_micro_steps_to_judge() -> None:
    diagnosis = seen(loop(), K)
    assert [(f.code, f.severity) for f in diagnosis.findings] == [("too-short", "note")]
    assert __file__ in diagnosis.findings[0].line


def test_no_update_at_all() -> None:
    def train(ddp: DistributedDataParallel, _: Optimizer, data: Batches) -> None:
        for x, y in data:
            (loss_of(ddp, x, y) / K).backward()  # culprit: no update

    only(seen(train), "no-update", "error", "no update")


@pytest.mark.parametrize("place", ["micro-step", "update"])
def test_the_scheduler_steps_too_often(place: str) -> None:
    ddp, optimizer = parts()
    scheduler = StepLR(optimizer, 10)

    def advance(*_: object) -> None:
        scheduler.step()  # culprit: scheduler

    def update(*_: object) -> None:
        optimizer.step()
        if place == "update":
            scheduler.step()

    before = advance if place == "micro-step" else lambda *_: None
    optimizer.step()  # torch warns of a scheduler that is ahead
    train = loop(before=before, boundary=update)
    diagnosis = diagnose(train, ddp, optimizer, batches(), micro_steps=K)
    if place == "update":
        assert diagnosis.findings == ()
    else:
        only(diagnosis, "scheduler-per-micro-step", "error", "scheduler")


# Two ranks: on each of them, the same findings.


def on_ranks(ranks: Ranks, how: str) -> Diagnosis:
    first, second = ranks(loops.diagnosed, how, K)
    assert first == second
    assert first.world_size == 2
    diagnosis: Diagnosis = first
    return diagnosis


@pytest.mark.gloo
@pytest.mark.parametrize("how", ["right", "by_hand", "flat_by_hand", "accelerate"])
def test_right_on_two_ranks(ranks: Ranks, how: str) -> None:
    assert on_ranks(ranks, how).findings == ()


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("how", "code", "severity"),
    [
        ("plain", "no-reduction", "error"),
        ("bypassed", "wrapper-bypassed", "error"),
        ("off_by_one", "boundary-not-reduced", "error"),
        ("accelerate_late", "no-sync-around-backward-only", "warning"),
        ("accelerate_unprepared", "no-reduction", "error"),
        ("accelerate_by_hand", "loss-never-divided", "warning"),
        ("accelerate_divided", "loss-divided-twice", "error"),
        ("accelerate_clip", "clip-inside-window", "error"),
    ],
)
def test_wrong_on_two_ranks(ranks: Ranks, how: str, code: str, severity: str) -> None:
    (finding,) = on_ranks(ranks, how).findings
    assert (finding.code, finding.severity) == (code, severity)
    assert finding.line == line_of(how, loops.__file__)
