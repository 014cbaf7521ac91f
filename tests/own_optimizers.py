"""Optimizers as users write them: what their code looks at beside gradients, settings and state.

COMPILED   the trace sees all of it: parameters are told apart by name, place or attribute; constants are guards
OPAQUE     it does not: attributes that are set, other objects, tables by id, wrappers, containers, clocks
"""

from __future__ import annotations

import collections
import functools
import math
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


SCALE = 0.5
SCALES: dict[str, float] = {"head": 0.5}
TABLE: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()


class Own(Optimizer):
    """SGD whose rate is asked of `rate(i, p, group)`."""

    def __init__(self, params: Any, lr: float = 0.1, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})
        self.t, self.scale = 0, 0.5

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"]

    def begin(self) -> None:
        """What is done before the parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None, factor: float = 1.0) -> Any:
        self.begin()
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    p.add_(p.grad, alpha=-factor * self.rate(i, p, group))


class ByName(Own):
    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * (0.1 if group["param_names"][i].startswith("2.") else 1.0)


class ByPlace(Own):
    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * (0.1 if i >= 2 else 1.0)


class ByAttribute(Own):
    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * getattr(p, "lr_scale", 1.0)


class ByFirst(Own):
    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * (0.1 if p is group["params"][0] else 1.0)


class Constant(Own):
    factor = 0.5

    @property
    def half(self) -> float:
        return self.scale

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * self.half * self.factor * SCALE * math.sqrt(2.0)


class Decorated(Own):
    """A decorator of the user's own around `step` is part of it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return twofold(Own.step)(self)


def twofold(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(self: Any) -> None:
        function(self, factor=0.5)
        function(self, factor=0.25)

    return call


class Counts(Own):
    def begin(self) -> None:
        self.t += 1

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] / self.t


class CountsInClass(Own):
    updates = 0

    def begin(self) -> None:
        type(self).updates += 1

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] / type(self).updates


class ById(Own):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.table = {id(self.param_groups[0]["params"][0]): 0.1}

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * self.table.get(id(p), 1.0)


class ByKey(Own):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.table = dict.fromkeys(self.param_groups[0]["params"][:1], 0.1)

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * self.table.get(p, 1.0)


class ByGlobal(Own):
    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * SCALES["head"] * TABLE.get(p, 1.0)


class Clock(Own):
    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] if time.time() > 0 else 0.0


class Anchored(Own):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.anchors = [p.detach().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step()
        for p, anchor in zip(self.param_groups[0]["params"], self.anchors, strict=True):
            p.lerp_(anchor, 0.1)


class Keeps(Own):
    """Gradients in a list in the state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    held = self.state[p].setdefault("history", [])
                    held.append(p.grad.clone())
                    del held[:-2]
                    p.add_(sum(held) / len(held), alpha=-group["lr"])


class Nested(Own):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.param_groups[0]["cfg"] = {"n": 0}

    def begin(self) -> None:
        self.param_groups[0]["cfg"]["n"] += 1

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] / group["cfg"]["n"]


class Flagged(Own):
    """A flag in the group that the update turns."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr, odd=False)

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        if i == 0:
            group["odd"] = not group["odd"]
        return group["lr"] * (0.5 if group["odd"] else 1.0)


class StateByText(Own):
    def begin(self) -> None:
        self.state["count"] = self.state.get("count", 0) + 1  # type: ignore[index, call-overload]

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] / self.state["count"]  # type: ignore[index]


class Trainable(Own):
    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] if p.requires_grad and isinstance(p, nn.Parameter) else 0.0


class Marks(Own):
    """Sets an attribute of each parameter."""

    def rate(self, i: int, p: Any, group: dict[str, Any]) -> Any:
        p.updates = getattr(p, "updates", 0) + 1
        return group["lr"] / p.updates


class Picky(Own):
    def rate(self, i: int, p: Any, group: dict[str, Any]) -> Any:
        return group["lr"] * (0.5 if p.grad.sum() > 0 else 1.0)


