"""Ranks that die, are late, raise, differ or are interrupted; files that are cut short or changed.

Nobody hangs, nobody goes on with half a window, and a restart from what was saved last ends bitwise where the run ends
to which nothing happened.
"""

from __future__ import annotations

import errno
import functools
import os
import resource
import signal
import stat
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradsync_fx
from tests.mortals import TIMEOUT, mortals
from tests.refusals import refused
from tests.scenarios import faults
from tests.scenarios.faults import CALLS, Backend, Fault, K, fresh, script_of
from tests.scripts import loss_of, plain
from tests.truth import Rules, same, truth
from tests.workers import Ranks


pytestmark = pytest.mark.captured


def expected(world: int) -> list[dict[str, Tensor]]:
    """The model after each update, in plain eager PyTorch."""
    return truth(*fresh(), [script_of(rank) for rank in range(world)], Rules(K), loss_of)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Tensor]]:
    """Parameters at the end of a run in which one rank is slow, and nothing else happens."""

    @functools.cache
    def run(world: int) -> dict[str, Tensor]:
        folder = tmp_path_factory.mktemp("undisturbed")
        options = {"slow": world - 1, "rank_timeout": 30.0}
        found = mortals(world, faults.train, world, str(folder), None, options, folder=folder)
        for one in found:
            assert (one["type"], one["steps"]) == ("", CALLS // K), one
            same([one["parameters"]], expected(world)[-1:], 1e-5)
            equal(one["parameters"], found[0]["parameters"])
        return dict(found[0]["parameters"])

    return run


def equal(mine: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert mine.keys() == other.keys()
    assert all(torch.equal(t, other[name]) for name, t in mine.items())


# A rank that dies


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("world", "fault", "place", "store"),
    [
        (2, Fault("start", 1, 5), "micro-step 3/3 of update 2", "file"),
        (2, Fault("start", 0, 5), "micro-step 3/3 of update 2", "tcp"),  # with the store
        pytest.param(
            2,
            Fault("reduction", 1, 6),
            "micro-step 3/3 of update 2",
            "file",
            marks=pytest.mark.long,
        ),
        (2, Fault("compiling", 1, 3), "micro-step 3/3 of update 1", "file"),
        (2, Fault("tracing", 1, 1), "at its first call", "file"),
        pytest.param(
            2, Fault("saving", 1, 5), "micro-step 3/3 of update 2", "file", marks=pytest.mark.long
        ),
        pytest.param(
            3, Fault("start", 2, 5), "micro-step 3/3 of update 2", "file", marks=pytest.mark.long
        ),
        (3, Fault("reduction", 1, 6), "micro-step 3/3 of update 2", "file"),
    ],
    ids=lambda v: f"{v.where}-{v.rank}" if isinstance(v, Fault) else None,
)
def test_a_rank_is_killed(
    undisturbed: Callable[[int], dict[str, Tensor]],
    tmp_path: Path,
    world: int,
    fault: Fault,
    place: str,
    store: str,
) -> None:
    """The survivors are told in time, keep or void their window, and refuse to go on; all begin anew from the files."""
    options = {"rank_timeout": 6.0} if fault.where in ("tracing", "compiling") else {}
    arguments = (world, str(tmp_path))
    found = mortals(world, faults.train, *arguments, fault, options, store=store, folder=tmp_path)
    assert found[fault.rank] is None
    for rank, survivor in enumerate(found):
        if survivor is None:
            continue
        assert survivor["type"] == "RankLostError", survivor
        assert place in survivor["text"]
        assert f"rank {rank} " in survivor["text"] or place.startswith("at")
        assert survivor["seconds"] < TIMEOUT + 60
        # What ranks write down is read by the others, unless it went with the one that kept it.
        culprit = f"rank {fault.rank}: " if store == "file" else "the other ranks: "
        assert survivor["text"].startswith(culprit), survivor
        # Nobody was reached in the middle of a program, or some were.
        in_program = fault.where in ("reduction", "compiling")
        assert survivor["save"].startswith("WindowError") is in_program, survivor["save"]
        assert "last saved state" in survivor["skip"] + survivor["discard"]
        assert survivor["pending"] == (0 if fault.where == "tracing" else K - 1)
    left = [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")]
    assert len(left) == (fault.where == "saving")
    if fault.where == "tracing":
        return  # nothing was saved yet
    for one in mortals(world, faults.train, *arguments, None, {}, folder=tmp_path):
        assert one["type"] == "", one
        equal(one["parameters"], undisturbed(world))


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("absent", "timeout", "how"),
    [(2, 3.0, "hangs"), (0, 3.0, "hangs"), (1, None, "hangs"), (1, 2.0, "late")],
)
def test_a_rank_that_does_not_come_is_named(
    tmp_path: Path, absent: int, timeout: float | None, how: str
) -> None:
    found = mortals(3, faults.hangs, absent, timeout, how, folder=tmp_path)
    for rank, one in enumerate(found):
        if rank != absent:
            assert one["type"] == "RankLostError"
            assert one["text"].startswith(f"rank {absent}: "), one["text"]
    if how == "late":
        assert f"waited for rank {absent}" in found[absent]["text"]


# A rank that raises, or is interrupted


@pytest.mark.gloo
def test_a_step_that_raises_on_one_rank_is_called_again(
    undisturbed: Callable[[int], dict[str, Tensor]], ranks: Ranks
) -> None:
    whole, raised = ranks(faults.raises)
    assert whole["seen"] == []
    assert len(raised["seen"]) == 2
    for one in (whole, raised):
        equal(one["parameters"], undisturbed(2))


@pytest.mark.gloo
def test_an_eager_step_that_raises_between_the_ranks(tmp_path: Path) -> None:
    """Nobody knows then whether the others made the update: both refuse to go on."""
    other, raised = mortals(2, faults.raises_eagerly, folder=tmp_path)
    assert raised["type"] == "OverflowError"
    assert other["type"] == "RankLostError"
    for one in (other, raised):
        assert "cut off between the ranks" in one["again"]


@pytest.mark.gloo
def test_an_interrupt_while_a_rank_waits_for_another(
    undisturbed: Callable[[int], dict[str, Tensor]], tmp_path: Path
) -> None:
    """It comes through at once; both windows are as before the call, and can be saved."""
    interrupted, other = mortals(
        2, faults.interrupted_in_the_meeting, str(tmp_path), folder=tmp_path
    )
    assert interrupted["type"] == "KeyboardInterrupt"
    assert interrupted["seconds"] < TIMEOUT - 2  # before gloo gives up
    assert other["type"] == "RankLostError"
    for one in (interrupted, other):
        assert "cut off between the ranks" in one["skip"]
    assert faults.saved_for_all(str(tmp_path), 2) == K - 1
    for one in mortals(2, faults.train, 2, str(tmp_path), None, {}, folder=tmp_path):
        equal(one["parameters"], undisturbed(2))


class Alone:
    """One rank, with a fault in one of its calls."""

    def __init__(self, fault: Fault | None, k: int = K) -> None:
        self.model, self.optimizer = fresh()
        self.backend = Backend(fault)
        self.step = gradsync_fx.optimize(plain, gradient_accumulation_steps=k, backend=self.backend)

    def call(self, i: int) -> None:
        self.backend.call = i + 1
        slot = script_of(0)[i]
        assert slot is not None
        self.step(self.model, self.optimizer, *slot.batch(), slot.branch)

    def parameters(self) -> dict[str, Tensor]:
        return faults.parameters(self.model)


@pytest.fixture(scope="module")
def alone() -> dict[str, Tensor]:
    run = Alone(None)
    for i in range(CALLS):
        run.call(i)
    same([run.parameters()], expected(1)[-1:], 1e-5)
    return run.parameters()


@pytest.mark.parametrize("how", ["interrupt", "fail"])
def test_half_an_accumulate_call(alone: dict[str, Tensor], how: str) -> None:
    """The window is void until it is dropped; then the next one counts."""
    run = Alone(Fault("writing", 0, 2, how))
    run.call(0)
    with pytest.raises((KeyboardInterrupt, OverflowError)):
        run.call(1)
    run.backend.fault = None
    for call in (lambda: run.call(1), run.step.skip, run.step.flush, run.step.state_dict):
        error = refused(gradsync_fx.WindowError, "", call)
        assert "void" in error.seen
        assert "discard" in error.fix
    run.step.discard()
    assert run.step.pending == 0
    assert all(float(g.abs().max()) == 0 for g in run.step.gradients().values())
    for i in range(CALLS):
        run.call(i)
    equal(run.parameters(), alone)


def test_half_an_update(alone: dict[str, Tensor], tmp_path: Path) -> None:
    """Parameters may be half written: only a saved state helps."""
    run = Alone(Fault("writing", 0, 6, "interrupt"))
    for i in range(5):
        run.call(i)
    states = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    run.step.save(tmp_path / "saved", **states)
    with pytest.raises(KeyboardInterrupt):
        run.call(5)
    run.backend.fault = None
    for call in (lambda: run.call(5), run.step.discard, run.step.state_dict):
        error = refused(gradsync_fx.WindowError, "", call)
        assert "half written" in error.seen
        assert "saved state" in error.fix
    states = run.step.load(tmp_path / "saved")
    run.model.load_state_dict(states["model"])
    run.optimizer.load_state_dict(states["optimizer"])
    run.call(5)
    equal(run.parameters(), alone)


@pytest.mark.parametrize(("where", "call"), [("compiling", 1), ("compiling", 3), ("tracing", 1)])
def test_an_interrupt_while_compiling(alone: dict[str, Tensor], where: str, call: int) -> None:
    """Nothing of the call has run: it is made again."""
    fault = Fault(where, 0, call, "interrupt")
    run = Alone(fault)
    for i in range(CALLS):
        if i + 1 == call:
            with pytest.raises(KeyboardInterrupt), faults.struck_outside(fault, call):
                run.call(i)
            assert run.step.pending == i % K
            run.backend.fault = None
        run.call(i)
    equal(run.parameters(), alone)


def test_an_error_ahead_of_the_first_write_costs_nothing(alone: dict[str, Tensor]) -> None:
    """Where torch's own calls run one after the other, that can be told."""
    model, optimizer = fresh()
    run = gradsync_fx.optimize(faults.asserting, gradient_accumulation_steps=K, backend="aot_eager")
    for i, slot in enumerate(script_of(0)):
        assert slot is not None
        x, y = slot.batch()
        if i in (1, 5):
            with pytest.raises(AssertionError):
                run(model, optimizer, x, y + 1000)
            assert run.pending == i % K
        run(model, optimizer, x, y)
    equal(faults.parameters(model), alone)


def test_a_scheduler_that_raises_behind_the_update() -> None:
    """Counters and parameters no longer agree: the window says so."""
    model, optimizer = fresh()

    def rate(epoch: int) -> float:
        if epoch > 1:
            raise OverflowError
        return 1.0

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        plain(model, optimizer, x, y, "both")
        scheduler.step()

    run = gradsync_fx.optimize(step, backend="aot_eager")
    first, second = script_of(0)[:2]
    assert first is not None
    assert second is not None
    run(model, optimizer, *first.batch())
    with pytest.raises(OverflowError):
        run(model, optimizer, *second.batch())
    refused(gradsync_fx.WindowError, "step", run, model, optimizer, *second.batch())


# Ranks that differ


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("which", "kind", "words"),
    [
        ("number", "ReplicaMismatchError", "rank 0 has 8 parameters, rank 1 has 10 parameters"),
        ("shape", "ReplicaMismatchError", "rank 1 has 'idle.weight' of shape (3, 2)"),
        ("buffers", "ReplicaMismatchError", "rank 0 has 0 buffers, rank 1 has 1 buffers"),
        ("reduction", "RanksDisagreeError", "rank 0 has mean, rank 1 has sum"),
        ("windows", "RanksDisagreeError", "rank 0 has False, rank 1 has True"),
        ("bucket_cap_mb", "RanksDisagreeError", "rank 0 has 25.0, rank 1 has 1.0"),
        ("reduce_dtype", "RanksDisagreeError", "rank 0 has None, rank 1 has torch.bfloat16"),
        ("accumulator_dtype", "RanksDisagreeError", "rank 1 has torch.bfloat16"),
    ],
)
def test_another_model_or_option(ranks: Ranks, which: str, kind: str, words: str) -> None:
    """Both are told, both times; nothing is sent, and nothing moves."""
    for found in ranks(faults.differ, which):
        for error in found["errors"]:
            assert error.startswith(kind), error
            assert words in error
        assert not found["moved"]
        assert found["pending"] == 0


