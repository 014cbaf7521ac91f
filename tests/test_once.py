"""What depends on parameters alone is computed once per window, and the numbers stay those of plain accumulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import gradsync_fx
from gradsync_fx.ir.program import Kind
from tests.long import long_but
from tests.scenarios import once
from tests.workers import Ranks


def close(ours: once.Trained, theirs: once.Trained) -> None:
    torch.testing.assert_close(ours.losses, theirs.losses, atol=1e-6, rtol=1e-5)
    for mine, wanted in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(mine, wanted, atol=2e-6, rtol=1e-5)


def holds(run: once.Optimized, kind: str) -> None:
    """That something is held at all, and summed early where linear work is left."""
    (captured,) = run.step._executor.catalogue.captures
    kept = captured.programs.kept
    assert kept.held
    assert bool(kept.deferred) is (kind in once.SUMS)
    assert ("fold" in run.step.programs) is (kind in once.SUMS)


@pytest.mark.captured
@pytest.mark.parametrize("kind", once.KINDS)
@pytest.mark.parametrize("k", [2, 3])
def test_the_numbers_of_plain_accumulation(kind: str, k: int) -> None:
    ours = once.Optimized(kind, k).run(3 * k)
    holds(ours, kind)
    close(ours, once.Eager(kind).run(k, 3 * k))


@pytest.mark.captured
@pytest.mark.inductor
@pytest.mark.parametrize(
    "kind", long_but(["weight norm", "fake", "two ways", "merged"], ["weight norm", "two ways"])
)
def test_compiled_and_clipped(kind: str) -> None:
    ours = once.Optimized(kind, 3, clip=0.05, backend="inductor").run(9)
    holds(ours, kind)
    close(ours, once.Eager(kind, clip=0.05).run(3, 9))


@pytest.mark.captured
@pytest.mark.parametrize("kind", once.KINDS)
def test_the_forward_is_bitwise_what_it_is_without(kind: str) -> None:
    """In the first window, before any update."""
    ours = once.Optimized(kind, 4).run(4)
    without = once.Optimized(kind, 4, without=("invariants",)).run(4)
    assert ours.losses == without.losses


@pytest.mark.captured
@pytest.mark.parametrize("program", ["boundary", "fold"])
def test_linear_work_for_several_parameters_is_done_once(program: str) -> None:
    """The backward of a weight norm gives both of its parameters' gradients in one op."""
    step = once.Optimized("weight norm", 2).run(4).step
    assert step.programs[program].code.count("_weight_norm_interface_backward.default") == 2


@pytest.mark.captured
def test_gradients_of_two_backwards() -> None:
    """The first one's is a part of the second one's sum."""

    def trained(optimized: bool) -> nn.Module:
        model = once.model("weight norm")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            other = model(x.tanh()).square().mean()
            other.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        if optimized:
            step = gradsync_fx.optimize(
                train_step, gradient_accumulation_steps=3, backend="aot_eager"
            )
            with once.all_of_it():
                for call in range(6):
                    step(*once.batch(call))
            assert "fold" in step.programs
            return model
        for call in range(6):
            x, y = once.batch(call)
            (nn.functional.cross_entropy(model(x), y) / 3).backward()
            (model(x.tanh()).square().mean() / 3).backward()
            if call % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        return model

    for ours, theirs in zip(trained(True).parameters(), trained(False).parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


@pytest.mark.captured
def test_a_held_value_that_the_step_returns_is_the_callers_own() -> None:
    model = once.model("weight norm")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        layer = model[0]
        nn.functional.cross_entropy(model(x), y).backward()
        weight: torch.Tensor = layer.weight
        optimizer.step()
        optimizer.zero_grad()
        return weight

    step = gradsync_fx.optimize(train_step, gradient_accumulation_steps=2, backend="aot_eager")
    with once.all_of_it():
        seen = [step(*once.batch(call)) for call in range(4)]
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2]), "the update changed it"
    assert torch.equal(seen[2], seen[3])


@pytest.mark.captured
@pytest.mark.parametrize("kind", once.KINDS)
def test_no_op_of_a_held_value_is_left(kind: str) -> None:
    """In the accumulate program nothing is computed of parameters alone, but views of what is held."""
    ours = once.Optimized(kind, 3).run(3)
    (captured,) = ours.step._executor.catalogue.captures
    program = captured.programs.build(frozenset())
    holders = program.module.graph.find_nodes(op="placeholder")
    steady = {
        h
        for h, slot in zip(holders, program.slots, strict=True)
        if slot.kind in (Kind.PARAMETER, Kind.BUFFER)
    }
    assert any(slot.kind is Kind.INVARIANT for slot in program.slots)
    alone = [
        n
        for n in program.module.graph.nodes
        if n.op == "call_function"
        and n.all_input_nodes
        and set(n.all_input_nodes) <= steady
        and torch.Tag.pointwise in getattr(n.target, "tags", ())
    ]
    assert alone == []


def _mul(m: nn.Module, o: Optimizer) -> None:
    with torch.no_grad():
        for p in m.parameters():
            p.mul_(1.2)


