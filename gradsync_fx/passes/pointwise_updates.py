"""Updates that work element by element, compiled once each and run over one parameter after the other, in place.

boundary(..., g) -> g * clip -> adamw(p, m, v, g, scalars) -> p', m', v' -> copies; acc' = 0

becomes     main program, which gives the reduced gradients and the clip factor, then for each parameter one call of

kernel(n, p, g, m, v, scalars, clip)      n elements of flat views; writes p, m, v, and zeroes g where g is the sum

A kernel is a graph of one dimension with a symbolic size, so one compilation serves parameters of all shapes. What
scales a gradient by a tensor without dimensions (division, clipping) goes into the kernel, too. A call is left in the
program where its results are read by more than the write, or where the program writes what it reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from gradsync_fx._torch import (
    ConstantSource,
    DimDynamic,
    FakeTensorMode,
    ShapeEnv,
    StatelessSymbolicContext,
)
from gradsync_fx.comm.inplace_all_reduce import WAIT_SUMS
from gradsync_fx.ir.builder import emit
from gradsync_fx.ir.ops import argument
from gradsync_fx.ir.program import output_values
from gradsync_fx.passes.fuse import resets
from gradsync_fx.passes.inline import copy_body
from gradsync_fx.passes.rewritten import (
    Cut,
    Kernel,
    KernelCall,
    Operand,
    Rewritten,
    Wait,
    copy_module,
)


_aten = torch.ops.aten


def cut_updates(rewritten: Rewritten) -> None:
    """Takes the calls that kernels can make out of a program; what stays is the main program."""
    rewritten.cut = _UpdateCutter(rewritten.main).cut()
    rewritten.updates = {kernel: copy_module(kernel.module) for kernel in rewritten.cut.kernels}


class _UpdateCutter:
    def __init__(self, module: GraphModule) -> None:
        self.module, self.graph = module, module.graph
        self.position = {h: i for i, h in enumerate(self.graph.find_nodes(op="placeholder"))}
        self.found = Cut()
        self.kernels: dict[str, Kernel] = {}
        self.resets = resets(module)
        self.writes: dict[Node, list[Node]] = {}
        self.zeroed: set[Node] = set()
        self.kept: dict[Node, Node] = {}
        copies = self.graph.find_nodes(op="call_function", target=_aten.copy_.default)
        for copy in copies:
            self.writes.setdefault(argument(copy, 0), []).append(copy)

    def cut(self) -> Cut:
        for node in self.graph.find_nodes(op="call_module"):
            copies = self._copies(node)
            if copies is not None:
                self._cut_call(node, copies)
        (out,) = self.graph.find_nodes(op="output")
        out.args = ((*output_values(self.module), *self.found.extras),)
        self.graph.eliminate_dead_code(_lasts)
        self._cut_waits()
        self.module.delete_all_unused_submodules()
        self.module.recompile()
        return self.found

    def _copies(self, call: Node) -> dict[int, Node] | None:
        """By result the write of it; None where a kernel cannot stand for this call."""
        body = self.module.get_submodule(str(call.target))
        assert isinstance(body, GraphModule)
        form = argument(call, 0).meta["val"]
        if not body.meta.get("pointwise") or form.device.type != "cpu" or form.dim() == 0:
            return None
        found: dict[int, Node] = {}
        for item in call.users:
            for copy in item.users:
                onto = copy.args[0]
                if copy.target is not _aten.copy_.default or onto not in call.args or copy.users:
                    return None
                found[argument(item, 1)] = copy
            if len(item.users) > 1:
                return None
        written = {argument(copy, 0) for copy in found.values()}
        inputs: list[Any] = list(call.args)
        for node in inputs:
            others = len(self.writes.get(node, ())) - (node in written)
            zeroed = node is inputs[1] and node in self.resets
            if node in self.position and others and not zeroed:
                return None
        if self.zeroed.intersection(scaling_of(argument(call, 1))[0].all_input_nodes):
            return None  # an earlier call reads the same sum, and zeroes it
        return found if inputs[0] in written else None

    def _cut_call(self, call: Node, copies: dict[int, Node]) -> None:
        body = self.module.get_submodule(str(call.target))
        total, scaling = scaling_of(argument(call, 1))
        raw = self._sum_in_place(total)
        zeroes = raw in self.resets
        inputs: list[Any] = list(call.args)
        written = {i: argument(copy, 0) for i, copy in sorted(copies.items())}
        beside = [n for n in inputs[2:] if n.meta["val"].dim() and n not in written.values()]
        full = [*written.values(), raw, *beside]
        single = [n for n in inputs[2:] if not n.meta["val"].dim()]
        single += [n for step in scaling for n in step.all_input_nodes if not n.meta["val"].dim()]
        single = list(dict.fromkeys(single))
        number = {n: i for i, n in enumerate((*full, *single, *scaling))}
        number[total] = number[raw]
        text = str(
            [
                call.target,
                list(written),
                zeroes,
                [(n.meta["val"].dtype, number.get(n)) for n in (*inputs[:1], *inputs[2:])],
                [(n.meta["val"].dtype, n.meta["val"].device) for n in (*full, *single)],
                [
                    (s.target, torch.fx.map_arg((s.args, s.kwargs), lambda n: f"%{number[n]}"))
                    for s in scaling
                ],
            ]
        )
        if text not in self.kernels:
            assert isinstance(body, GraphModule)
            stands = {total: raw, inputs[1]: scaling[-1] if scaling else raw}
            inputs = [stands.get(n, n) for n in inputs]
            self.kernels[text] = _kernel(
                body, inputs, written, full, single, scaling, total, resets=zeroes
            )
        if zeroes:
            self.zeroed.add(raw)
            self.graph.erase_node(self.resets.pop(raw))
        for copy in copies.values():
            self.graph.erase_node(copy)
        self.found.calls.append(
            KernelCall(
                self.kernels[text],
                tuple(self._value(n) for n in full),
                tuple(self._value(self._as_it_was(n, call)) for n in single),
            )
        )

    def _cut_waits(self) -> None:
        """A bucket that only kernels read is waited for right before them: others' updates run meanwhile."""
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        calls: list[KernelCall | Wait] = list(self.found.calls)
        last: list[KernelCall | Wait] = []
        for wait in self.graph.find_nodes(op="call_function", target=WAIT_SUMS):
            sums: list[Node] = argument(wait, 0)
            if any(order[u] > order[wait] for total in sums for u in total.users):
                continue
            self.graph.erase_node(wait)
            waited = Wait(tuple(self._value(n) for n in sums))
            mine = [c for c in calls if isinstance(c, KernelCall) and {*c.tensors} & {*waited.sums}]
            calls = [c for c in calls if c not in mine]
            last += [waited, *mine]
        self.found.calls = [*calls, *last]

    def _sum_in_place(self, raw: Node) -> Node:
        """acc + g, where acc is zeroed afterwards: the sum goes into acc, and the zeroing into the kernel."""
        if raw.target is not _aten.add.Tensor or raw.args[0] not in self.resets:
            return raw
        acc = argument(raw, 0)
        form, total = acc.meta["val"], raw.meta["val"]
        if (form.dtype, form.shape, form.stride()) != (total.dtype, total.shape, total.stride()):
            return raw
        with self.graph.inserting_before(self.resets[acc]):
            copy = self.graph.call_function(_aten.copy_.default, (acc, raw))
        copy.meta["val"] = form
        return acc

    def _as_it_was(self, holder: Node, call: Node) -> Node:
        """What a call reads of an input that the program writes before the call comes: the window's weight, say."""
        if self.writes.get(holder) and holder not in self.kept:
            with self.graph.inserting_before(call):
                self.kept[holder] = self.graph.call_function(_aten.clone.default, (holder,))
            # A value of its own: one that shared the input's storage would be a view of it to Inductor.
            self.kept[holder].meta["val"] = holder.meta["val"].clone()
        return self.kept.get(holder, holder)

    def _value(self, node: Node) -> Operand:
        if node in self.position:
            return Operand("input", self.position[node])
        if node not in self.found.extras:
            self.found.extras.append(node)
        return Operand("extra", self.found.extras.index(node))