class Noisy(Own):
    def rate(self, i: int, p: Any, group: dict[str, Any]) -> Any:
        p.grad.add_(torch.randn_like(p.grad), alpha=1e-3)
        return group["lr"]


class Delegate(Optimizer):
    """As in apex and timm: no `__init__` of torch's, groups and defaults of the inner one."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state = collections.defaultdict(dict)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class Lookahead(Delegate):
    def __init__(self, inner: Optimizer, every: int = 2) -> None:
        super().__init__(inner)
        self.every, self.n = every, 0
        self.slow = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]

    def step(self, closure: Any = None) -> Any:
        self.inner.step()
        self.n += 1
        if self.n % self.every == 0:
            with torch.no_grad():
                for group, slow in zip(self.param_groups, self.slow, strict=True):
                    for p, q in zip(group["params"], slow, strict=True):
                        p.copy_(q.add_(p - q, alpha=0.5))


class NoGroups(Optimizer):
    """Nothing of torch's but the class."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class Several(Optimizer):
    """Two optimizers in one, with the groups of the first."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts, self.defaults, self.state = parts, parts[0].defaults, parts[0].state
        self.param_groups = parts[0].param_groups

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)


class HoldsModel(Optimizer):
    def __init__(self, model: nn.Module, lr: float = 0.1) -> None:
        super().__init__(model.parameters(), {"lr": lr})
        self.model = model

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for p in self.model.parameters():
            if p.grad is not None:
                p.add_(p.grad, alpha=-self.param_groups[0]["lr"])


class Centralised(torch.optim.AdamW):
    """Changes gradients, then does what torch's does."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None and p.dim() > 1:
                        p.grad.sub_(p.grad.mean(1, keepdim=True))
        return super().step(closure)


def hooked(model: nn.Module) -> Optimizer:
    """A constraint of the weights, as a hook after each update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def constrain(*args: Any) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.2, 0.2)

    optimizer.register_step_post_hook(constrain)
    return optimizer


def replaced(model: nn.Module) -> Optimizer:
    """An optimizer whose `step` somebody wrapped."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = optimizer.step

    def twice() -> None:
        plain()
        plain()

    optimizer.step = twice  # type: ignore[method-assign, assignment]
    return optimizer


def momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


Make = Callable[[nn.Module], Optimizer]
COMPILED: dict[str, Make] = {
    "name": lambda m: ByName(m.named_parameters()),
    "place": lambda m: ByPlace(m.parameters()),
    "attribute": lambda m: ByAttribute(m.parameters()),
    "first": lambda m: ByFirst(m.parameters()),
    "constants": lambda m: Constant(m.parameters()),
    "subclass": lambda m: Centralised(m.parameters(), lr=1e-2),
    "decorator": lambda m: Decorated(m.parameters()),
}
OPAQUE: dict[str, Make] = {
    "counts": lambda m: Counts(m.parameters()),
    "class": lambda m: type("Fresh", (CountsInClass,), {"updates": 0})(m.parameters()),
    "id": lambda m: ById(m.parameters()),
    "key": lambda m: ByKey(m.parameters()),
    "global": lambda m: ByGlobal(m.parameters()),
    "clock": lambda m: Clock(m.parameters()),
    "anchors": lambda m: Anchored(m.parameters()),
    "list": lambda m: Keeps(m.parameters()),
    "nested": lambda m: Nested(m.parameters()),
    "flag": lambda m: Flagged(m.parameters()),
    "text": lambda m: StateByText(m.parameters()),
    "trainable": lambda m: Trainable(m.parameters()),
    "marks": lambda m: Marks(m.parameters()),
    "values": lambda m: Picky(m.parameters()),
    "wrapper": lambda m: Delegate(momentum(m)),
    "lookahead": lambda m: Lookahead(momentum(m)),
    "model": HoldsModel,
    "no groups": lambda m: NoGroups(momentum(m)),
    "several": lambda m: Several(momentum(m[0]), torch.optim.Adam(m[2].parameters(), lr=1e-2)),  # type: ignore[index]
    "hook": hooked,
    "replaced": replaced,
}