# Files


@pytest.fixture(scope="module")
def half() -> Alone:
    """A run with an open window, which no test closes."""
    run = Alone(None)
    run.call(0)
    return run


@pytest.fixture
def saved(half: Alone, tmp_path: Path) -> Iterator[tuple[Alone, Path]]:
    """That run, and a file of it."""
    path = tmp_path / "saved.pt"
    half.step.save(path, model=half.model.state_dict())
    yield half, path
    assert [p.name for p in tmp_path.iterdir()] == ["saved.pt"], "nothing is left beside it"


@contextmanager
def full_at(size: int) -> Iterator[None]:
    """Files cannot grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("size", [0, 500, 3000])
def test_a_full_disk(saved: tuple[Alone, Path], size: int) -> None:
    """The old file stays; the step goes on, and saves when there is room."""
    run, path = saved
    before = path.read_bytes()
    with full_at(size):
        error = refused(
            gradsync_fx.StateError, "saved.pt", lambda: run.step.save(path, more=torch.zeros(99))
        )
    assert os.strerror(errno.EFBIG) in error.seen
    assert path.read_bytes() == before
    run.step.save(path)
    again = Alone(None)
    again.step.load(path)
    assert again.step.pending == 1


def test_an_interrupt_while_saving(
    saved: tuple[Alone, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, path = saved
    before = path.read_bytes()

    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.step.save(path)
    assert path.read_bytes() == before


def test_what_is_not_data_is_refused_when_it_is_saved(saved: tuple[Alone, Path]) -> None:
    run, path = saved
    before = path.read_bytes()
    error = refused(
        gradsync_fx.StateError, "saved.pt", lambda: run.step.save(path, other={"f": Alone})
    )
    assert "could not be loaded as data" in error.seen
    assert path.read_bytes() == before


def test_a_file_keeps_its_link_and_usual_rights(saved: tuple[Alone, Path], tmp_path: Path) -> None:
    run, path = saved
    link = tmp_path / "link"
    link.symlink_to(path)
    run.step.save(link)
    assert link.is_symlink()
    assert Alone(None).step.load(link) == {}
    link.unlink()
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def damage(path: Path, how: str) -> None:
    whole = path.read_bytes()
    if how == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "flipped":
        with zipfile.ZipFile(path) as archive:
            largest = max(archive.infolist(), key=lambda item: item.file_size)
        place = whole.index(b"PK\x03\x04", largest.header_offset) + 300
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    elif how == "other":
        torch.save({"model": {}}, path)
    else:
        torch.save({"window": Evil(), "states": {}}, path)


class Evil:
    """Unpickled, it would end the tests."""

    def __reduce__(self) -> Any:
        return os._exit, (66,)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("truncated", "damaged"),
        ("emptied", "damaged"),
        ("flipped", "checksum"),
        ("other", r"holds \['model'\]"),
        ("evil", "more than data"),
    ],
)
def test_a_damaged_file(saved: tuple[Alone, Path], how: str, words: str) -> None:
    """It is refused, and changes nothing."""
    run, path = saved
    damage(path, how)
    before = {name: g.clone() for name, g in run.step.gradients().items()}
    with pytest.raises(gradsync_fx.StateError, match=words):
        run.step.load(path)
    assert run.step.pending == 1
    equal(dict(run.step.gradients()), before)


def tampered(how: str, state: dict[str, Any]) -> dict[str, Any]:
    mine = state["rank0"]
    changed: dict[str, Any] = {
        "version": {**state, "format": 1},
        "foreign": {**state, "epoch": 3},
        "missing": {name: v for name, v in state.items() if name != "world_size"},
        "foreign in rank": {**state, "rank0": {**mine, "epoch": 3}},
        "missing in rank": {**state, "rank0": {n: v for n, v in mine.items() if n != "summed"}},
        "type": {**state, "optimizer_step": "many"},
        "negative": {**state, "rank0": {**mine, "micro_step": -1}},
        "lengths": {**state, "rank0": {**mine, "pending": [1, 1]}},
        "window": {**state, "rank0": {**mine, "in_window": {"nowhere": 1}}},
        "rank": {**state, "rank0": None},
    }
    return dict(changed[how])


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("version", "another version of gradsync_fx"),
        ("foreign", "epoch is foreign"),
        ("missing", "world_size is missing"),
        ("foreign in rank", "state of rank0: epoch is foreign"),
        ("missing in rank", "summed is missing"),
        ("type", "optimizer_step is many"),
        ("negative", "micro_step is -1"),
        ("lengths", "different lengths"),
        ("window", "'nowhere'"),
        ("rank", "NoneType"),
    ],
)
@pytest.mark.parametrize("captured", [False, True])
def test_a_state_that_was_tampered_with(half: Alone, how: str, words: str, captured: bool) -> None:
    step = half.step if captured else Alone(None).step
    with pytest.raises(gradsync_fx.StateError, match=words):
        step.load_state_dict(tampered(how, half.step.state_dict()))
    assert step.pending == captured


def test_a_sum_of_another_shape_is_refused_at_every_call(half: Alone) -> None:
    """Loaded before the first call, it is compared when the parameters are known."""
    state = half.step.state_dict()
    state["rank0"]["accumulators"]["a.bias"] = torch.zeros(7)
    later = Alone(None)
    later.step.load_state_dict(state)
    for _ in range(2):
        with pytest.raises(gradsync_fx.StateError, match="shape"):
            later.call(1)
