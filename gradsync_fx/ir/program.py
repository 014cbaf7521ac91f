"""The IR: a captured step and the programs sliced from it, with a name for every input and output.

Step      the user's step as one ATen graph; marker ops stand where gradients and updates are
Program   a graph ready to be lowered; takes the step's inputs that it still reads, then accumulators, optimizer
          state and host scalars; returns the step's outputs; every lasting effect is a `copy_` into an input
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch.fx import GraphModule, Node, map_arg

from gradsync_fx.ir.ops import UPDATE


class Kind(StrEnum):  # hashed as a string, in C: each call looks up each of its inputs
    """What an input is; decides in which programs a write to it happens."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    DATA = "data"
    ACCUMULATOR = "accumulator"
    WEIGHT = "weight"
    STATE = "state"
    SCALAR = "scalar"
    CARRIED = "carried"
    INVARIANT = "invariant"


@dataclass(frozen=True, slots=True)
class Slot:
    """One input of a step or a program."""

    kind: Kind
    name: str  # for people; of parameters and buffers the name in the model
    # What the runtime binds it by: position in the step's flat arguments (parameter, buffer, data), parameter name
    # (accumulator), number of a part of the window (weight), update and position in its state or scalars (state,
    # scalar), name of a value that an earlier stage of the program gave (carried), number of a value that is held for a
    # window (invariant).
    key: Any


@dataclass(frozen=True, slots=True)
class Leaf:
    """A trainable parameter that receives a gradient."""

    index: int  # its number in the marker ops
    name: str  # in the model
    parameter: torch.Tensor  # the user's own


@dataclass(slots=True)
class Step:
    """A captured step. Never edited: passes work on copies.

    Takes its flat arguments, in the order of `slots`; returns the user's outputs, and the end of the chain of notes.
    assigned: numbers of the host's values that it puts in the place of others, after an update; replaced: positions of
    the inputs that are those others.
    """

    module: GraphModule
    slots: tuple[Slot, ...]  # one for each placeholder, in their order
    leaves: dict[int, Leaf]  # by number
    replaced: tuple[int, ...] = ()
    assigned: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        found = len(self.module.graph.find_nodes(op="placeholder"))
        if found != len(self.slots):
            raise AssertionError(f"placeholders {found}, slots {len(self.slots)}")

    def structure(self) -> str:
        """Equal for two captures exactly when they compute the same thing from the same slots.

        Names of nodes do not count; of metadata only the inputs' shapes, strides, dtypes and devices do.
        """
        number = {node: i for i, node in enumerate(self.module.graph.nodes)}
        lines = [f"{slot.kind.value} {slot.name} {slot.key}" for slot in self.slots]
        for node in number:
            args = map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
            form = form_of(node.meta.get("val")) if node.op == "placeholder" else ""
            target = "" if node.op == "placeholder" else str(node.target)
            lines.append(f"{node.op} {target} {args} {form}")
            if node.op == "get_attr":
                lines.append(str(id(getattr(self.module, str(node.target)))))
        return "\n".join(lines)


def form_of(value: Any) -> str:
    """Shape, strides, dtype and device of a tensor; a symbol by its name."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.device}"
    return str(value)


@dataclass(slots=True)
class Program:
    """One of the programs of a step; never edited once it is verified.

    Takes what `slots` say, in their order: the step's inputs that it still reads, then what passes added. Returns the
    step's outputs (None where another program gives them), then values for the host's calls, then new optimizer state,
    then the window's weight where it is `masked`.
    """

    name: str  # for people: "accumulate", "boundary", "tail", or one of these with its optimizers
    module: GraphModule
    slots: tuple[Slot, ...]  # one for each placeholder, in their order
    host_values: int = 0  # how many of the outputs the host's calls want
    masked: bool = False  # it makes no update where the window's weight, its last output, is 0
    closes: bool = False  # it ends the window, or some parts of it
    # Parameters that may be on their way when it begins, by bucket; empty where all have arrived.
    arriving: tuple[tuple[str, ...], ...] = ()
    # Ranks that share its updates out may reach each other's memory.
    beside: bool = False
    voted: bool = False  # whether its update counts is decided when its reductions have started
    # The position of the input that it writes first, run as it is; None where it writes nothing, and where it is cut at
    # an optimizer's own step, which writes what it likes.
    first_written: int | None = field(init=False)

    def __post_init__(self) -> None:
        holders = self.module.graph.find_nodes(op="placeholder")
        if len(holders) != len(self.slots):
            raise AssertionError(f"{self.name}: inputs {len(holders)}, slots {len(self.slots)}")
        is_cut = self.module.graph.find_nodes(op="call_function", target=UPDATE)
        first = None if is_cut else next((w.args[0] for w in writes(self.module)), None)
        self.first_written = None if first is None else list(holders).index(first)

    def inputs(self) -> list[Any]:
        """The fake values of the inputs, in order."""
        return [n.meta["val"] for n in self.module.graph.find_nodes(op="placeholder")]

    def listing(self) -> str:
        """Its code for people, after what the user calls its inputs."""
        holders = self.module.graph.find_nodes(op="placeholder")
        told = zip(holders, self.slots, strict=True)
        named = [f"# {node.name}: {slot.kind.value} {slot.name}" for node, slot in told]
        return "\n".join((*named, self.module.code.strip()))


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