def _data(m: nn.Module, o: Optimizer) -> None:
    for p in m.parameters():
        p.data[..., 0] += 0.3


def _numpy(m: nn.Module, o: Optimizer) -> None:
    next(m.parameters()).detach().numpy()[0] += 0.5


def _swapped(m: nn.Module, o: Optimizer) -> None:
    """Two rows change places: every sum over all of them stays."""
    p = next(p for p in m.parameters() if p.dim() > 1)
    p.data[[0, 1]] = p.data[[1, 0]]


def _replaced(m: nn.Module, o: Optimizer) -> None:
    for p in m.parameters():
        p.data = p.detach() * 0.8


def _loaded(m: nn.Module, o: Optimizer) -> None:
    m.load_state_dict({name: t * 0.9 for name, t in m.state_dict().items()})


def _other_optimizer(m: nn.Module, o: Optimizer) -> None:
    own = torch.optim.SGD(m.parameters(), lr=0.2)
    held = [p.grad for p in m.parameters()]
    for p in m.parameters():
        p.grad = torch.ones_like(p)
    own.step()
    for p, grad in zip(m.parameters(), held, strict=True):
        p.grad = grad


def _average(m: nn.Module, o: Optimizer) -> None:
    """Swapped in and out again: all is as it was."""
    before = {name: t.clone() for name, t in m.state_dict().items()}
    m.load_state_dict({name: t * 0.5 for name, t in before.items()})
    m.load_state_dict(before)


WRITES = (_mul, _data, _numpy, _swapped, _replaced, _loaded, _other_optimizer, _average)


