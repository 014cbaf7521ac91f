"""What Inductor's wrapper does, read off its source: one `Event` for each thing that the host asks for, in order.

    launch        a Triton kernel; fill and copy, where it computes nothing
    extern        a kernel of a library, cuBLAS or the attention of torch
    reduce, wait  a collective is started, or waited for
    read          the host asks for the value of a tensor
    host          a kernel of the CPU
    transfer      a copy that a tensor's own method makes, between devices or not

A statement that is none of these and no bookkeeping is an error: what is not understood is not passed over.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass


# Statements of the wrapper that ask the device for nothing.
BOOKKEEPING = {
    "args.clear",
    "assert_size_stride",
    "assert_alignment",
    "torch.cuda.set_device",
    "empty_strided_cuda",
    "empty_strided_cpu",
    "get_raw_stream",
    "reinterpret_tensor",
    "copy_if_misaligned",
}
VIEWS = {"reinterpret_tensor", "copy_if_misaligned"}


@dataclass(frozen=True, slots=True)
class Event:
    """reads, writes: names of the wrapper's variables, views and other names of a variable counted as it."""

    kind: str
    name: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Kernel:
    """A Triton kernel of the wrapper. kind: launch, or fill or copy where it does no arithmetic."""

    name: str
    parameters: tuple[str, ...]
    kind: str


@dataclass(frozen=True, slots=True)
class Wrapper:
    """inputs: variables for the program's inputs, in their order. events: of one call."""

    inputs: tuple[str, ...]
    kernels: dict[str, Kernel]
    events: tuple[Event, ...]


def read(source: str) -> Wrapper:
    """The wrapper of a program that is one partition."""
    module = ast.parse(source)
    kernels = {k.name: k for k in map(_kernel, module.body) if k is not None}
    calls = [
        node
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef) and node.name == "call"
    ]
    assert len(calls) == 1, "the program is cut into partitions"
    reader = _Reader(kernels)
    reader.block(calls[0].body)
    return Wrapper(reader.inputs, kernels, tuple(reader.events))


def _kernel(node: ast.stmt) -> Kernel | None:
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
    return Kernel(name, parameters, kind)


class _Reader:
    """Follows one call, statement by statement, with what each variable is a view of."""

    def __init__(self, kernels: dict[str, Kernel]) -> None:
        self.inputs: tuple[str, ...] = ()
        self.events: list[Event] = []
        self._kernels, self._same = kernels, dict[str, str]()

    def block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.With):
            self.block(node.body)
        elif isinstance(node, ast.Assign):
            self._assign(node.targets[0], node.value)
        elif isinstance(node, ast.Expr):
            self._value(node.value, written=None)
        elif isinstance(node, ast.If | ast.For | ast.While):
            raise AssertionError(f"the host decides: {ast.unparse(node)}")
        elif not isinstance(node, ast.Delete | ast.Return | ast.Assert | ast.Pass):
            raise AssertionError(f"not understood: {ast.unparse(node)}")

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        text = ast.unparse(target)
        if isinstance(value, ast.Name) and value.id == "args":
            assert isinstance(target, ast.Tuple)
            self.inputs = tuple(ast.unparse(e) for e in target.elts)
        elif isinstance(value, ast.Name):
            self._same[text] = self._origin(value.id)
        elif isinstance(value, ast.Subscript):
            self._same[text] = self._origin(ast.unparse(value.value))
        elif isinstance(value, ast.Call) and ast.unparse(value.func) in VIEWS:
            self._same[text] = self._origin(ast.unparse(value.args[0]))
        else:
            self._same.pop(text, None)
            self._value(value, written=text)

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
            return
        if method == "run" and owner in self._kernels:
            self._launch(self._kernels[owner], call)
        elif method in ("item", "tolist", "cpu"):
            self.events.append(Event("read", method, (self._origin(owner),)))
        elif function.startswith("torch.ops._c10d_functional.wait_tensor"):
            self.events.append(Event("wait", function, reads, reads))
        elif "_c10d_functional." in function:
            self.events.append(Event("reduce", function, reads, (*reads, *writes)))
        elif owner == "extern_kernels" or function.startswith(("torch.ops.", "aten.")):
            self.events.append(Event("extern", function, reads, writes))
        elif function.startswith(("cpp_fused", "kernel_cpp", "async_compile")):
            self.events.append(Event("host", function, reads))
        elif method in ("copy_", "to", "cuda"):
            self.events.append(Event("transfer", function, reads, (self._origin(owner),)))
        else:
            raise AssertionError(f"not understood: {ast.unparse(call)}")

    def _launch(self, kernel: Kernel, call: ast.Call) -> None:
        reads, writes = [], []
        for parameter, given in zip(kernel.parameters, call.args, strict=False):
            name = self._origin(ast.unparse(_base(given)))
            if parameter.startswith(("in_ptr", "in_out_ptr")):
                reads.append(name)
            if parameter.startswith(("out_ptr", "in_out_ptr")):
                writes.append(name)
        self.events.append(Event(kernel.kind, kernel.name, tuple(reads), tuple(writes)))

    def _names(self, call: ast.Call) -> Iterator[str]:
        given = [*call.args, *(k.value for k in call.keywords if k.arg != "out")]
        for value in given:
            for node in ast.walk(value):
                if isinstance(node, ast.Name) and not node.id.startswith(("reinterpret", "raw_")):
                    yield self._origin(node.id)

    def _origin(self, name: str) -> str:
        return self._same.get(name, name)


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
