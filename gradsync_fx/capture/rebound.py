"""Tensors that a step puts in the place of others: `self.average = 0.9 * self.average + 0.1 * weight`.

One that is made of gradients or of updated parameters is put there once per update, like the same written into the old
tensor; until then the old one stays. The host does that, after the update, with a value of the program:

    a trace notes which tensors go where -> the finished graph shows which of them wait (settle_rebound)
        -> the next trace leaves these to the host (keep_rebound), as it does the calls of schedulers
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule, Node

from gradsync_fx._torch import (
    ConstDictVariable,
    ListVariable,
    TensorVariable,
    TupleVariable,
    UserDefinedObjectVariable,
)
from gradsync_fx.capture.source_names import users_name
from gradsync_fx.capture.trace_state import (
    Observed,
    const,
    observed,
    real_of_variables,
    variable_of,
)
from gradsync_fx.capture.untouched import tensors_in
from gradsync_fx.errors import CaptureError
from gradsync_fx.ir.dataflow import downstream, upstream
from gradsync_fx.ir.program import Kind, Slot, Step, output_values
from gradsync_fx.ir.regions import find_regions


@dataclass(frozen=True, slots=True)
class Rebound:
    """A place that got another tensor.

    place: Dynamo's name for it. before: what was there, as far as it is known. values: names of the nodes that go
    there. settable: whether the host can put it there. taken: the number of the host's value that it does so with.
    """

    place: str
    line: str
    before: tuple[Any, ...]
    values: tuple[str, ...]
    settable: bool
    taken: int | None


@dataclass(frozen=True, slots=True)
class _Place:
    """name: Dynamo's. before: the tensors there. values: variables of those that come. take: leaves it as it was, and
    gives variable, object and method by which the host sets it, with its name there; None where it can't."""

    name: str
    before: list[Any]
    values: list[Any]
    take: Callable[[], tuple[Any, Any, str, Any]] | None


def keep_rebound(tx: Any, after_update: Callable[..., Any], guard: Callable[[Any], None]) -> None:
    """At the end of a trace: notes all such places, and leaves those to the host of which it is known.

    after_update: makes a call of the host's. guard: of the object that it is made on.
    """
    seen = observed().in_graph(tx.output)
    for place in list(_places(tx)):
        taken = None
        if place.name in seen.left_to_host and place.take is not None:
            variable, owner, method, key = place.take()
            guard(variable)
            taken = seen.host_values
            after_update(tx, owner, None, [const(key), *place.values], {}, method)
        seen.rebound.append(
            Rebound(
                place.name,
                seen.lines.get(place.name, ""),
                tuple(place.before),
                tuple(v.as_proxy().node.name for v in place.values),
                place.take is not None,
                taken,
            )
        )


def _places(tx: Any) -> Iterator[_Place]:
    yield from _attributes(tx)
    yield from _items(tx)


def _attributes(tx: Any) -> Iterator[_Place]:
    for owner, attributes in list(tx.output.side_effects.store_attr_mutations.items()):
        source = getattr(owner, "source", None)
        if source is None or isinstance(owner, TensorVariable):
            continue
        for name, new in list(attributes.items()):
            values = _tensors(new)
            if not values:
                continue
            whole = f"{source.name}.{name}"
            if not isinstance(owner, UserDefinedObjectVariable):
                # A variable of the module, or of a function round the step: known by its name alone.
                yield _Place(
                    source.name if source.name.startswith("G[") else whole, [], values, None
                )
                continue
            take = None
            if isinstance(new.realize(), TensorVariable):

                def take(
                    owner: Any = owner, name: str = name, attributes: Any = attributes
                ) -> tuple[Any, Any, str, Any]:
                    del attributes[name]
                    return owner, owner.value, "__setattr__", name

            yield _Place(whole, tensors_in(getattr(owner.value, name, None)), values, take)


def _items(tx: Any) -> Iterator[_Place]:
    for real, var in real_of_variables(tx, (dict, list)):
        source = getattr(var, "source", None)
        if source is None or not getattr(var.mutation_type, "is_modified", False):
            continue
        for key, at, new in _entries(real, var):
            there = key in real if isinstance(real, dict) else True
            before = tensors_in(real[key]) if there else []
            old = variable_of(tx, before[0]) if before and real[key] is before[0] else None
            values = _tensors(new)
            if not values or new is old:
                continue
            take = None
            if isinstance(new.realize(), TensorVariable) and (old is not None or not there):

                def take(
                    var: Any = var, real: Any = real, key: Any = key, at: Any = at, old: Any = old
                ) -> tuple[Any, Any, str, Any]:
                    if old is None:
                        del var.items[at]
                    else:
                        var.items[at] = old
                    return var, real, "__setitem__", key

            yield _Place(f"{source.name}[{key!r}]", before, values, take)


