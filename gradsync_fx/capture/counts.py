"""Python numbers that a step changes (`self.count += 1`): set in every call, or only with an update.

Each is a symbol of the trace, so that the graph shows its uses. A number that reaches only updates and what depends on
them (the decay of an average) is set when there is an update; any other (a counter of calls) is set in every call. The
finished graph decides (with_updates.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gradsync_fx._torch import (
    ConstantVariable,
    ConstDictVariable,
    ListVariable,
    SymNodeVariable,
    UserDefinedObjectVariable,
    as_dynamic,
    dynamo_builder,
)
from gradsync_fx.capture.deferred_calls import call_after_program
from gradsync_fx.capture.drawn_numbers import is_drawn
from gradsync_fx.capture.source_names import users_name
from gradsync_fx.capture.trace_state import (
    Number,
    const,
    observed,
    real_of_variables,
    refuse,
)
from gradsync_fx.capture.untouched import runs
from gradsync_fx.errors import CaptureError


@dataclass(frozen=True, slots=True)
class FollowedNumber:
    """A number that a captured step changes.

    with_update: only with an update. settable: whether it is an attribute, which we can set later than the step does.
    """

    name: str
    line: str
    with_update: bool
    settable: bool

    def check(self, *, accumulates: bool, several: bool) -> None:
        """Raises `CaptureError` where it would change in calls without an update. several: windows, each its own."""
        if self.with_update and accumulates and (several or not self.settable):
            raise CaptureError(
                f"number {self.name!r}" + (f", set at {self.line}" if self.line else ""),
                seen="the step changes this number, which feeds only what happens once per update, in every call",
                wanted="a number of an attribute, and one window for the whole step"
                if several
                else "such a number as an attribute of an object: self.count += 1",
                fix="keep it in an attribute, or change it outside of the step, where step.sync_gradients is True",
            )


def set_number(owner: Any, name: str, value: Any, index: int) -> None:
    """What Dynamo's code calls after the program, in place of the assignment that it would make itself."""
    now = runs()
    if now is None or not now.capture.numbers[index].with_update:
        setattr(owner, name, value)
    else:
        now.deferred.append(lambda: setattr(owner, name, value))


def keep_numbers(tx: Any) -> None:
    """At the end of a trace: records the numbers that the step changes, and takes over those that are attributes.

    A number that was a constant of this trace becomes a symbol of the next.
    """
    seen = observed().in_graph(tx.output)
    wanted = set[str]()
    for source, before, after, store in [*_of_objects(tx), *_of_containers(tx)]:
        if isinstance(after, ConstantVariable):
            changed = after.as_python_constant() != before
            if changed and source not in seen.symbols:
                wanted.add(source)
        else:
            seen.numbers.append(
                Number(
                    source,
                    seen.lines.get(source, ""),
                    settable=store is not None,
                    branched=0 < seen.updates == seen.set_after.get(source)
                    and _decides_branch(tx.output.shape_env, source),
                )
            )
            if store is not None:
                store(len(seen.numbers) - 1)
    if wanted:
        seen.symbols |= wanted
        refuse(tx, users_name(min(wanted), seen.function), seen="the step changes this number")


def _decides_branch(env: Any, source: str) -> bool:
    """Whether a comparison of this number was decided after the last update."""
    seen = observed()
    return any(
        source == known.name
        for symbol, updates in seen.compared_after.items()
        if updates == seen.updates
        for known in env.var_to_sources.get(symbol, ())
    )


def _of_objects(tx: Any) -> Iterator[tuple[str, Any, Any, Callable[[int], None] | None]]:
    """Source, old value, variable of the new value, and what takes the assignment over."""
    for owner, attributes in list(tx.output.side_effects.store_attr_mutations.items()):
        source = getattr(owner, "source", None)
        for name, new in list(attributes.items()):
            if source is None or not _is_number(new):
                continue
            whole = source.name if source.name.endswith(f"[{name!r}]") else f"{source.name}.{name}"
            if not isinstance(owner, UserDefinedObjectVariable):
                yield whole, None, new.realize(), None
                continue
            whole = _of_class(owner.value, name, source.name) or whole
            before = getattr(owner.value, name, None)
            if type(before) in (int, float):

                def store(
                    index: int, owner: Any = owner, name: str = name, attributes: Any = attributes
                ) -> None:
                    new = attributes.pop(name).realize()
                    call_after_program(tx, set_number, [owner, const(name), new, const(index)])

                yield whole, before, new.realize(), store


def _of_class(value: Any, name: str, source: str) -> str | None:
    """Dynamo's name for a number that only a class has yet: the default that `self.count += 1` begins with."""
    if name in getattr(value, "__dict__", {}):
        return None
    for i, cls in enumerate(type(value).__mro__):
        if type(vars(cls).get(name)) in (int, float):  # no slot
            of = f"type({source})" if i == 0 else f"type({source}).__mro__[{i}]"
            return f"dict({of}.__dict__)[{name!r}]"
    return None


def _of_containers(tx: Any) -> Iterator[tuple[str, Any, Any, None]]:
    for real, var in real_of_variables(tx, (dict, list)):
        source = getattr(var, "source", None)
        if source is None or not getattr(var.mutation_type, "is_modified", False):
            continue
        items: list[tuple[Any, Any]] = []
        if isinstance(var, ConstDictVariable):
            items = [(key.vt.as_python_constant(), new) for key, new in var.items.items()]
        elif isinstance(var, ListVariable):
            items = list(enumerate(var.items))
        for key, new in items:
            before = real.get(key) if isinstance(real, dict) else (real[key : key + 1] or [None])[0]
            if type(before) in (int, float) and _is_number(new):
                yield f"{source.name}[{key!r}]", before, new.realize(), None


def _is_number(variable: Any) -> bool:
    variable = variable.realize()
    if isinstance(variable, ConstantVariable):
        return type(variable.as_python_constant()) in (int, float)
    return isinstance(variable, SymNodeVariable)


def automatic_dynamic(tx: Any, name: str, entry: Any, **kwargs: Any) -> Any:
    """`process_automatic_dynamic` while a step is traced: a number that the step changes, or draws, is a symbol."""
    found = _plain_automatic(tx, name, entry, **kwargs)
    return as_dynamic(found) if name in observed().symbols or is_drawn(name) else found


_plain_automatic: Any = vars(dynamo_builder)["process_automatic_dynamic"]


def stays_constant(value: Any, source: Any) -> bool:
    """`is_int_specialization_case` while a step is traced: torch adds integers of globals, counters among them."""
    return source.guard_source.is_local() and _plain_stays_constant(value, source)


_plain_stays_constant: Any = vars(dynamo_builder)["is_int_specialization_case"]
