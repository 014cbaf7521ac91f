"""What the windows of a sketched step should leave: its whole graph evaluated at every call, by a few lines of our own.

At a call that closes a part, a marker of that part's leaves gives the window's gradient, and its update is made by the
optimizer itself, in eager PyTorch. At any other call an update leaves its parameters as they are. All ranks hold the
same: a sum over ranks is a product with their number (a power of two, and so exact).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node, map_arg

from gradsync_fx.ir import ops
from tests.fuzz.graphs import Made
from tests.fuzz.roles import Roles
from tests.optimizers import OPTIMIZERS


@dataclass
class Window:
    """One part's: micro-steps and their weights. sums: by leaf, in the accumulator's dtype."""

    calls: int = 0
    weight: float = 0.0
    sums: dict[int, Tensor] = field(default_factory=dict)


class Whole:
    """Evaluates calls and tails; `tensors` are the inputs by position, as they are now."""

    def __init__(self, made: Made, roles: Roles) -> None:
        self.made, self.roles, self.sketch = made, roles, made.sketch
        capture = made.capture
        held = [*capture.parameters.values(), *capture.buffers.values()]
        self.tensors = [t.detach().clone() for t in held]
        self.count = len(self.tensors)
        self.parameters = [
            torch.nn.Parameter(t.detach().clone()) for t in capture.parameters.values()
        ]
        self.optimizers = []
        for name, optimizer in zip(made.rules, capture.optimizers, strict=True):
            mine = [
                twin
                for twin, p in zip(self.parameters, capture.parameters.values(), strict=True)
                if any(p is q for q in optimizer.param_groups[0]["params"])
            ]
            self.optimizers.append(OPTIMIZERS[name](mine))
        self.windows = {part: Window() for part in roles.parts}
        self.metric = torch.nan
        self.stepped: list[float] = []

    @property
    def weighing(self) -> bool:
        return self.sketch.reduction == "weighted" or self.sketch.finite

    def begin(self, data: list[Tensor]) -> None:
        """The user's own tensors of the next call."""
        self.tensors[self.count :] = [t.clone() for t in data]

    def call(self, closing: frozenset[int]) -> list[Any]:
        """One micro-step; returns what the step returns."""
        weight = self._weight() if self.weighing else 1.0
        for window in self.windows.values():
            window.calls += 1
            window.weight += weight
        seen: set[int] = set()

        def at(leaf: int, gradient: Tensor) -> Tensor:
            part = self.roles.part_of_leaf(leaf)
            term = self._term(leaf, gradient, weight)
            if leaf in seen:  # computed again, in a window of one micro-step
                return self._finished(leaf, term, gradient.dtype)
            seen.add(leaf)
            sums = self.windows[part].sums
            sums[leaf] = sums[leaf] + term if leaf in sums else term
            return self._finished(leaf, sums[leaf], gradient.dtype) if part in closing else gradient

        env = self._evaluate(at, closing)
        self._write(env, closing, each_call=True)
        self._close(closing)
        self._step_host(env, closing, each_call=True)
        return [self._given(n, env, closing) for n in self.roles.results]

    def tail(self, closing: frozenset[int]) -> list[Any]:
        """An update of what is summed; returns the outputs that it can give."""

        def at(leaf: int, gradient: Tensor) -> Tensor:
            part = self.roles.part_of_leaf(leaf)
            if part not in closing:
                return gradient
            return self._finished(leaf, self.windows[part].sums[leaf], gradient.dtype)

        env = self._evaluate(at, closing)
        self._write(env, closing, each_call=False)
        self._close(closing)
        self._step_host(env, closing, each_call=False)
        nodes = [n for n in self.roles.results if isinstance(n, Node)]
        nodes = [n for n in nodes if n.target is not ops.NOTE and self.roles.tail_gives(n)]
        return [self._given(n, env, closing) for n in nodes]

    def _step_host(self, env: dict[Node, Any], closing: frozenset[int], *, each_call: bool) -> None:
        """The scheduler, after an update: with the latest value that a micro-step, or this update, can give."""
        for value in self.made.noted.get(ops.Role.HOST, []):
            if each_call or self.roles.at_the_boundary(value):
                self.metric = float(self._given(value, env, closing))
            if closing & {self.roles.part_of_leaf(leaf) for leaf in self.roles.leaf.values()}:
                self.stepped.append(self.metric)

    def _weight(self) -> float:
        """This call's: what the step says, and nothing where a gradient, a loss or it itself is not finite."""
        gradients: list[Tensor] = []

        def at(leaf: int, gradient: Tensor) -> Tensor:
            gradients.append(gradient)
            return gradient

        env = self._evaluate(at, frozenset())
        noted = self.made.noted
        weight = env[noted[ops.Role.WEIGHT][0]] if self.sketch.reduction == "weighted" else None
        values = [*gradients, *(env[n] for n in noted.get(ops.Role.LOSS, []))]
        values += [weight] if weight is not None else []
        if self.sketch.finite and not all(bool(v.isfinite().all()) for v in values):
            return 0.0
        return 1.0 if weight is None else float(weight)

    def _term(self, leaf: int, gradient: Tensor, weight: float) -> Tensor:
        wide = torch.float32 if gradient.dtype is torch.bfloat16 else gradient.dtype
        term = gradient.to(wide, copy=True)  # it may be an input, which is written later
        if self.sketch.finite and not weight:
            return torch.zeros_like(term)
        if self.sketch.reduction == "weighted":
            term = (term * torch.tensor(weight, dtype=torch.float64)).to(wide)
        return term

    def running(self, leaf: int) -> Tensor | float:
        """What the leaf's accumulator should hold."""
        total = self.windows[self.roles.part_of_leaf(leaf)].sums.get(leaf)
        if total is None:
            return 0.0
        ours = self.made.synced[leaf] != "flat"
        return total * self.sketch.world if self.sketch.every and ours else total

    def _finished(self, leaf: int, total: Tensor, dtype: torch.dtype) -> Tensor:
        """The window's gradient from its sum. The ranks hold the same: their mean is one rank's own."""
        if self.sketch.reduction == "sum":
            return total.to(dtype)
        window = self.windows[self.roles.part_of_leaf(leaf)]
        return (total / (window.weight if self.weighing else window.calls)).to(dtype)

    def _evaluate(
        self, at: Callable[[int, Tensor], Tensor], closing: frozenset[int]
    ) -> dict[Node, Any]:
        env: dict[Node, Any] = {}
        inputs = iter(self.tensors)
        for node in self.made.capture.step.module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(inputs)
                continue
            if node.op == "output" or node.target is ops.NOTE or node not in self.roles.live:
                continue
            args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
            if node.target is ops.LEAF_GRAD:
                leaf, window = self.made.markers[node]
                env[node] = at(leaf, args[0]).clone() if window else args[0]
            elif node.target is ops.UPDATE:
                part = self.roles.part(node)
                env[node] = self._update(args[0], args[2], args[3]) if part in closing else args[2]
            elif node in self.roles.writes:
                env[node] = args[0]
            else:
                env[node] = alone(node.target, args, kwargs, self.sketch.world)
        return env

    def _update(self, which: int, values: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        optimizer = self.optimizers[which]
        mine = optimizer.param_groups[0]["params"]
        for p, value, gradient in zip(mine, values, gradients, strict=True):
            p.data = value.clone()
            p.grad = gradient.clone()
        optimizer.step()
        return [p.detach().clone() for p in mine]

    def _write(self, env: dict[Node, Any], closing: frozenset[int], *, each_call: bool) -> None:
        values = []
        for write in self.roles.writes:
            later = self.roles.written_at_the_boundary(write)
            if (not self.roles.waits(write, closing)) if later else each_call:
                values.append((env[write.args[0]], env[write.args[1]].clone()))
        for target, value in values:
            target.copy_(value)

    def _close(self, closing: frozenset[int]) -> None:
        for part in closing:
            self.windows[part] = Window()

    def _given(self, node: Any, env: dict[Node, Any], closing: frozenset[int]) -> Any:
        """An output as a program that closes these parts has it."""
        if not isinstance(node, Node) or node.target is ops.NOTE:
            return None
        value = env[node]
        held = any(value is t for t in self.tensors)  # as it is: it would have been changed
        if self.roles.at_the_boundary(node) and self.roles.waits(node, closing) and not held:
            return torch.full_like(value, torch.nan if value.is_floating_point() else 0)
        return value


def alone(target: Any, args: Any, kwargs: Any, world: int) -> Any:
    """A call of ATen, or of a collective in which all ranks hold the same."""
    if target is ops.ALL_REDUCE:
        assert args[1] == "sum"
        return args[0] * world
    if target is torch.ops._c10d_functional.all_gather_into_tensor.default:
        return torch.cat([args[0]] * world)
    return args[0] if target is ops.WAIT else target(*args, **kwargs)