def _entries(real: Any, var: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Of a dictionary, or of a list as far as it went before: the key, and Dynamo's own, with its variable."""
    if isinstance(var, ConstDictVariable):
        for at, new in list(var.items.items()):
            if at.vt.is_python_constant():
                yield at.vt.as_python_constant(), at, new
    elif isinstance(var, ListVariable):
        yield from ((i, i, new) for i, (_, new) in enumerate(zip(real, var.items, strict=False)))


def _tensors(variable: Any) -> list[Any]:
    """The variables of new tensors in what is put somewhere: one, or several in lists and dictionaries."""
    if not getattr(variable, "is_realized", lambda: True)():
        return []  # what was there before the step, and nobody has looked at
    variable = variable.realize()
    if isinstance(variable, TensorVariable):
        return [] if getattr(variable, "source", None) is not None else [variable]
    if isinstance(variable, ListVariable | TupleVariable):
        return [tensor for item in variable.items for tensor in _tensors(item)]
    if isinstance(variable, ConstDictVariable):
        return [tensor for item in variable.items.values() for tensor in _tensors(item)]
    return []


def settle_rebound(
    step: Step, seen: Observed, outputs: Sequence[str], sources: Sequence[tuple[str, Any]]
) -> Step:
    """The step, which knows of what the host puts into its places.

    outputs: names of its outputs in Dynamo's graph. sources: its inputs, as Dynamo calls them, each with its value.
    Raises `CaptureError` where the host has to, and does not yet: to be traced anew, or for the user.
    """
    if not seen.rebound:
        return step
    read = {
        r.place: [i for i, (name, real) in enumerate(sources) if _is_there(r, name, real)]
        for r in seen.rebound
    }
    known = replace(
        step,
        replaced=tuple(sorted({i for positions in read.values() for i in positions})),
        assigned=frozenset(r.taken for r in seen.rebound if r.taken is not None),
    )
    late = _late(known, [r for r in seen.rebound if r.taken is None], read, outputs)
    for rebound in late:
        if not rebound.settable and read[rebound.place]:
            raise _refusal(rebound, seen)
    if wanted := {r.place for r in late if r.settable}:
        seen.left_to_host |= wanted
        raise CaptureError(
            "a tensor in the place of another", seen="it is put there with an update"
        )
    taken = tuple(i for r in seen.rebound if r.taken is not None for i in read[r.place])
    slots = [
        Slot(Kind.DATA, slot.name, i) if i in taken else slot for i, slot in enumerate(step.slots)
    ]
    return replace(known, slots=tuple(slots), replaced=taken)


def _is_there(rebound: Rebound, name: str, real: Any) -> bool:
    return rebound.place in (name, f"{name}.cell_contents") or any(
        real is tensor for tensor in rebound.before
    )


def _late(
    step: Step, open_: list[Rebound], read: dict[str, list[int]], outputs: Sequence[str]
) -> list[Rebound]:
    """Those that wait for an update: made of gradients or updates, or a count that feeds such values alone."""
    if not open_:
        return []
    regions, results = find_regions(step), output_values(step.module)
    # AOTAutograd may put inputs before them, which it writes by itself.
    given = dict(zip(outputs, results[len(results) - len(outputs) :], strict=True))
    holders = step.module.graph.find_nodes(op="placeholder")
    nodes = {
        # An input is what was there before, written in place.
        r.place: [n for v in r.values if (n := given.get(v)) is not None and n.op != "placeholder"]
        for r in open_
    }
    late = {r.place for r in open_ if regions.beyond & set(nodes[r.place])}
    waiting = {n for place in late for n in nodes[place]} | set(regions.boundary_writes)
    data = {
        holder
        for i, (holder, slot) in enumerate(zip(holders, step.slots, strict=True))
        if slot.kind is Kind.DATA and i not in step.replaced
    }
    forward = upstream([marker for markers in regions.gradients.values() for marker in markers])

    def counts(rebound: Rebound) -> bool:
        own = {*nodes[rebound.place], *(holders[i] for i in read[rebound.place])}
        return not own & forward and not upstream(own) & data and bool(downstream(own) & waiting)

    return [r for r in open_ if r.place in late or counts(r)]


def _refusal(rebound: Rebound, seen: Observed) -> CaptureError:
    name = users_name(rebound.place, seen.function)
    return CaptureError(
        f"{name} in the step" + (f", set at {rebound.line}" if rebound.line else ""),
        seen="another tensor is put there, made of gradients or of updated parameters and of what was there",
        wanted="one tensor in an attribute of an object, a dictionary or a list: it is put there with an update",
        fix="write into the tensor that is there: average.mul_(0.9).add_(weight, alpha=0.1) under torch.no_grad(); or "
        "keep it in an attribute",
    )


def check_rebound(step: Step, *, several: bool) -> None:
    """Raises `CaptureError` for such a tensor where each optimizer has a window of its own: which one it belongs to is
    not known."""
    if several and step.assigned:
        names = ", ".join(step.slots[i].name for i in step.replaced) or "a tensor"
        raise CaptureError(
            f"{names} in the step",
            seen="another tensor is put there with an update, and optimizers have windows of their own",
            wanted="one window for the whole step",
            fix="write into the tensor that is there: average.mul_(0.9).add_(weight, alpha=0.1) under torch.no_grad()",
        )


def output_names(module: GraphModule) -> list[str]:
    """Names of the outputs of Dynamo's graph; "" for what is no node."""
    (out,) = module.graph.find_nodes(op="output")
    return [value.name if isinstance(value, Node) else "" for value in out.args[0]]
