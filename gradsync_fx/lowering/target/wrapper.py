"""What Inductor's wrapper does, read off its source: one `HostEvent` for each thing that the host asks for, in order.

    launch        a Triton kernel; fill and copy, where it computes nothing
    extern        a kernel of a library, cuBLAS or the attention of torch
    reduce, wait  a collective is started, or waited for
    read          the host asks for the value of a tensor
    host          a kernel of the CPU
    upload        an asynchronous copy from pinned memory of the host
    transfer      any other copy that a tensor's own method makes, between devices or not

A program of several partitions is read as one, each event with the partition that it is in; Inductor leaves outside of
partitions what no CUDA graph can record. A statement that is none of these and no bookkeeping is an error: what is not
understood is not passed over.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


# Statements of the wrapper that ask the device for nothing.
BOOKKEEPING = {
    "args.clear",
    "assert_size_stride",
    "assert_alignment",
    "torch.cuda.set_device",
    "empty_strided_cuda",
    "empty_strided_cpu",
    "empty_strided_cpu_pinned",
    "get_raw_stream",
    "reinterpret_tensor",
    "copy_if_misaligned",
    "max",  # of sizes
    "min",
}
WAITS = ("torch.ops._c10d_functional.wait_tensor", "torch.ops.gradsync_fx.wait.")
REDUCES = ("torch.ops._c10d_functional.", "torch.ops.gradsync_fx.start.")
ADDS = "torch.ops.gradsync_fx.add_product."
VIEWS = {"reinterpret_tensor", "copy_if_misaligned"}
# Where each says the sizes of the tensor that it gives.
SIZED = {"reinterpret_tensor": 1, "empty_strided_cuda": 0}


@dataclass(frozen=True, slots=True)
class HostEvent:
    """reads, writes: names of the wrapper's variables, views and other names of a variable counted as it.

    call: the number that Inductor gave this call, where it tracks them; 0 elsewhere. partition: the one it is in; None
    outside of all. moved: of each variable how many elements a kernel reads and writes, as far as the code tells.
    """

    kind: str
    name: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    call: int = 0
    partition: int | None = None
    moved: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class TritonKernel:
    """A Triton kernel of the wrapper. kind: launch, or fill or copy where it does no arithmetic. source: its module.

    unwritten: parameters that a kernel may write by their names, and does not.
    """

    name: str
    parameters: tuple[str, ...]
    kind: str
    source: str
    unwritten: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wrapper:
    """inputs: variables for the program's inputs, in their order. events: of one call. partitions: how many.

    numbers: what goes into a partition and is a number of the host, not a tensor; a recording does not see it change.
    dtypes: of the variables that it makes itself, by torch's names.
    """

    inputs: tuple[str, ...]
    kernels: dict[str, TritonKernel]
    events: tuple[HostEvent, ...]
    partitions: int = 0
    numbers: tuple[str, ...] = ()
    dtypes: dict[str, str] = field(default_factory=dict)


def read(source: str) -> Wrapper:
    """The wrapper of a program. Raises `NotUnderstood` for a statement that is not known."""
    module = ast.parse(source)
    kernels = {k.name: k for k in map(_kernel, module.body) if k is not None}
    functions = {n.name: n for n in ast.walk(module) if isinstance(n, ast.FunctionDef)}
    bodies = {
        int(name.removeprefix("partition_")): node.body
        for name, node in functions.items()
        if name.startswith("partition_")
    }
    reader = _Reader(kernels, bodies, _calls_by_line(source))
    reader.block(functions["call"].body)
    events, numbers = tuple(reader.events), tuple(reader.host_numbers)
    return Wrapper(reader.inputs, kernels, events, len(bodies), numbers, reader.dtypes)


class NotUnderstood(AssertionError):
    """A wrapper does something that is not known here."""


def _calls_by_line(source: str) -> dict[int, int]:
    """The number of a call, by the line of the comment ahead of it."""
    return {
        line: int(found[1])
        for line, text in enumerate(source.splitlines(), 1)
        if (found := re.search(r"# \[Provenance debug handles\] \S+:(\d+)$", text))
    }


def _kernel(node: ast.stmt) -> TritonKernel | None:
    """Of `name = async_compile.triton('name', '''source''', ...)`."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
        return None
    if ast.unparse(node.value.func) != "async_compile.triton":
        return None
    name, text = (ast.literal_eval(a) for a in node.value.args[:2])
    (function,) = (n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef))
    parameters = tuple(a.arg for a in function.args.args)
    body = ast.unparse(function)
    work = [
        n
        for n in ast.walk(function)
        if isinstance(n, ast.Assign)
        and ast.unparse(n.targets[0]).startswith("tmp")
        and not ast.unparse(n.value).startswith(("tl.load(", "tl.full(", "tl.broadcast_to("))
    ]
    kind = "launch" if work else "copy" if "tl.load(" in body else "fill"
    used = set(re.findall(r"tl\.(?:store|atomic_\w+|make_\w+)\((\w+)", body))
    unwritten = tuple(p for p in parameters if p.startswith("in_out_ptr") and p not in used)
    return TritonKernel(name, parameters, kind, text, unwritten)