def _lasts(node: Node) -> bool:
    return (
        node.op in ("placeholder", "output")
        or node.target is _aten.copy_.default
        or (node.op == "call_function" and node.is_impure())
    )


def scaling_of(gradient: Node) -> tuple[Node, list[Node]]:
    """The tensor that a gradient is made of, and the ops on it that need no other tensor with dimensions."""
    steps: list[Node] = []
    while gradient.op == "call_function":
        tags = getattr(gradient.target, "tags", ())
        cast = gradient.target is torch.ops.prims.convert_element_type.default
        if not (cast or torch.Tag.pointwise in tags):
            break
        tensors = [n for n in gradient.all_input_nodes if n.meta["val"].dim()]
        if len(tensors) != 1:
            break
        if tensors[0].meta["val"].shape != gradient.meta["val"].shape:
            break
        steps.insert(0, gradient)
        (gradient,) = tensors
    return gradient, steps


def _kernel(
    body: GraphModule,
    inputs: list[Node],
    written: dict[int, Node],
    full: list[Node],
    single: list[Node],
    scaling: list[Node],
    total: Node,
    *,
    resets: bool,
) -> Kernel:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    module = GraphModule({}, Graph())
    graph = module.graph
    # A hint for the compiler's heuristics, no more.
    dynamic: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    sample = mode.from_tensor(
        torch.empty(4096), symbolic_context=dynamic, source=ConstantSource("n")
    )
    size = graph.placeholder("n")
    size.meta["val"] = sample.shape[0]
    env: dict[Node, Node] = {}
    for i, node in enumerate((*full, *single)):
        env[node] = graph.placeholder(f"t{i}")
        form = node.meta["val"]
        with mode:
            shape = sample.shape if i < len(full) else ()
            env[node].meta["val"] = torch.empty(shape, dtype=form.dtype, device=form.device)
    env.setdefault(total, env[full[len(written)]])
    for node in scaling:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
        env[node] = emit(graph, mode, node.target, args, kwargs)
    results = copy_body(module, body, [env[n] for n in inputs], mode, {}, "body")
    for i, onto in written.items():
        emit(graph, mode, _aten.copy_.default, (env[onto], results[i]), {})
    if resets:
        running = env[full[len(written)]]
        form = running.meta["val"]
        given = {"dtype": form.dtype, "device": form.device, "pin_memory": False}
        zero = emit(graph, mode, _aten.full.default, ([], 0.0), given)
        emit(graph, mode, _aten.copy_.default, (running, zero), {})
    graph.output(())
    module.recompile()
    return Kernel(module, mode, len(written), resets)


