"""Code for each row of gradsync_fx/capture/effects.py: what a step does, and what plain eager accumulation makes of it.

A row's code is the same for both. Its reference runs it at its place on every call, or once per update, as the rule
says: nothing else tells the two apart.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gradsync_fx.capture.effects import EFFECTS, Effect, Rule
from tests.own_optimizers import Counts


FIRST, FORWARD, BETWEEN, AFTER = "first", "forward", "between", "after"
Run = Callable[["World", Tensor, Tensor], Any]


class Net(nn.Module):
    """An MLP with what effects are written to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 16), nn.Linear(16, 1)
        self.codes = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.rows = nn.Embedding(5, 8, max_norm=0.5)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("noise", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(x + self.codes)))


class World:
    """What a training script holds."""

    def __init__(self, prepare: Callable[[World], object] = lambda world: None) -> None:
        torch.manual_seed(7)
        self.net, self.slow = Net(), nn.Linear(8, 16)
        self.net.rows.requires_grad_(False)
        self.slow.requires_grad_(False)
        trained = [*self.net.inner.parameters(), *self.net.head.parameters()]
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.5)
        self.scheduler: Any = None
        self.total, self.calls = torch.zeros(()), 0
        self.updates, self.count = torch.zeros(()), 0
        self.average = torch.zeros(16)
        self.log, self.sizes = list[float](), list[int]()
        prepare(self)

    def observed(self) -> dict[str, Any]:
        """All that an effect can have changed."""
        found: dict[str, Any] = {n: t.detach().clone() for n, t in self.net.state_dict().items()}
        found |= {f"slow.{n}": t.clone() for n, t in self.slow.state_dict().items()}
        found |= {"total": self.total.clone(), "calls": self.calls, "sizes": list(self.sizes)}
        found |= {"updates": self.updates.clone(), "count": self.count}
        found |= {"average": self.average.clone()}
        found |= {"log": torch.tensor(self.log), "rate": self.optimizer.param_groups[0]["lr"]}
        return found


@dataclass(frozen=True)
class Tried:
    """A row with its code."""

    effect: Effect
    place: str
    run: Run
    prepare: Callable[[World], object]
    loss: Callable[[World, Tensor, Tensor], Tensor]
    backward: Callable[[World, Tensor], object]

    @property
    def name(self) -> str:
        return self.effect.name


