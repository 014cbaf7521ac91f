"""The IR: a captured step and the programs sliced from it, with a name for every input and output.

Step      the user's step as one ATen graph; marker ops stand where gradients and updates are
Program   a graph ready to be lowered; takes the step's inputs that it still reads, then accumulators, optimizer
          state and host scalars; returns the step's outputs; every lasting effect is a `copy_` into an input
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch.fx import GraphModule, Node


class Kind(Enum):
    """What an input is; decides in which programs a write to it happens."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    DATA = "data"
    ACCUMULATOR = "accumulator"
    STATE = "state"
    SCALAR = "scalar"


@dataclass(frozen=True, slots=True)
class Slot:
    """One input: its kind, a name for people, and the key that the runtime binds it by.

    key: position in the step's flat arguments (parameter, buffer, data), parameter name (accumulator), position in
    an update's state or scalars (state, scalar).
    """

    kind: Kind
    name: str
    key: Any


@dataclass(frozen=True, slots=True)
class Leaf:
    """A trainable parameter that receives a gradient: `index` is its number in the marker ops."""

    index: int
    name: str
    parameter: torch.nn.Parameter


@dataclass(slots=True)
class Step:
    """A captured step. `graph` is never edited; passes work on copies."""

    module: GraphModule
    slots: tuple[Slot, ...]
    leaves: dict[int, Leaf]
    names: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found = len(self.module.graph.find_nodes(op="placeholder"))
        if found != len(self.slots):
            raise AssertionError(f"{found} placeholders, {len(self.slots)} slots")


@dataclass(slots=True)
class Program:
    """One of the programs of a step. `slots` are in the order of the placeholders."""

    name: str
    module: GraphModule
    slots: tuple[Slot, ...]
    nan_outputs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        holders = self.module.graph.find_nodes(op="placeholder")
        if len(holders) != len(self.slots):
            raise AssertionError(f"{self.name}: {len(holders)} inputs, {len(self.slots)} slots")

    def inputs(self) -> list[Any]:
        """The fake values of the inputs, in order."""
        return [n.meta["val"] for n in self.module.graph.find_nodes(op="placeholder")]


def output_values(module: GraphModule) -> list[Any]:
    """What a graph returns, as a flat list of nodes and constants."""
    (out,) = module.graph.find_nodes(op="output")
    return list(out.args[0])


def writes(module: GraphModule) -> list[Node]:
    """The `copy_` nodes into inputs: every lasting effect of a graph."""
    return [
        n
        for n in module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        if isinstance(n.args[0], Node) and n.args[0].op == "placeholder"
    ]
