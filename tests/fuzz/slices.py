"""Plays a sketch with the library's analysis and passes, program by program, and compares with its whole graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

import gradsync_fx
from gradsync_fx.ir import ops
from gradsync_fx.ir.program import Kind, Program, output_values, writes
from gradsync_fx.options import Options
from gradsync_fx.runtime.accumulators import Accumulators
from gradsync_fx.runtime.capture_cache import Catalogue
from gradsync_fx.runtime.captured_step import CapturedStep
from gradsync_fx.runtime.consistency import Integrity
from tests.fuzz.graphs import HAND, SHAPES, Maker, Sketch
from tests.fuzz.roles import Roles
from tests.fuzz.whole import Whole, alone


class Alone(Interpreter):
    """Runs a program on one of several ranks that all hold the same."""

    def __init__(self, module: GraphModule, world: int) -> None:
        super().__init__(module)
        self._world = world

    def run_node(self, n: Node) -> Any:
        """Every node's value has the form that its fake value promised."""
        value = super().run_node(n)
        if isinstance(value, Tensor) and "val" in n.meta:
            found, told = (f"{t.dtype} {tuple(t.shape)}" for t in (value, n.meta["val"]))
            assert found == told, f"{n.name} ({n.target}): {found}, its fake value: {told}"
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return alone(target, args, kwargs, self._world)


@torch.no_grad()  # outputs may be views of parameters
def play(sketch: Sketch) -> None:
    """Raises `AssertionError` where a program breaks the specification."""
    made = Maker(sketch).made()
    roles = Roles(made)
    steps: Any = 1
    if roles.apart:
        steps = dict.fromkeys(made.capture.optimizers, 2)
    elif any(event != ("call", 1) for event in sketch.script):
        steps = 2
    options = Options(
        gradient_accumulation_steps=steps,
        reduction=sketch.reduction,
        skip_nonfinite=sketch.finite,
        sync_each_batch=sketch.every,
        bucket_cap_mb=sketch.cap,
        backend=lambda module, inputs: lambda *args: Alone(module, sketch.world).run(*args),
    )
    accumulators = Accumulators(len(options.steps))
    catalogue = Catalogue(accumulators, Integrity(), simulated=sketch.world)
    before = made.capture.step.structure()
    if (sketch.finite or sketch.reduction == "weighted") and roles.weights_come_late:
        with pytest.raises(gradsync_fx.CaptureError):
            catalogue.admit(made.capture, options)
        return
    if options.accumulates and roles.read_early:
        with pytest.raises(gradsync_fx.ReadBeforeBoundaryError):
            catalogue.admit(made.capture, options)
        return
    captured, _ = catalogue.admit(made.capture, options)
    Windows(Whole(made, roles), captured, accumulators).play()
    assert made.capture.step.structure() == before, "a pass edited the step"