def run_calls(calls: list[KernelCall | Wait], inputs: list[Any], extras: list[Any]) -> None:
    """Every update, in place."""
    held = {"input": inputs, "extra": extras}
    for call in calls:
        if isinstance(call, Wait):
            WAIT_SUMS([held[v.kind][v.index] for v in call.sums])
            continue
        tensors = [held[v.kind][v.index] for v in call.tensors]
        scalars = [held[v.kind][v.index] for v in call.scalars]
        _run(call.kernel, tensors, scalars)


def _run(kernel: Kernel, tensors: list[torch.Tensor], scalars: list[torch.Tensor]) -> None:
    first, place = tensors[0], kernel.written
    strides, count = first.stride(), first.numel()
    gradient = tensors[place]
    if gradient.stride() != strides and not kernel.resets:
        tensors[place] = torch.empty_like(first, dtype=gradient.dtype).copy_(gradient)
    alike = all(t.stride() == strides for t in tensors)
    if kernel.run is None or count < 2 or not alike or not _is_dense(first):
        # No op looks at the shape: as it stands, the graph runs on tensors of any shape.
        kernel.module(count, *tensors, *scalars)
    else:
        kernel.run([count, *(t.as_strided((count,), (1,)) for t in tensors), *scalars])


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a stretch of memory, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
