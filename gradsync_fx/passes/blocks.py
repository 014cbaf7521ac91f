"""Layers of a model are compiled once: what repeats in a program becomes a body, called for each layer.

    x1 = layer(x0, weights 0)            body: (written, read) -> layer
    x2 = layer(x1, weights 1)     ->     (x1,) = run_block(body, [], [x0, *weights 0])
    x3 = layer(x2, weights 2)            (x2,) = run_block(body, [], [x1, *weights 1]) ...

Found by structure: the nodes of a trace stand in the order of the model's code, so layers are a stretch of it that
repeats (ir/repeats.py), in forward and in backward. Two of them are the same where each node has the same op, the same
constants, and arguments that come from the same places; no module path is looked at. Running sums are written inside
of a body. What is not in it, say a reduction that starts between two layers, comes after the layer that it needs.

Bodies are worth it where a call of one takes so long that handing over its arguments does not show. Values of symbolic
sizes, and programs on other devices than the CPU, stay as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from gradsync_fx._torch import OpOverload
from gradsync_fx.ir.builder import emit
from gradsync_fx.ir.graph_copy import module_of
from gradsync_fx.ir.memory import (
    MAY_ALIAS,
    base_of,
    form_apart,
    order_by_memory,
    viewed,
    written,
)
from gradsync_fx.ir.ops import argument, is_collective
from gradsync_fx.ir.repeats import Stretch, stretches_of
from gradsync_fx.passes.device_numbers import accelerator_of
from gradsync_fx.passes.fuse import ADD_PRODUCT
from gradsync_fx.passes.rewritten import Block, Rewritten
from gradsync_fx.planning.worth import CORE, seconds


_aten = torch.ops.aten
_LIBRARY = torch.library.Library("gradsync_fx", "FRAGMENT")
_LIBRARY.define("run_block(str body, Tensor(a!)[] written, Tensor[] read) -> Tensor[]")

# A call of a body costs some 50 us more than its nodes in place; so it should take this many seconds at least.
WORTH_A_CALL = 2e-3
# Nodes that have to be repetitions: compiling a hundred takes a second or two. And layers that stand in a row: what a
# body is given lives to its end, so that a call holds some of one layer's values more than the whole program would.
LEAST, FEWEST = 100, 3
# Places where a stretch may begin: how many are looked at, and how many of these, the best first, are tried.
_PLACES, _TRIES = 64, 8
_FREE = (_aten.copy_.default, ADD_PRODUCT)  # their only effect is on the sum that they write

# Compiled bodies by name, and what they give: for as long as the process, as Inductor keeps its own code.
BODIES: dict[str, Callable[[list[Any]], Any]] = {}
FORMS: dict[str, list[tuple[Any, ...]]] = {}


def _run_block(body: str, written: list[torch.Tensor], read: list[torch.Tensor]) -> list[Any]:
    return list(BODIES[body]([*written, *read]))


@torch.library.register_fake("gradsync_fx::run_block", lib=_LIBRARY)
def _run_block_fake(body: str, written: list[torch.Tensor], read: list[torch.Tensor]) -> list[Any]:
    return [
        torch.empty_strided(shape, strides, dtype=dtype, device=device)
        for shape, strides, dtype, device in FORMS[body]
    ]


def _run_block_functionally(body: str, written: list[Any], read: list[Any]) -> list[Any]:
    """Inductor takes an op that writes and returns a list if there is such a kernel. No trace calls it."""
    raise NotImplementedError("bodies are called in lowered programs, which are not traced again")


_LIBRARY.impl("run_block", _run_block, "CompositeExplicitAutograd")
_LIBRARY.impl("run_block", _run_block_functionally, "Functionalize")
RUN_BLOCK = torch.ops.gradsync_fx.run_block.default


def name_body(rewritten: Rewritten, block: Block, name: str) -> None:
    """Has the calls of a block, in the graph that is compiled, find its body by this name."""
    (out,) = block.module.graph.find_nodes(op="output")
    FORMS[name] = [_form(n.meta["val"]) for n in out.args[0]]
    for module in rewritten.modules():
        for call in module.graph.find_nodes(op="call_function", target=RUN_BLOCK):
            if call.meta["block"] is block:
                call.update_arg(0, name)


def outline_blocks(rewritten: Rewritten) -> None:
    """Bodies for what repeats, in the graph that is compiled."""
    if accelerator_of(rewritten.program.inputs()) is not None:
        return
    module = rewritten.main if rewritten.halves is None else rewritten.halves.first
    nodes = [n for n in module.graph.nodes if _may_repeat(n)]
    numbers: dict[Hashable, int] = {}
    tokens = [numbers.setdefault(_token(n), len(numbers)) for n in nodes]
    stretches = [s for s in stretches_of(tokens, LEAST) if s.count >= FEWEST]
    order = order_by_memory(module.graph.nodes, _FREE) if stretches else {}
    for stretch in stretches:
        layers = _layers(nodes, stretch, order)
        if layers and seconds(layers[0].nodes, CORE) >= WORTH_A_CALL:
            _outline(rewritten, module.graph, layers)


def _may_repeat(node: Node) -> bool:
    """Whether a body may hold a node: an op of torch without an effect but on a running sum."""
    if node.op != "call_function":
        return False
    if not all(_is_static(n.meta.get("val")) for n in (node, *node.all_input_nodes)):
        return False
    if node.target in (_aten.copy_.default, ADD_PRODUCT):
        return argument(node, 0).op == "placeholder" and not node.users
    if node.target is operator.getitem:
        return _may_repeat(argument(node, 0))
    if not isinstance(node.target, OpOverload) or written(node.target) or is_collective(node):
        return False
    return not node.is_impure(impure_random=False)


def _is_static(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_static, value))
    if value is None or isinstance(value, int | float | bool):
        return True
    return isinstance(value, torch.Tensor) and all(
        type(n) is int for n in (*value.shape, *value.stride())
    )


def _token(node: Node) -> Hashable:
    """Equal for nodes that do the same with what is given to them, wherever that comes from."""
    return node.target, _frozen((node.args, node.kwargs), lambda n: _form(n.meta.get("val")))


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, str(value.device)
    if isinstance(value, list | tuple):
        return tuple(map(_form, value))
    return value


def _frozen(value: Any, of: Callable[[Node], Hashable]) -> Hashable:
    if isinstance(value, Node):
        return "node", of(value)
    if isinstance(value, list | tuple):
        return tuple(_frozen(v, of) for v in value)
    if isinstance(value, dict):
        return tuple((k, _frozen(v, of)) for k, v in sorted(value.items()))
    return type(value).__name__, str(value)


@dataclass(slots=True)
class _Layer:
    """One of the places where a body is called.

    nodes: what it replaces. outside: what these read of others, each once, in the order of the first look. late: nodes
    among them that have to come after it.
    """

    nodes: list[Node]
    outside: list[Node] = field(default_factory=list)
    late: list[Node] = field(default_factory=list)

    @property
    def written(self) -> list[Node]:
        found = (argument(n, 0) for n in self.nodes if written(n.target))
        return list(dict.fromkeys(found))

    def shape(self) -> tuple[Hashable, ...]:
        """Equal for layers that are the same body. Fills `outside`."""
        place = {node: i for i, node in enumerate(self.nodes)}
        given: dict[Node, int] = {}

        def source(node: Node) -> Hashable:
            if node in place:
                return "inside", place[node]
            return "outside", given.setdefault(node, len(given)), _form(node.meta.get("val"))

        found = tuple((n.target, _frozen((n.args, n.kwargs), source)) for n in self.nodes)
        self.outside = list(given)
        return found

    def gives(self) -> list[int]:
        """Positions of the nodes that others read."""
        inside = set(self.nodes)
        return [i for i, n in enumerate(self.nodes) if not inside.issuperset(n.users)]

    def takes(self) -> set[Node]:
        """What it reads of others."""
        return {n for node in self.nodes for n in node.all_input_nodes} - set(self.nodes)

    def can_be_called(self, order: dict[Node, frozenset[Node]]) -> bool:
        """Whether one call can stand for it: tensors go in and out, what it writes is nothing that it reads otherwise,
        and nothing among its nodes has to come both after and before some of them. Fills `late`."""
        given = [self.nodes[i] for i in self.gives()]
        if not all(isinstance(n.meta.get("val"), torch.Tensor) for n in (*given, *self.outside)):
            return False
        onto = set(self.written)
        looks = [*given, *(n for n in self.outside if n not in onto)]
        if any(base_of(n, MAY_ALIAS) in onto for n in looks):
            return False
        inside, late = set(self.nodes), set[Node]()
        node, last = self.nodes[0], self.nodes[-1]
        while node is not last:
            node = node.next
            before = {*node.all_input_nodes, *order.get(node, ())}
            if node in inside and late & before:
                return False
            if node not in inside and before & (inside | late):
                late.add(node)
                self.late.append(node)
        return True


def _layers(
    nodes: Sequence[Node], stretch: Stretch, order: dict[Node, frozenset[Node]]
) -> list[_Layer]:
    """The layers of a stretch, cut where the fewest values pass from one to the next; none where they differ."""

    def cut(start: int) -> list[_Layer]:
        first = stretch.start + start
        ends = (first + i * stretch.period for i in range(stretch.count))
        return [_Layer(list(nodes[at : at + stretch.period])) for at in ends]

    def passing(start: int) -> int:
        layer = cut(start)[1]
        return len(layer.gives()) + len(layer.takes())

    places = range(0, stretch.slack + 1, stretch.slack // _PLACES + 1)
    for start in sorted(places, key=passing)[:_TRIES]:
        layers = cut(start)
        alike = len({layer.shape() for layer in layers}) == 1
        if alike and all(layer.can_be_called(order) for layer in layers):
            return layers
    return []


def _outline(rewritten: Rewritten, graph: Graph, layers: list[_Layer]) -> None:
    """Replaces layers by calls of one body, unless torch gives its values another form there."""
    first = layers[0]
    given = sorted({i for layer in layers for i in layer.gives()})
    bases = sorted({i for i in (_base(first, i) for i in given) if i is not None})
    onto = [first.outside.index(n) for n in first.written]
    read = [i for i in range(len(first.outside)) if i not in onto]
    module = _body(rewritten, first, [*onto, *read], bases)
    if module is None:
        return
    block = Block(module, f"block {len(rewritten.blocks)}")
    rewritten.blocks.append(block)
    for layer in layers:
        layer.shape()  # what it reads of the layer before is another value by now
        inputs = [[layer.outside[i] for i in positions] for positions in (onto, read)]
        _replace(graph, layer, block, inputs, given, bases)


def _base(layer: _Layer, position: int) -> int | None:
    """The node of a layer in whose memory a value lies, by position; None where that is none of the layer's."""
    place = {node: i for i, node in enumerate(layer.nodes)}
    node = layer.nodes[position]
    while node in place and (index := _seen_through(node)) is not None:
        node = argument(node, index)
    return place.get(node)


