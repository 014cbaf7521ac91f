"""A program on its way to a compiler: what the passes of lowering work on, as a draft is what those before it work on.

main      the program's graph, in the end without what the host runs after it
updates   kernels, each one graph that the host runs over many parameters (pointwise_updates.py)
cut       the host's calls of them, in their order, and what the main program hands to them
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, GraphModule, Node

from gradsync_fx._torch import FakeTensorMode
from gradsync_fx.ir.program import Program


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that the host hands to a kernel."""

    kind: str  # "input": of the program; "extra": an output that the main program has for this
    index: int  # among those of its kind


@dataclass(slots=True, eq=False)
class Kernel:
    """An update of one parameter, whichever it is.

    Inputs: n, the `written` tensors (parameter, state), the gradient, other state, then tensors of one element.
    """

    module: GraphModule  # as it runs where tensors are no flat views
    fake_mode: FakeTensorMode  # of its values, whose one dimension has a symbolic size
    written: int  # how many tensors it writes; the gradient's position among them all
    resets: bool  # whether the gradient is a running sum, which it zeroes
    run: Callable[[list[Any]], Any] | None = (
        None  # the compiled form, for flat views; set by lowering
    )


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One parameter's update."""

    kernel: Kernel
    tensors: tuple[
        Operand, ...
    ]  # full ones in the kernel's order, the gradient at `kernel.written`
    scalars: tuple[Operand, ...]  # those of one element


@dataclass(frozen=True, slots=True)
class Wait:
    """Before the calls that read them: the sums of a bucket, whose all-reduce may still run after the main program."""

    sums: tuple[Operand, ...]


@dataclass(slots=True)
class Cut:
    """What was cut out of a program, and the outputs that its main program has more."""

    calls: list[KernelCall | Wait] = field(default_factory=list)  # in the host's order
    extras: list[Node] = field(
        default_factory=list
    )  # the main program's last outputs, read by calls

    @property
    def kernels(self) -> list[Kernel]:
        """Each once."""
        return list(dict.fromkeys(c.kernel for c in self.calls if isinstance(c, KernelCall)))


@dataclass(slots=True)
class Rewritten:
    """What a compiler is handed for a program. The program itself stays as it is, and readable."""

    program: Program
    main: GraphModule
    fake_mode: Any  # of the main program's values
    cut: Cut = field(default_factory=Cut)
    updates: dict[Kernel, GraphModule] = field(default_factory=dict)  # what is compiled of each
    settings: dict[str, Any] = field(default_factory=dict)  # Inductor's, unless the user sets them

    @classmethod
    def copy_of(cls, program: Program, fake_mode: Any) -> Rewritten:
        """A program of which nothing is rewritten yet."""
        return cls(program, copy_module(program.module), fake_mode)

    @property
    def name(self) -> str:
        return self.program.name

    def modules(self) -> list[GraphModule]:
        """All its graphs, the main one first."""
        return [self.main, *self.updates.values()]


def copy_module(module: GraphModule) -> GraphModule:
    """A copy of a program's graph over the same tensors and submodules: compilers rewrite what they are given."""
    graph = Graph()
    values = graph.graph_copy(module.graph, {})
    graph.output(values)
    return GraphModule(module, graph)
