"""Runs generated Triton kernels in Triton's interpreter on the CPU, and compares with the program's graph in torch.

    TRITON_INTERPRET=1, set before triton is imported: in a process of its own

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
from torch._inductor.runtime.triton_heuristics import GridExpr
from torch.fx import GraphModule
from torch.fx.node import map_aggregate
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from gradsync_fx.ir.program import Kind, Program
from gradsync_fx.lowering.target.absent import absent
from gradsync_fx.lowering.target.cards import find_card
from tests.cross.cases import Case
from tests.cross.steps import captured, programs_of


# Inductor's names for what its kernels call of the device library, and torch's.
LIBRARY = {"mul_rn": torch.mul, "div_rn": torch.div}
POINTWISE, REDUCED = (
    1024,
    2048,
)  # elements of a block: few blocks, as the interpreter takes one after the other


def compare(case: Case, sources: dict[str, str]) -> dict[str, tuple[float, int]]:
    """Of each program by name: see `worst_difference`. sources: Inductor's modules, as lowered.py has them."""
    with absent(find_card(f"cuda:{case.target}")), captured(case) as step:
        return {n: worst_difference(p, sources[n]) for n, p in programs_of(case, step).items()}


def worst_difference(program: Program, source: str, seed: int = 0) -> tuple[float, int]:
    """The worst relative difference over all outputs and all inputs that are written; and how many of these changed."""
    inputs = _values(program, seed)
    mine, theirs = [t.clone() for t in inputs], [t.clone() for t in inputs]
    got = list(_load(source)(list(mine)))
    want = list(_on_cpu(program.module)(*theirs))
    pairs = [*zip(got, want, strict=True), *zip(mine, theirs, strict=True)]
    floats = [
        (g, w)
        for g, w in pairs
        if isinstance(w, torch.Tensor) and w.is_floating_point() and w.numel()
    ]
    changed = sum(not torch.equal(a, b) for a, b in zip(inputs, theirs, strict=True))
    worst = max(((g - w).abs() / (w.abs() + 1e-3)).max().item() for g, w in floats)
    return worst, changed


def _values(program: Program, seed: int) -> list[torch.Tensor]:
    """Real tensors for a program's inputs, of such values that it computes nothing degenerate."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for slot, form in zip(program.slots, program.inputs(), strict=True):
        shape = tuple(form.shape)
        if not form.is_floating_point():
            value = torch.randint(30, shape, generator=generator, dtype=form.dtype)
        elif slot.kind in (Kind.SCALAR, Kind.WEIGHT):
            value = torch.full(shape, 32.0 if "divisor" in slot.name else 0.9, dtype=form.dtype)
        elif slot.kind is Kind.STATE:  # squares are not negative
            value = torch.rand(shape, generator=generator).to(form.dtype) + 1e-3
        else:
            value = (torch.randn(shape, generator=generator) * 0.1).to(form.dtype)
        found.append(value)
    return found


def _on_cpu(module: GraphModule) -> GraphModule:
    def moved(value: Any) -> Any:
        return torch.device("cpu") if isinstance(value, torch.device) else value

    for node in module.graph.nodes:
        node.args = map_aggregate(node.args, moved)
        node.kwargs = map_aggregate(node.kwargs, moved)
    module.recompile()
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
                    POINTWISE if "r0_numel" not in given else 16,
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

    if convert.__name__ != "with_numbers":
        interpreter._implicit_cvt = with_numbers


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