def _seen_through(node: Node) -> int | None:
    """The position of the argument that a value is, or may be, a view of; None where it has its own memory."""
    if node.target is operator.getitem:
        return 0 if _seen_through(argument(node, 0)) is not None else None
    if node.target in MAY_ALIAS:
        same = argument(node, 0).meta["val"].dtype is node.meta["val"].dtype
        return 0 if same else None
    return viewed(node.target)


def _body(
    rewritten: Rewritten, layer: _Layer, inputs: list[int], outputs: list[int]
) -> GraphModule | None:
    """The graph of a layer, with names that say nothing of the program: equal bodies are equal text."""
    graph, env = Graph(), dict[Node, Node]()
    for number, position in enumerate(inputs):
        like = layer.outside[position]
        env[like] = graph.placeholder(f"given_{number}")
        with rewritten.fake_mode:
            env[like].meta["val"] = form_apart(like.meta["val"])
    for node in layer.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
        env[node] = emit(graph, rewritten.fake_mode, node.target, args, kwargs)
        if _form(env[node].meta["val"]) != _form(node.meta.get("val")):
            return None
    graph.output(tuple(env[layer.nodes[i]] for i in outputs))
    return module_of({}, graph)


def _replace(
    graph: Graph,
    layer: _Layer,
    block: Block,
    inputs: list[list[Node]],
    given: list[int],
    bases: list[int],
) -> None:
    with graph.inserting_after(layer.nodes[-1]):
        call = graph.call_function(RUN_BLOCK, (block.name, *inputs))
    call.meta["block"] = block
    call.meta["val"] = [form_apart(layer.nodes[i].meta["val"]) for i in bases]
    now: dict[Node, Node] = {}
    at = call
    for number, position in enumerate(bases):
        node = layer.nodes[position]
        with graph.inserting_after(at):
            at = now[node] = graph.call_function(operator.getitem, (call, number))
        at.meta.update(node.meta)
    inside = set(layer.nodes)
    for position in given:
        at = _look_again(graph, layer.nodes[position], inside, now, at)
    for node in layer.late:
        at.append(node)
        at = node
    for position in given:
        node = layer.nodes[position]
        node.replace_all_uses_with(now[node], delete_user_cb=lambda user: user not in inside)
    for node in reversed(layer.nodes):
        graph.erase_node(node)


def _look_again(
    graph: Graph, node: Node, inside: set[Node], now: dict[Node, Node], at: Node
) -> Node:
    """Makes, behind the call, the views through which others see a value of a layer. Returns the last node made."""
    if node in now or node not in inside:
        return at
    index = _seen_through(node)
    assert index is not None
    at = _look_again(graph, argument(node, index), inside, now, at)
    with graph.inserting_after(at):
        now[node] = graph.node_copy(node, lambda n: now.get(n, n))
    return now[node]
