"""Optimizers with random habits: what their code looks at, and where it keeps things, beside gradients and settings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


# What one may look at or keep, and so whether a trace can see it all is left to be found.
HABITS = (
    "momentum",  # a tensor in the state
    "step",  # a number in the state
    "tensor step",  # a counter that is a tensor
    "history",  # a list of tensors in the state
    "cfg",  # a dictionary in the group
    "group count",  # a number in the group that the update changes
    "flag",  # a flag in the group that the update turns
    "attribute",  # a count on the optimizer itself
    "setting",  # a constant on the optimizer itself
    "class",  # a constant of its class
    "place",  # enumerate
    "first",  # identity of the first parameter
    "mark",  # an attribute of a parameter
    "id",  # a table by id
    "shape",  # dimensions
    "value",  # a branch on a gradient's values
    "edit",  # gradients changed in place
    "twice",  # a second loop over the parameters
    "model",  # the model's own list of parameters
    "decay",  # the parameter itself, before its gradient
)


class Generated(Optimizer):
    """Gradient descent whose rate and direction come of its habits."""

    factor = 0.5

    def __init__(self, model: nn.Module, params: list[Tensor], habits: tuple[str, ...]) -> None:
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.03}]
        super().__init__(groups, {"lr": 0.05})
        self.habits, self.t, self.scale, self.model = habits, 0, 0.7, None
        self.table = {id(p): 0.5 + 0.1 * i for i, p in enumerate(params)} if "id" in habits else {}
        if "model" in habits:
            self.model = model  # type: ignore[assignment]
        for group in self.param_groups if "cfg" in habits else ():
            group["cfg"] = {"n": 0}
        for group in self.param_groups if "group count" in habits else ():
            group["n"] = 0
        for group in self.param_groups if "flag" in habits else ():
            group["odd"] = False
        if "mark" in habits:
            params[0].lr_scale = 0.3  # type: ignore[attr-defined]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        habits = self.habits
        if "attribute" in habits:
            self.t += 1
        for group in self.param_groups:
            self.note(group)
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    if "decay" in habits:
                        p.mul_(0.99)
                    p.add_(self.direction(p), alpha=-self.rate(i, p, group))
        if "twice" in habits:
            for group in self.param_groups:
                for p in group["params"]:
                    p.clamp_(-1.0, 1.0)
        if self.model is not None:
            for p in self.model.parameters():
                if p.requires_grad:
                    p.mul_(0.999)

    def note(self, group: dict[str, Any]) -> None:
        if "cfg" in group:
            group["cfg"]["n"] += 1
        if "n" in group:
            group["n"] += 1
        if "odd" in group:
            group["odd"] = not group["odd"]

    def rate(self, i: int, p: Any, group: dict[str, Any]) -> Any:
        habits, state, rate = self.habits, self.state[p], group["lr"]
        if "attribute" in habits:
            rate = rate / (1 + 0.1 * self.t)
        if "setting" in habits:
            rate = rate * self.scale
        if "class" in habits:
            rate = rate * self.factor
        if "place" in habits and i == 0:
            rate = rate * 0.5
        if "first" in habits and p is group["params"][0]:
            rate = rate * 0.8
        if "shape" in habits and p.dim() > 1:
            rate = rate * 0.6
        if "mark" in habits:
            rate = rate * getattr(p, "lr_scale", 1.0)
        if "id" in habits:
            rate = rate * self.table[id(p)]
        if "cfg" in group:
            rate = rate / group["cfg"]["n"]
        if "n" in group:
            rate = rate / (1 + 0.05 * group["n"])
        if group.get("odd"):
            rate = rate * 0.5
        if "step" in habits:
            state["step"] = state.get("step", 0) + 1
            rate = rate / (1 + 0.1 * state["step"])
        if "value" in habits and p.grad.sum() > 0:
            rate = rate * 0.5
        return rate

    def direction(self, p: Any) -> Tensor:
        habits, state, gradient = self.habits, self.state[p], p.grad
        if "edit" in habits:
            gradient.mul_(0.9)
        if "momentum" in habits:
            held = state.get("momentum")
            if held is None:
                held = state["momentum"] = torch.zeros_like(p)
            gradient = held.mul_(0.5).add_(gradient)
        if "tensor step" in habits:
            if "count" not in state:
                state["count"] = torch.zeros(())
            state["count"] += 1
            gradient = gradient / (1 + state["count"])
        if "history" in habits:
            state.setdefault("history", []).append(gradient.clone())
            gradient = sum(state["history"]) / len(state["history"])
        return gradient