class _Reader:
    """Follows one call, statement by statement, with what each variable is a view of."""

    def __init__(
        self,
        kernels: dict[str, TritonKernel],
        partitions: dict[int, list[ast.stmt]],
        calls: dict[int, int],
    ) -> None:
        self.inputs: tuple[str, ...] = ()
        self.events: list[HostEvent] = []
        self.host_numbers: dict[str, None] = {}
        self.dtypes: dict[str, str] = {}
        self._kernels, self._partitions, self._calls = kernels, partitions, calls
        self._same: dict[str, str] = {}
        self._elements: dict[str, int] = {}
        self._pinned, self._read = set[str](), set[str]()
        self._partition: int | None = None
        self._given: list[str] = []  # to the next partition
        self._number = 0  # of the statement that is read

    def block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            ahead = [
                self._calls[n]
                for n in range(statement.lineno - 2, statement.lineno)
                if n in self._calls
            ]
            self._number = ahead[-1] if ahead else 0
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.With):
            self.block(node.body)
        elif isinstance(node, ast.Assign):
            self._assign(node.targets[0], node.value)
        elif isinstance(node, ast.Expr):
            self._value(node.value, written=None)
        elif isinstance(node, ast.If | ast.For | ast.While):
            raise NotUnderstood(f"the host decides: {ast.unparse(node)}")
        elif not isinstance(node, ast.Delete | ast.Return | ast.Assert | ast.Pass):
            raise NotUnderstood(ast.unparse(node))

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        text = ast.unparse(target)
        self._elements[text] = self._size(value)
        if isinstance(value, ast.Name) and value.id == "args":
            names = tuple(ast.unparse(e) for e in _elements(target))
            if self._partition is None:
                self.inputs = names
            else:
                self._same.update(zip(names, self._given, strict=True))
        elif isinstance(value, ast.Name):
            self._same[text] = self._origin(value.id)
        elif isinstance(value, ast.List):
            self._given = [self._origin(ast.unparse(e)) for e in value.elts]
            self.host_numbers.update((n, None) for n in self._given if n in self._read)
        elif isinstance(value, ast.Call) and ast.unparse(value.func).startswith("self.partitions["):
            self._enter(target, value.func)
        elif isinstance(value, ast.Subscript):
            self._same[text] = self._origin(ast.unparse(value.value))
        elif isinstance(value, ast.Call) and ast.unparse(value.func) in VIEWS:
            self._same[text] = self._origin(ast.unparse(value.args[0]))
        else:
            self._same.pop(text, None)
            self._value(value, written=text)

    def _enter(self, target: ast.expr, function: ast.expr) -> None:
        """A partition: its statements, and what it returns under the caller's names."""
        assert isinstance(function, ast.Subscript)
        self._partition = number = int(ast.unparse(function.slice))
        body = self._partitions[number]
        self.block(body)
        (returned,) = (node.value for node in body if isinstance(node, ast.Return))
        for mine, theirs in zip(_elements(target), _elements(returned), strict=True):
            if ast.unparse(mine) != ast.unparse(theirs):
                self._same[ast.unparse(mine)] = self._origin(ast.unparse(theirs))
        self._partition = None

    def _size(self, value: ast.expr) -> int:
        """Elements of a tensor; 0 where the code does not tell, or tells by a symbol."""
        if isinstance(value, ast.Name):
            return self._elements.get(value.id, 0)
        if not isinstance(value, ast.Call):
            return 0
        function = ast.unparse(value.func)
        if function == "copy_if_misaligned":
            return self._size(value.args[0])
        if function in SIZED:
            return _product(value.args[SIZED[function]])
        return 0

    def _add(
        self,
        kind: str,
        name: str,
        reads: tuple[str, ...],
        writes: tuple[str, ...] = (),
        moved: tuple[tuple[str, int, int], ...] = (),
    ) -> None:
        event = HostEvent(kind, name, reads, writes, self._number, self._partition, moved)
        self.events.append(event)

    def _moved(
        self, read: Iterable[ast.expr], written: Iterable[ast.expr]
    ) -> tuple[tuple[str, int, int], ...]:
        """Each view counts by its own size, and once."""
        found: dict[str, list[int]] = {}
        for i, values in enumerate((read, written)):
            for value in {ast.unparse(v): v for v in values}.values():
                name = self._origin(ast.unparse(_base(value)))
                found.setdefault(name, [0, 0])[i] += self._size(value)
        return tuple((name, r, w) for name, (r, w) in found.items() if r or w)

    def _value(self, value: ast.expr, written: str | None) -> None:
        for call in _calls(value):
            self._call(call, written)

    def _call(self, call: ast.Call, written: str | None) -> None:
        function = ast.unparse(call.func)
        owner, _, method = function.rpartition(".")
        reads = tuple(dict.fromkeys(self._names(call)))
        out = [self._origin(ast.unparse(_base(k.value))) for k in call.keywords if k.arg == "out"]
        writes = (*out, *([written] if written else []))
        if function in BOOKKEEPING:
            if function.endswith("_pinned") and written:
                self._pinned.add(written)
            if function == "empty_strided_cuda" and written:
                self.dtypes[written] = ast.unparse(call.args[2]).removeprefix("torch.")
            if function == "assert_size_stride":
                self._elements[ast.unparse(call.args[0])] = _product(call.args[1])
            return
        if method == "run" and owner in self._kernels:
            self._launch(self._kernels[owner], call)
        elif method in ("item", "tolist", "cpu"):
            self._add("read", method, (self._origin(owner),))
            if written:
                self._read.add(written)
        elif function.startswith(WAITS):
            self._add("wait", function, reads, reads)
        elif function.startswith(REDUCES):
            self._add("reduce", function, reads, (*reads, *writes))
        elif function.startswith(ADDS):
            self._add("extern", function, reads, reads[:1], self._moved(call.args, call.args[:1]))
        elif owner == "extern_kernels" or function.startswith(("torch.ops.", "aten.")):
            outs = [k.value for k in call.keywords if k.arg == "out"]
            given = [e for a in call.args for e in (a.elts if isinstance(a, ast.List) else [a])]
            self._add("extern", function, reads, writes, self._moved(given, outs))
        elif function.startswith(("cpp_fused", "kernel_cpp", "async_compile")):
            self._add("host", function, reads)
        elif method in ("copy_", "to", "cuda"):
            asynchronous = [ast.unparse(a) for a in call.args[1:]] == ["True"]
            uploads = asynchronous and self._pinned.issuperset(reads)
            self._add("upload" if uploads else "transfer", function, reads, (self._origin(owner),))
        else:
            raise NotUnderstood(ast.unparse(call))

    def _launch(self, kernel: TritonKernel, call: ast.Call) -> None:
        reads, writes = (
            [
                given
                for parameter, given in zip(kernel.parameters, call.args, strict=False)
                if parameter.startswith(kinds) and parameter not in idle
            ]
            for kinds, idle in (
                (("in_ptr", "in_out_ptr"), ()),
                (("out_ptr", "in_out_ptr"), kernel.unwritten),
            )
        )
        read, written = (
            tuple(self._origin(ast.unparse(_base(g))) for g in given) for given in (reads, writes)
        )
        self._add(kernel.kind, kernel.name, read, written, self._moved(reads, writes))

    def _names(self, call: ast.Call) -> Iterator[str]:
        given = [*call.args, *(k.value for k in call.keywords if k.arg != "out")]
        for value in given:
            for node in ast.walk(value):
                if isinstance(node, ast.Name) and not node.id.startswith(
                    ("reinterpret", "raw_", "torch")
                ):
                    yield self._origin(node.id)

    def _origin(self, name: str) -> str:
        return self._same.get(name, name)


def _product(sizes: ast.expr) -> int:
    """Of a tuple of numbers; 0 where one is a symbol."""
    numbers = [e.value if isinstance(e, ast.Constant) else 0 for e in _elements(sizes)]
    return math.prod(n for n in numbers if isinstance(n, int))


def _elements(node: ast.expr | None) -> list[ast.expr]:
    """Of a tuple; of anything else itself."""
    return node.elts if isinstance(node, ast.Tuple) else [node] if node is not None else []


def _base(value: ast.expr) -> ast.expr:
    """What a view is taken of."""
    while isinstance(value, ast.Call) and ast.unparse(value.func) in VIEWS:
        value = value.args[0]
    return value


def _calls(value: ast.expr) -> Iterator[ast.Call]:
    """All calls in an expression, those that are arguments first."""
    for child in ast.iter_child_nodes(value):
        if isinstance(child, ast.expr | ast.keyword):
            yield from _calls(child.value if isinstance(child, ast.keyword) else child)
    if isinstance(value, ast.Call):
        yield value
