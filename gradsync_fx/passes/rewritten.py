"""A program on its way to a compiler: what the passes of lowering work on, as a draft is what those before it work on.

main      the program's graph, in the end without what the host runs after it
updates   kernels, each one graph that the host runs over many parameters (pointwise_updates.py)
cut       the host's calls of them, in their order, and what the main program hands to them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, GraphModule, Node

from gradsync_fx._torch import FakeTensorMode
from gradsync_fx.ir.graph_copy import copy_nodes, module_of
from gradsync_fx.ir.journal import Exchanged
from gradsync_fx.ir.program import Program, Slot


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that the host hands to a kernel.

    kind: "input" of the program, or "extra": an output that the main program has for this.
    index: among those of its kind.
    """

    kind: str
    index: int


@dataclass(slots=True, eq=False)
class Kernel:
    """An update of one parameter, whichever it is.

    module: its graph, which also runs as it stands, on tensors of any shape. Inputs: n, the `written` tensors
        (parameter, state), the gradient, other state, then tensors of one element. It writes in place, and gives
        nothing.
    fake_mode: of its values, whose one dimension has a symbolic size.
    written: how many tensors it writes; so the gradient's position among the tensors.
    resets: whether the gradient is a running sum, which it zeroes.
    run: the compiled form, for flat views. None until lowering sets it.
    """

    module: GraphModule
    fake_mode: FakeTensorMode
    written: int
    resets: bool
    run: Callable[[list[Any]], Any] | None = None


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One parameter's update.

    tensors: those with elements to go over, in the kernel's order; the gradient at `kernel.written`.
    scalars: those of one element.
    """

    kernel: Kernel
    tensors: tuple[Operand, ...]
    scalars: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Before the calls that read them: the sums of a bucket, whose all-reduce may still run after the main program."""

    sums: tuple[Operand, ...]


@dataclass(slots=True)
class Cut:
    """What was cut out of a program, by `cut_updates`.

    calls: in the host's order.
    extras: the outputs that the main program has after the program's own, for the calls.
    """

    calls: list[KernelCall | Wait] = field(default_factory=list)
    extras: list[Node] = field(default_factory=list)

    @property
    def kernels(self) -> list[Kernel]:
        """Each once."""
        return list(dict.fromkeys(c.kernel for c in self.calls if isinstance(c, KernelCall)))


@dataclass(slots=True, eq=False)
class Block:
    """What repeats in the graph that is compiled, once; called by name, until lowering gives it another one.

    module: its graph. Inputs: what it writes in place, then what it only reads.
    """

    module: GraphModule
    name: str


@dataclass(frozen=True, slots=True)
class HiddenGather:
    """What is left of a gather of new parameters when it has started: the wait, and the writes.

    inputs: each an input of the whole program, or an output of one of its halves.
    parameters: the inputs that it writes, by position, with their names.
    """

    module: GraphModule
    inputs: tuple[tuple[str, int], ...]
    parameters: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Halves:
    """Two graphs for one.

    first, second: None for a second half in which nothing is left to compute.
    first_inputs: positions among the inputs of the whole.
    second_inputs: each an input of the whole, by position, or an output of the first half.
    results: the outputs of the whole: an output of a half, an input as it is at the end, or a constant.
    inputs, forms: fake values of the inputs of the whole, and of its outputs.
    started: outputs of the first half that are the results of collectives under way.
    hidden: what is done when the next call needs it, or somebody else.
    """

    first: GraphModule
    second: GraphModule | None
    first_inputs: tuple[int, ...]
    second_inputs: tuple[tuple[str, int], ...]
    results: tuple[tuple[str, Any], ...]
    inputs: tuple[Any, ...]
    forms: tuple[Any, ...]
    started: tuple[int, ...]
    hidden: tuple[HiddenGather, ...] = ()

    def modules(self) -> list[GraphModule]:
        return [self.first] if self.second is None else [self.first, self.second]

    def given(self, inputs: Sequence[Any], first: Sequence[Any]) -> list[Any]:
        """What the second half takes. inputs: of the whole. first: what the first half gave."""
        held = {"input": inputs, "first": first}
        return [held[kind][i] for kind, i in self.second_inputs]

    def whole(
        self, inputs: Sequence[Any], first: Sequence[Any], second: Sequence[Any]
    ) -> list[Any]:
        """What the whole returns."""
        held = {"input": inputs, "first": first, "second": second}
        return [v if kind == "constant" else held[kind][v] for kind, v in self.results]


@dataclass(slots=True)
class Rewritten:
    """What a compiler is handed for a program. Passes change all of it but the program, which stays readable.

    program: the verified one.
    main: its graph. Inputs: the program's without `numbers`, and a vector of these; outputs: the program's, then the
        extras of `cut`.
    numbers: positions of the program's inputs that a device is given in one vector (device_numbers.py).
    fake_mode: of the values in `main`.
    cut: empty until `cut_updates`.
    updates: what is compiled of each kernel: a copy of its graph.
    blocks: bodies of layers, which the graph that is compiled calls.
    settings: Inductor's, unless the user sets them.
    halves: what is compiled of `main`, where it is cut in two.
    exchanged: what goes through memory in place of collectives of pieces.
    """

    program: Program
    main: GraphModule
    fake_mode: Any
    numbers: tuple[int, ...] = ()
    cut: Cut = field(default_factory=Cut)
    updates: dict[Kernel, GraphModule] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    halves: Halves | None = None
    exchanged: Exchanged = Exchanged()

    @classmethod
    def copy_of(cls, program: Program, fake_mode: Any) -> Rewritten:
        """A program of which nothing is rewritten yet."""
        return cls(program, copy_module(program.module), fake_mode)

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Of the main graph's inputs; after them comes the vector of `numbers`, where there are some."""
        return tuple(s for i, s in enumerate(self.program.slots) if i not in self.numbers)

    def modules(self) -> list[GraphModule]:
        """All its graphs, the main one first."""
        halves = self.halves.modules() if self.halves else []
        halves += [h.module for h in self.halves.hidden] if self.halves else []
        return [self.main, *halves, *self.updates.values(), *(b.module for b in self.blocks)]


def copy_module(module: GraphModule) -> GraphModule:
    """A copy of a program's graph over the same tensors and submodules: compilers rewrite what they are given."""
    graph = Graph()
    graph.output(copy_nodes(module.graph, graph, {}))
    return module_of(module, graph)