class Windows:
    """Both ways side by side."""

    def __init__(self, whole: Whole, captured: CapturedStep, accumulators: Accumulators) -> None:
        self.whole, self.captured, self.accumulators = whole, captured, accumulators
        self.sketch, self.roles = whole.sketch, whole.roles
        self.events = 0
        capture = captured.facts.capture
        self.held: list[Tensor] = [*capture.parameters.values(), *capture.buffers.values()]
        self.numbers = torch.Generator().manual_seed(1)
        self.own = [self._draw(s, bad=False) for s in self.sketch.data]
        whole.begin(self.own)
        coarsest = max(dtype for _, dtype in self.sketch.parameters)
        self.tolerance = (1e-7, 1e-3, 1e-1)[coarsest]

    def _draw(self, shape: int, *, bad: bool) -> Tensor:
        value = torch.randn(SHAPES[shape], generator=self.numbers, dtype=torch.float64)
        return value * torch.inf if bad else value

    def play(self) -> None:
        for i, (what, bits) in enumerate(self.sketch.script):
            closing = frozenset(part for part in self.roles.parts if bits >> part & 1)
            if what == "call":
                self._call(closing, f"event {i + 1}", bad=bool(self.sketch.bad >> i & 1))
            elif closing and all(self._has_terms(part) for part in closing):
                self._tail(closing)

    def _has_terms(self, part: int) -> bool:
        window = self.whole.windows[part]
        return bool(window.weight if self.whole.weighing else window.calls)

    def _call(self, closing: frozenset[int], where: str, *, bad: bool) -> None:
        if self.whole.weighing and not all(self._has_terms(part) for part in closing):
            closing = frozenset()  # whether there will be anything to update with is not known
        first = self.whole.count
        written = {w.args[0] for w in self.roles.writes}
        mine = [holder not in written for holder in list(self.roles.kinds)[first:]]
        self.own = [
            self._draw(shape, bad=bad) if fresh else held
            for shape, fresh, held in zip(self.sketch.data, mine, self.own, strict=True)
        ]
        theirs = zip(mine, self.own, self.whole.tensors[first:], strict=True)
        self.whole.begin([new if fresh else held for fresh, new, held in theirs])
        given = self.captured.micro_step([*self.held, *self.own], closing, self._divisors())
        self.accumulators.closed(closing)
        wanted = self.whole.call(closing)
        self._compare(given, wanted, f"{where}, a call that closes {sorted(closing)}")
        self._check(self.captured.programs.build(closing), closing)

    def _tail(self, closing: frozenset[int]) -> None:
        self.accumulators.fold()
        given = self.captured.tail(closing, self._divisors(calls=0))
        self.accumulators.closed(closing)
        wanted = self.whole.tail(closing)
        self._compare(given, wanted, f"tail of {sorted(closing)}")

    def _divisors(self, calls: int = 1) -> dict[tuple[str, int], float]:
        found = {}
        for part, window in self.whole.windows.items():
            total = 1.0 if self.sketch.reduction == "sum" else float(window.calls + calls)
            found["ranks", part], found["local", part] = total * self.sketch.world, total
        return found

    def _compare(self, given: list[Any], wanted: list[Any], where: str) -> None:
        assert len(given) == len(wanted), f"{where}: {len(given)} outputs, not {len(wanted)}"
        for i, (a, b) in enumerate(zip(given, wanted, strict=True)):
            self._close(a, b, f"{where}, output {i}")
        tensors = [*self.held, *self.own]
        for i, (a, b) in enumerate(zip(tensors, self.whole.tensors, strict=True)):
            self._close(a.detach(), b, f"{where}, {self.captured.facts.capture.step.slots[i].name}")
        # Terms of one call may wait for the next one's, where sums are taken early.
        self.events += 1
        looks = not self.captured.programs.kept.deferred or self.events % 2 == 0
        if looks:
            self.accumulators.fold()
        for leaf in self.roles.leaf.values() if looks else ():
            total = self.accumulators.sums[self.captured.facts.capture.step.leaves[leaf].name]
            self._close(total, self.whole.running(leaf), f"{where}, sum of leaf {leaf}")
        for call in self.captured.facts.capture.host_calls:
            self._close(call.owner.seen, self.whole.stepped, f"{where}, metrics")
        for i, (mine, theirs) in enumerate(
            zip(self.captured.facts.capture.optimizers, self.whole.optimizers, strict=True)
        ):
            a_all, b_all = mine.state_dict()["state"], theirs.state_dict()["state"]
            assert a_all.keys() == b_all.keys(), f"{where}, state of optimizer {i}"
            for p, state in a_all.items():
                for key, value in state.items():
                    self._close(value, b_all[p][key], f"{where}, {key} of optimizer {i}")

    def _close(self, a: Any, b: Any, say: str) -> None:
        if b is None:
            assert a is None, say
            return
        if isinstance(a, Tensor):
            b = torch.as_tensor(b, dtype=a.dtype).expand_as(a) if not isinstance(b, Tensor) else b
        torch.testing.assert_close(
            a, b, atol=self.tolerance, rtol=self.tolerance, equal_nan=True,
            msg=lambda text: f"{say}: {text}",
        )  # fmt: skip

    def _check(self, program: Program, closing: frozenset[int]) -> None:
        """What can be read off a program: what it writes, what it reduces, and that nothing is left of the markers."""
        module = program.module
        module.graph.lint()
        nodes = list(module.graph.nodes)
        assert not any(n.target in (ops.LEAF_GRAD, ops.UPDATE, ops.NOTE) for n in nodes)
        assert len(output_values(module)) >= len(self.roles.results)
        holders = module.graph.find_nodes(op="placeholder")
        kind = {n: s.kind for n, s in zip(holders, program.slots, strict=True)}
        if closing:
            return
        allowed = {Kind.ACCUMULATOR, Kind.WEIGHT, Kind.BUFFER, Kind.DATA}
        if any(not self.roles.written_at_the_boundary(w) for w in self.roles.writes):
            allowed.add(Kind.PARAMETER)  # the forward writes it
        assert {kind[w.args[0]] for w in writes(module)} <= allowed  # type: ignore[index]
        assert Kind.STATE not in kind.values()
        groups = [n.args[2] for n in nodes if n.target is ops.ALL_REDUCE]
        free = sum(
            1
            for n in self.whole.made.capture.step.module.graph.nodes
            if n.target is ops.ALL_REDUCE and not self.roles.of[n].gradient
        )
        if not self.sketch.every:
            assert set(groups) <= {HAND}
            assert len(groups) <= free