@pytest.mark.captured
@pytest.mark.parametrize("wrote", WRITES, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("kind", ["weight norm", "two ways", "quantised", "fake"])
def test_a_write_inside_a_window_is_seen(kind: str, wrote: once.Wrote) -> None:
    """At the second window's third call: two terms were summed with the parameters as they were."""
    ours = once.Optimized(kind, 4).run(12, wrote, at=6)
    holds(ours, kind)
    close(ours, once.Eager(kind).run(4, 12, wrote, at=6))


@pytest.mark.captured
@pytest.mark.parametrize("kind", ["weight norm", "two ways"])
def test_a_write_before_the_call_that_closes(kind: str) -> None:
    close(once.Optimized(kind, 3).run(9, _data, at=5), once.Eager(kind).run(3, 9, _data, at=5))


@pytest.mark.captured
def test_a_buffer_that_is_written_between_calls() -> None:
    def wrote(m: nn.Module, o: Optimizer) -> None:
        m.get_buffer("0.0.angles").data[0] = 1.5

    ours = once.Optimized("rotary", 3).run(9, wrote, at=4)
    holds(ours, "rotary")
    close(ours, once.Eager("rotary").run(3, 9, wrote, at=4))


@pytest.mark.captured
def test_power_iteration_in_training_is_no_invariant() -> None:
    """Its forward writes the vectors that it reads."""

    def training(run: once.Trained) -> None:
        run.model.train()

    ours, theirs = once.Optimized("spectral norm", 3), once.Eager("spectral norm")
    for run in (ours, theirs):
        training(run)
    ours.run(9)
    close(ours, theirs.run(3, 9))
    (captured,) = ours.step._executor.catalogue.captures
    slots = captured.facts.capture.step.slots
    watched = [slots[i].name for i in captured.programs.kept.watched]
    assert not any(name.endswith(("_u", "_v")) for name in watched)


@pytest.mark.captured
@pytest.mark.parametrize("kind", ["weight norm", "two ways", "fake"])
def test_running_sums_are_whole_whenever_somebody_looks(kind: str) -> None:
    ours, theirs = once.Optimized(kind, 4).run(6), once.Eager(kind).run(4, 4)
    for call in (4, 5):
        theirs.loss(*once.batch(call)).backward()
    names = dict(theirs.model.named_parameters())

    def check(seen: Any) -> None:
        for name, total in seen.items():
            grad = names[name].grad
            wanted = torch.zeros_like(total) if grad is None else grad
            torch.testing.assert_close(total, wanted, atol=2e-6, rtol=1e-5)

    check(ours.step.state_dict()["rank0"]["accumulators"])
    held = ours.step.gradients()
    check(held)
    ours.run(1, first=6)
    theirs.loss(*once.batch(6)).backward()
    check(held)  # views: they show the terms of later calls, too


@pytest.mark.captured
@pytest.mark.parametrize("kind", ["weight norm", "two ways"])
@pytest.mark.parametrize("calls", [1, 2, 6])
def test_a_resumed_window_is_bitwise_the_saved_one(kind: str, calls: int) -> None:
    ours, resumed = once.saved(kind, 4, calls, 9 - calls)
    assert all(map(torch.equal, ours, resumed))


@pytest.mark.captured
@pytest.mark.parametrize("kind", ["weight norm", "fake"])
def test_discarded_flushed_and_longer_windows(kind: str) -> None:
    ours, theirs = once.Optimized(kind, 3).run(2), once.Eager(kind)
    ours.step.discard()
    theirs.losses = list(ours.losses)
    ours.run(2, first=3)
    ours.step.flush()
    ours.step.set_gradient_accumulation_steps(4)
    ours.run(4, first=5)
    for window in ((3, 4), (5, 6, 7, 8)):
        for call in window:
            loss = theirs.loss(*once.batch(call))
            theirs.losses.append(loss.item())
            (loss / len(window)).backward()
        theirs.optimizer.step()
        theirs.optimizer.zero_grad()
        if len(window) == 4:
            break
        # The flush was no call after which the loop's scheduler moved.
    close(ours, theirs)


@pytest.mark.captured
@pytest.mark.parametrize("kind", ["weight norm", "two ways"])
def test_terms_that_do_not_count(kind: str) -> None:
    """A batch that is not finite is left out, as in a loop that looks at every gradient."""
    ours, theirs = once.Optimized(kind, 3, skip_nonfinite=True), once.Eager(kind)
    for window in range(2):
        counted = 0
        for call in range(3 * window, 3 * window + 3):
            x, y = once.batch(call)
            bad = call % 3 == 1
            with once.all_of_it():
                ours.step(x * float("nan") if bad else x, y)
            if not bad:
                theirs.loss(x, y).backward()
                counted += 1
        for p in theirs.model.parameters():
            p.grad = None if p.grad is None else p.grad / counted
        theirs.optimizer.step()
        theirs.optimizer.zero_grad()
    close(ours, theirs)


@pytest.mark.captured
@pytest.mark.parametrize("kind", ["weight norm", "two ways"])
def test_a_k_for_each_optimizer(kind: str) -> None:
    """One for the first layer, one for the rest: the first closes while the other's sums stay open."""

    def made() -> tuple[nn.Sequential, list[torch.optim.SGD]]:
        model = once.model(kind)
        return model, [
            torch.optim.SGD(model[0].parameters(), lr=0.1),
            torch.optim.SGD(model[2:].parameters(), lr=0.05),
        ]

    model, optimizers = made()
    first, second = optimizers

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
        return loss

    step = gradsync_fx.optimize(
        train_step, gradient_accumulation_steps={first: 2, second: 4}, backend="aot_eager"
    )
    plain, plainly = made()
    for call in range(8):
        with once.all_of_it():
            step(*once.batch(call))
        nn.functional.cross_entropy(plain(once.batch(call)[0]), once.batch(call)[1]).backward()
        for optimizer, k in zip(plainly, (2, 4), strict=True):
            if (call + 1) % k == 0:
                for p in optimizer.param_groups[0]["params"]:
                    p.grad /= k
                optimizer.step()
                optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


@pytest.mark.captured
def test_one_micro_step_holds_nothing() -> None:
    ours = once.Optimized("weight norm", 1).run(2)
    assert set(ours.step.programs) == {"boundary"}
    close(ours, once.Eager("weight norm").run(1, 2))


@pytest.mark.captured
def test_left_out_by_name() -> None:
    ours = once.Optimized("weight norm", 3, without=("invariants",)).run(6)
    assert set(ours.step.programs) == {"accumulate", "boundary"}
    close(ours, once.Eager("weight norm").run(3, 6))


def size(run: once.Optimized) -> int:
    """Bytes that are held for a window."""
    with once.all_of_it():
        found = run.step.report().once
    assert found is not None
    return found.bytes


@pytest.mark.captured
def test_too_little_memory_holds_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never an error: what does not fit is computed in every call."""
    everything = once.Optimized("weight norm", 3).run(3)
    most = size(everything)
    monkeypatch.setattr("gradsync_fx.planning.worth.memory_left", lambda device: most / 2)
    ours = once.Optimized("weight norm", 3).run(6)
    assert 0 < size(ours) <= most / 2
    close(ours, once.Eager("weight norm").run(3, 6))
    monkeypatch.setattr("gradsync_fx.planning.worth.memory_left", lambda device: 0.0)
    assert size(once.Optimized("weight norm", 3).run(6)) == 0


@pytest.mark.gloo
@pytest.mark.inductor
@pytest.mark.captured
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("weight norm", {"clip": 0.1}),
        ("two ways", {"reduction": "weighted"}),
        ("fake", {"shard_optimizer": True}),
        ("weight norm", {"skip_nonfinite": True, "reduction": "weighted"}),
        ("weight norm", {"sync_each_batch": True}),
        ("two ways", {"shard_optimizer": True, "overlap_param_gather": True}),
    ],
)
def test_two_ranks_of_which_one_ends_early(
    ranks: Ranks, kind: str, options: dict[str, Any]
) -> None:
    one, other = ranks(once.on_ranks, kind, 3, 8, options)
    assert all(map(torch.equal, one["values"], other["values"]))
    assert max(one["off"], other["off"]) < 2e-6
    hides = options.get("overlap_param_gather", False)
    assert ("prologue" in one["programs"]) is not hides
