"""Runs generated Triton kernels in Triton's interpreter on the CPU, and compares with the program's graph in torch.

    TRITON_INTERPRET=1, set before triton is imported: in a process of its own (worker.py)

What Inductor takes from CUDA's device library, and how it launches kernels, has stand-ins here. Kernels that are no
Triton code (cuBLAS) run as torch's own on the CPU; attention templates and convolutions have none, and are not run.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import GridExpr
from torch.fx import GraphModule
from torch.fx.node import map_aggregate
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from gradsync_fx.ir.program import Kind, Program
from gradsync_fx.lowering.target.absent import absent
from gradsync_fx.lowering.target.cards import find_card
from gradsync_fx.lowering.target.wrapper import read
from tests.cross.cases import Case, Compared
from tests.cross.steps import captured, programs_of


# Inductor's names for what its kernels call of the device library, and torch's.
SAME = 1e-4  # sums in another order; more is a rounding to bfloat16
LIBRARY = {"mul_rn": torch.mul, "div_rn": torch.div}
# Elements of a block: few blocks, as the interpreter takes one after the other.
POINTWISE, ROWS, REDUCED = 1 << 15, 256, 2048


def compare(case: Case, sources: dict[str, str]) -> dict[str, Compared]:
    """Of each program by name. sources: Inductor's modules, as lowered.py has them."""
    with absent(find_card(f"cuda:{case.target}")), captured(case) as step:
        found = programs_of(case, step)
        return {name: _compared(found[name], source) for name, source in sources.items()}


def _compared(program: Program, source: str, seed: int = 0) -> Compared:
    inputs = _values(program, seed)
    mine, theirs, wide = ([t.clone() for t in inputs] for _ in range(3))
    got = [*_load(source)(_as_given(program, source, mine)), *mine]
    want = [*_on_cpu(program.module)(*theirs), *theirs]
    exact = [*_without_bfloat16(program.module)(*wide), *wide]
    worst, rounding = 0.0, 0.0
    for g, w, e in zip(got, want, exact, strict=True):
        if not isinstance(w, torch.Tensor) or not w.is_floating_point() or not w.numel():
            continue
        if _difference(w, e) < SAME:
            worst = max(worst, _difference(g, w))
        else:
            rounding = max(rounding, ((g - e).norm() / (w - e).norm()).item())
    changed = sum(not torch.equal(a, b) for a, b in zip(inputs, theirs, strict=True))
    return Compared(worst, rounding, changed)


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest over all elements, relative to it where it is not near 0."""
    return ((a.double() - b.double()).abs() / (b.double().abs() + 1e-3)).max().item()


def _as_given(program: Program, source: str, values: list[torch.Tensor]) -> list[torch.Tensor]:
    """The wrapper's inputs: what it does not have by itself, it has as an element of one vector."""
    held = dict(
        zip(
            (n.name for n in program.module.graph.find_nodes(op="placeholder")), values, strict=True
        )
    )
    given = [held.pop(name) for name in read(source).inputs if name != "numbers"]
    return [*given, torch.stack([v.double() for v in held.values()])] if held else given


def _values(program: Program, seed: int) -> list[torch.Tensor]:
    """Real tensors for a program's inputs, of such values that it computes nothing degenerate."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for slot, form in zip(program.slots, program.inputs(), strict=True):
        shape = tuple(form.shape)
        if not form.is_floating_point():
            value = torch.randint(16, shape, generator=generator, dtype=form.dtype)
        elif slot.kind in (Kind.SCALAR, Kind.WEIGHT):
            value = torch.full(shape, 32.0 if "divisor" in slot.name else 0.9, dtype=form.dtype)
        elif slot.kind is Kind.STATE:  # squares are not negative
            value = torch.rand(shape, generator=generator).to(form.dtype) + 1e-3
        else:
            value = (torch.randn(shape, generator=generator) * 0.1).to(form.dtype)
        found.append(value)
    return found


def _on_cpu(module: GraphModule) -> GraphModule:
    cpu = torch.device("cpu")
    return _rewritten(module, lambda value: cpu if isinstance(value, torch.device) else value)


def _without_bfloat16(module: GraphModule) -> GraphModule:
    """Computes in float32 throughout: what both roundings to bfloat16 stand for."""
    wide = torch.float32
    return _rewritten(module, lambda value: wide if value is torch.bfloat16 else value)


def _rewritten(module: GraphModule, change: Callable[[Any], Any]) -> GraphModule:
    """With other arguments, in the graphs of updates as well."""
    for graph in module.modules():
        if isinstance(graph, GraphModule):
            for node in graph.graph.nodes:
                node.args = map_aggregate(node.args, change)
                node.kwargs = map_aggregate(node.kwargs, change)
            graph.recompile()
    return module


class _Library:
    """CUDA's device library by torch on the CPU, in the values' own precision."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = LIBRARY.get(name) or getattr(torch, name)

        def call(*values: Any) -> Any:
            arrays = [torch.from_numpy(np.ascontiguousarray(v.handle.data)) for v in values]
            handle = TensorHandle(function(*arrays).numpy(), values[0].handle.dtype)
            return tl.tensor(handle, values[0].type)

        return call


