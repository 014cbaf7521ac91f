"""Boundary and tail: the traced update in place of each `update` marker.

update(h, which, params, grads) -> params'     becomes calls of the update's bodies, submodules of the program: one for
                                               each parameter, where they are independent. State tensors and host
                                               scalars become inputs, and new state becomes writes.
Where updates are shared out among the ranks, the calls of this one, on its pieces (shared_update.py).
An opaque update's marker stays: the program is cut there (stages.py).
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from gradsync_fx.ir.builder import Draft
from gradsync_fx.ir.ops import argument
from gradsync_fx.ir.program import Kind, Slot
from gradsync_fx.optim.subgraphs import Body, BodyCall
from gradsync_fx.passes.mask import unless_empty
from gradsync_fx.passes.shared_update import SharedUpdate
from gradsync_fx.planning.plan import Plan


def update_key(node: Node) -> str:
    """Names one update of a step: the node's position among its updates is stable under copying."""
    return node.name


def inline_updates(draft: Draft, plan: Plan) -> None:
    """Puts each traced update into the program. Names of state slots tell optimizer, parameter and key."""
    for step_node in plan.regions.updates:
        if plan.is_open([step_node]):
            continue
        marker = draft.of[step_node]
        key = update_key(step_node)
        if key in plan.opaque:
            marker.meta["opaque"] = plan.opaque[key]
            marker.meta["parameters"] = [plan.names[id(p)] for p in plan.opaque[key].parameters]
            continue
        update = plan.updates[key]
        label = type(update.optimizer).__name__
        states: dict[int, Node] = {}
        for i in sorted({n for call in update.calls for n in call.states}):
            place, tensor = update.states[i], plan.state_tensors[key][i]
            slot = Slot(Kind.STATE, f"{label}[{place[1]}].{place[2]}", (key, i))
            states[i] = draft.input(slot, tensor)
        scalars = []
        for i in range(update.scalar_count):
            # One tensor for each: equal tensors would share one fake value, and that one symbol.
            form = torch.empty((), dtype=torch.float64)
            scalars.append(draft.input(Slot(Kind.SCALAR, f"{label} scalar {i}", (key, i)), form))
        held = {update.states[i]: node for i, node in states.items()}
        params = dict(zip(update.which, argument(marker, 2), strict=True))
        grads = dict(zip(update.which, argument(marker, 3), strict=True))
        shared = SharedUpdate(draft, plan, marker, update, dict(params), dict(grads))
        names: dict[Body, str] = {}
        created = []
        new: dict[int, Node] = {}
        for call in update.calls:
            if call.body not in names:
                names[call.body] = _add_body(draft, label, call.body)
            inputs = [
                *(shared.parameter(i) for i in call.params),
                *(shared.gradient(i) for i in call.params),
                *(states[i] for i in call.states),
                *(scalars[i] for i in call.scalars),
            ]
            results = _call(draft, marker, names[call.body], call, inputs)
            with draft.graph.inserting_before(marker):
                for i, value in zip(call.params, results, strict=False):
                    new[i] = value if shared.is_shared(i) else unless_empty(draft, value, params[i])
            for place, value in zip(call.written, results[len(call.params) :], strict=True):
                if place not in held:
                    created.append(value)
                    continue
                with draft.graph.inserting_before(marker):
                    kept = unless_empty(draft, value, held[place])
                draft.write(held[place], kept)
        with draft.graph.inserting_before(marker):
            for i, value in shared.gathered(new).items():
                new[i] = unless_empty(draft, value, params[i])
        draft.set_outputs([*draft.outputs(), *created])
        for item in list(marker.users):
            item.replace_all_uses_with(new[update.which[argument(item, 1)]])


def _add_body(draft: Draft, label: str, body: Body) -> str:
    name = f"{label.lower()}_{sum(1 for _ in draft.module.children())}"
    module = GraphModule(dict(body.tensors), body.graph, label)
    module.meta["pointwise"] = body.pointwise
    draft.module.add_submodule(name, module)
    return name


def _call(draft: Draft, marker: Node, name: str, call: BodyCall, inputs: list[Node]) -> list[Node]:
    """A body's results in the forms of what they replace; those of new state as in the trace."""
    (out,) = call.body.graph.find_nodes(op="output")
    count = len(call.params)
    # A pointwise body was traced for some parameter: each of its results has the shape of this one's.
    like = inputs[0].meta["val"] if call.body.pointwise else None
    forms = [
        draft.form(v if like is None or not v.dim() else like, dtype=v.dtype)
        for v in (n.meta["val"] for n in out.args[0])
    ]
    forms[:count] = [draft.form(node.meta["val"]) for node in inputs[:count]]
    with draft.graph.inserting_before(marker):
        node = draft.graph.call_module(name, tuple(inputs))
        node.meta["val"] = tuple(forms)
        return [draft.call_known(form, operator.getitem, node, i) for i, form in enumerate(forms)]