def mse(world: World, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(world.net(x), y)


def backward(world: World, loss: Tensor) -> None:
    loss.backward()


def by_hand(world: World, loss: Tensor) -> None:
    trained = [p for group in world.optimizer.param_groups for p in group["params"]]
    for p, g in zip(trained, torch.autograd.grad(loss, trained), strict=True):
        p.grad = g


ROWS = {effect.name: effect for effect in EFFECTS}
TRIED: list[Tried] = []


def tries(
    name: str,
    place: str,
    prepare: Callable[[World], object] = lambda world: None,
    loss: Callable[[World, Tensor, Tensor], Tensor] = mse,
    backward: Callable[[World, Tensor], object] = backward,
) -> Callable[[Run], Run]:
    def add(run: Run) -> Run:
        TRIED.append(Tried(ROWS[name], place, run, prepare, loss, backward))
        return run

    return add


@tries("buffer from data", FIRST)
def buffer_from_data(world: World, x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        world.net.mean.lerp_(x.mean(0), 0.1)  # type: ignore[union-attr, operator]


@tries("buffer from gradients", BETWEEN)
def buffer_from_gradients(world: World, x: Tensor, y: Tensor) -> None:
    world.net.noise.copy_(world.net.head.weight.grad.square().mean())  # type: ignore[union-attr, operator]


@tries("parameter from data", FIRST)
def parameter_from_data(world: World, x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        world.net.codes.lerp_(x.mean(0), 0.1)


@tries("parameter from itself", AFTER)
def parameter_from_itself(world: World, x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        world.net.head.weight.mul_(0.9).clamp_(-0.2, 0.2)


@tries("write past autograd", BETWEEN)
def write_past_autograd(world: World, x: Tensor, y: Tensor) -> None:
    world.net.head.weight.data.mul_(0.9)
    world.net.inner.weight.detach().clamp_(-0.3, 0.3)


@tries("average of the weights", AFTER)
def average(world: World, x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        world.slow.weight.lerp_(world.net.inner.weight, 0.1)
        world.slow.bias.copy_(0.9 * world.slow.bias + 0.1 * world.net.inner.bias)


@tries("tensor in another's place", AFTER)
def put_in_place(world: World, x: Tensor, y: Tensor) -> None:
    world.average = 0.9 * world.average + 0.1 * world.net.inner.bias.detach()


def embedded(world: World, x: Tensor, y: Tensor) -> Tensor:
    rows = (x[:, 0].abs() * 3).long().clamp(0, 4)
    return F.mse_loss(world.net(x + world.net.rows(rows)), y)


@tries("renormed embedding", FIRST, loss=embedded)
def renormed(world: World, x: Tensor, y: Tensor) -> None: ...


@tries("input", FIRST)
def changed_input(world: World, x: Tensor, y: Tensor) -> None:
    x.mul_(0.5).add_(0.1)


@tries("tensor outside of the model", AFTER)
def outside(world: World, x: Tensor, y: Tensor) -> None:
    world.total += y.mean()


@tries("gradient of an input", FIRST)  # the scenario's data asks for it
def input_gradient(world: World, x: Tensor, y: Tensor) -> None: ...


@tries("clipping", BETWEEN)
def clipping(world: World, x: Tensor, y: Tensor) -> Tensor:
    return nn.utils.clip_grad_norm_(world.net.parameters(), 0.05)


@tries("gradients changed", BETWEEN)
def gradients_changed(world: World, x: Tensor, y: Tensor) -> None:
    head, inner = world.net.head.weight, world.net.inner.weight
    head.grad = head.grad.sign() * 0.01  # type: ignore[union-attr]
    inner.grad.mul_(0.5)  # type: ignore[union-attr]


@tries("gradients that are values", BETWEEN, backward=by_hand)
def gradients_that_are_values(world: World, x: Tensor, y: Tensor) -> None: ...


@tries("gradients taken away", AFTER)
def taken_away(world: World, x: Tensor, y: Tensor) -> None:
    world.net.zero_grad()
    world.net.head.weight.grad = None


class Clearing(torch.optim.SGD):
    """Counts in a tensor how often gradients are dropped."""

    def __init__(self, params: Any, cleared: Tensor, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self.cleared = cleared

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.cleared += 1


def clearing(world: World) -> None:
    trained = world.optimizer.param_groups[0]["params"]
    world.optimizer = Clearing(trained, world.slow.bias.data, lr=0.1, momentum=0.5)


@tries("zero_grad of one's own", AFTER, clearing)
def own_zero_grad(world: World, x: Tensor, y: Tensor) -> None: ...


@tries("hook on a parameter", FIRST, lambda w: w.net.head.weight.register_hook(lambda g: g))
def hooked(world: World, x: Tensor, y: Tensor) -> None: ...


@tries("update", AFTER)
def update(world: World, x: Tensor, y: Tensor) -> None: ...


def own_optimizer(world: World) -> None:
    world.optimizer = Counts(world.optimizer.param_groups[0]["params"], lr=0.1)


@tries("update that no trace sees", AFTER, own_optimizer)
def opaque_update(world: World, x: Tensor, y: Tensor) -> None: ...


def constrained(world: World) -> None:
    def constrain(*args: Any) -> None:
        with torch.no_grad():
            world.net.head.weight.clamp_(-0.1, 0.1)

    world.optimizer.register_step_post_hook(constrain)


@tries("hook of the update", AFTER, constrained)
def hooked_update(world: World, x: Tensor, y: Tensor) -> None: ...


def scheduled(world: World) -> None:
    world.scheduler = torch.optim.lr_scheduler.StepLR(world.optimizer, 1, 0.5)


@tries("scheduler", AFTER, scheduled)
def scheduler(world: World, x: Tensor, y: Tensor) -> None:
    world.scheduler.step()


@tries("setting of the optimizer", FIRST)
def setting(world: World, x: Tensor, y: Tensor) -> None:
    for group in world.optimizer.param_groups:
        group["lr"] = 0.05


SCALER = torch.amp.GradScaler("cpu")


@tries("scaled backward", FORWARD)
def scaled(world: World, x: Tensor, y: Tensor) -> None:
    SCALER.scale(y.mean())


def noisy(world: World, x: Tensor, y: Tensor) -> Tensor:
    dropped = F.dropout(x, 0.2) + 0.1 * torch.randn_like(x)
    return F.mse_loss(world.net(dropped), y)


@tries("random numbers of forward", FIRST, loss=noisy)
def random_forward(world: World, x: Tensor, y: Tensor) -> None: ...


@tries("noise in gradients", BETWEEN)
def noise_in_gradients(world: World, x: Tensor, y: Tensor) -> None:
    gradient = world.net.head.weight.grad
    gradient.add_(torch.randn_like(gradient), alpha=0.1)  # type: ignore[union-attr, arg-type]


@tries("number of the step", FIRST)
def number(world: World, x: Tensor, y: Tensor) -> None:
    world.calls += 1


@tries("number of the update", AFTER)
def number_of_the_update(world: World, x: Tensor, y: Tensor) -> None:
    world.count += 1
    with torch.no_grad():
        world.slow.weight.lerp_(world.net.inner.weight, 1 / (1 + world.count))


@tries("tensor that counts updates", AFTER)
def tensor_that_counts(world: World, x: Tensor, y: Tensor) -> None:
    world.updates.add_(1)
    with torch.no_grad():
        world.slow.bias.lerp_(world.net.inner.bias, 1 / (1 + world.updates))


@tries("list", FORWARD)
def appended(world: World, x: Tensor, y: Tensor) -> None:
    world.log.append(y.mean().item())


@tries("output", FORWARD)
def output(world: World, x: Tensor, y: Tensor) -> None:
    print(f"mean {y.mean().item():.4f}")


@tries("metric", FORWARD)
def metric(world: World, x: Tensor, y: Tensor) -> None:
    kept(world.sizes, y.detach())


def kept(sizes: list[int], tensor: Tensor) -> None:
    """What Dynamo cannot follow."""
    sizes.append(len(pickle.dumps(tensor)))


@tries("gradients asked for or not", FIRST)
def toggled(world: World, x: Tensor, y: Tensor) -> None:
    world.net.inner.requires_grad_(False)
    world.net.inner.requires_grad_(True)


@tries("branch on a value", FORWARD)
def branch(world: World, x: Tensor, y: Tensor) -> None:
    if y.mean().item() > 1e9:
        world.total += 1


@tries("helper that cannot be traced", BETWEEN)
def helper(world: World, x: Tensor, y: Tensor) -> None:
    clip_by_size(world.net)


def clip_by_size(net: nn.Module) -> None:
    limit = len(pickle.dumps(net.head.weight.shape)) * 1e-3  # type: ignore[union-attr]
    nn.utils.clip_grad_norm_(net.parameters(), limit)


@tries("collective of data", FIRST)
def collective_of_data(world: World, x: Tensor, y: Tensor) -> None:
    if dist.is_initialized():
        mean = y.mean().detach().clone()
        dist.all_reduce(mean)
        world.total += mean


@tries("collective of gradients", BETWEEN)
def collective_of_gradients(world: World, x: Tensor, y: Tensor) -> None:
    if dist.is_initialized():
        norm = world.net.head.weight.grad.norm().detach()  # type: ignore[union-attr]
        dist.all_reduce(norm)
        world.net.noise.copy_(norm)  # type: ignore[operator]


def step_of(rows: Sequence[Tried]) -> Callable[..., Any]:
    """An ordinary step with all of these effects in it."""
    loss_of = next((r.loss for r in rows if r.loss is not mse), mse)
    go_back = next((r.backward for r in rows if r.backward is not backward), backward)
    first, forward, between, after = (
        [r.run for r in rows if r.place == place] for place in (FIRST, FORWARD, BETWEEN, AFTER)
    )

    def step(world: World, optimizer: Any, x: Tensor, y: Tensor) -> tuple[Tensor, list[Any]]:
        found = [run(world, x, y) for run in first]
        loss = loss_of(world, x, y)
        found += [run(world, x, y) for run in forward]
        go_back(world, loss)
        found += [run(world, x, y) for run in between]
        optimizer.step()
        found += [run(world, x, y) for run in after]
        optimizer.zero_grad()
        return loss, found

    return step


class Plain:
    """The same step in plain eager PyTorch, its parts on every call or once per update, as the rules say."""

    def __init__(self, world: World, rows: Sequence[Tried], ranks: int) -> None:
        self.world, self.rows, self.ranks = world, rows, ranks
        self.loss_of = next((r.loss for r in rows if r.loss is not mse), mse)
        self.go_back = next((r.backward for r in rows if r.backward is not backward), backward)
        self.trained = [p for group in world.optimizer.param_groups for p in group["params"]]
        self.sums, self.calls = [torch.zeros_like(p) for p in self.trained], 0

    def call(self, x: Tensor, y: Tensor) -> Tensor:
        self._run(FIRST, Rule.EVERY_CALL, Rule.EAGERLY, x, y)
        loss = self.loss_of(self.world, x, y)
        self._run(FORWARD, Rule.EVERY_CALL, Rule.EAGERLY, Rule.AFTER, x, y)
        self.go_back(self.world, loss)
        for p, total in zip(self.trained, self.sums, strict=True):
            if p.grad is not None:
                total += p.grad
            p.grad = None
        self.calls += 1
        self._run(AFTER, Rule.EVERY_CALL, Rule.AFTER, x, y)
        self.last = x, y
        return loss.detach()

    def update(self) -> list[Any]:
        for p, total in zip(self.trained, self.sums, strict=True):
            if self.ranks > 1:
                dist.all_reduce(total)
            p.grad = total / (self.calls * self.ranks)
        found = self._run(BETWEEN, Rule.PER_UPDATE, Rule.EAGERLY, *self.last)
        self.world.optimizer.step()
        found += self._run(AFTER, Rule.PER_UPDATE, Rule.PER_WINDOW, *self.last)
        self.world.optimizer.zero_grad()
        self.sums, self.calls = [torch.zeros_like(p) for p in self.trained], 0
        return found

    def _run(self, place: str, *given: Any) -> list[Any]:
        *rules, x, y = given
        return [
            r.run(self.world, x, y)
            for r in self.rows
            if r.place == place and r.effect.rule in rules
        ]