class _Kernel:
    """In place of Inductor's launcher: chooses the blocks, and hands the kernel to the interpreter."""

    def __init__(self, function: Any, meta: dict[str, Any]) -> None:
        self._function, self._meta = function, meta

    def run(self, *args: Any, stream: Any = None) -> None:
        names = list(self._function.arg_names)
        given = dict(zip(names, args, strict=False))
        blocks = {}
        for name in names[len(args) :]:
            count, most = (
                (given["r0_numel"], REDUCED)
                if name == "R0_BLOCK"
                else (
                    given[name[0].lower() + "numel"],
                    POINTWISE if "r0_numel" not in given else ROWS,
                )
            )
            blocks[name] = min(triton.next_power_of_2(count), most)
        numbers = {name: value for name, value in given.items() if isinstance(value, int)}
        grid = GridExpr.from_meta(self._meta, blocks).eval_slow(numbers)
        self._function[grid](*args, **blocks)


class _Compile:
    """In place of `AsyncCompile`: a kernel's module, with stand-ins for what it imports of Inductor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def triton(self, name: str, source: str, device_str: str) -> _Kernel:
        source = source.replace(
            "from torch._inductor.runtime import triton_helpers, triton_heuristics",
            "from torch._inductor.runtime import triton_helpers\n"
            "import interpreted_heuristics as triton_heuristics",
        ).replace(
            "from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math",
            "from interpreted_heuristics import libdevice\n"
            "from torch._inductor.runtime.triton_helpers import math as tl_math",
        )
        path = self._folder / f"kernel_{len(list(self._folder.iterdir()))}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, name)
        assert isinstance(kernel, _Kernel)
        return kernel

    def wait(self, scope: Any) -> None:
        """Nothing is compiled in the background."""


def _stand_ins() -> None:
    heuristics: Any = types.ModuleType("interpreted_heuristics")

    def decorator(**given: Any) -> Callable[[Any], _Kernel]:
        return lambda function: _Kernel(function, given["inductor_meta"])

    for kind in ("pointwise", "reduction", "persistent_reduction", "foreach"):
        setattr(heuristics, kind, decorator)
    heuristics.libdevice = _Library()
    sys.modules["interpreted_heuristics"] = heuristics
    convert = interpreter._implicit_cvt

    def with_numbers(value: Any) -> Any:  # the interpreter leaves Python's floats what they are
        if isinstance(value, float):
            return tl.tensor(
                TensorHandle(np.array([value], dtype=np.float64), tl.float64), tl.float64
            )
        return convert(value)

    reduced = interpreter.ReduceOps.apply_impl

    def with_maxima(self: Any, given: Any) -> Any:  # by elements they would be most of the time
        if self.combine_fn is triton_helpers.maximum:
            return self.min_max(given[0], val_reduce_op=np.max)
        return reduced(self, given)

    if convert.__name__ != "with_numbers":
        interpreter._implicit_cvt = with_numbers
        interpreter.ReduceOps.apply_impl = with_maxima


def _load(source: str) -> Callable[[list[torch.Tensor]], list[Any]]:
    """The wrapper's `call`, with memory of the CPU in place of the device's."""
    _stand_ins()
    for before, after in (
        (
            "torch._C._dynamo.guards._empty_strided_cuda",
            "torch._C._dynamo.guards._empty_strided_cpu",
        ),
        (
            "from torch._C import _cuda_getCurrentRawStream as get_raw_stream",
            "get_raw_stream = lambda index: 0",
        ),
        ("async_compile = AsyncCompile()", "async_compile = INTERPRETED"),
    ):
        assert before in source, before
        source = source.replace(before, after)
    scope: dict[str, Any] = {
        "INTERPRETED": _Compile(Path(tempfile.mkdtemp())),
        "__name__": "wrapper",
    }
    exec(compile(source, "wrapper", "exec"), scope)
    call: Callable[[list[torch.Tensor]], list[Any]] = scope["call"]
    return call
