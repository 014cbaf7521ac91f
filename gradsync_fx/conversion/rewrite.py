"""Makes the new loop: the step as a function ahead of the outermost loop, a call in its place, and a flush at the end.

for epoch in ...:                        @gradsync_fx.optimize(gradient_accumulation_steps=k)
    for i, (x, y) in enumerate(loader):  def train_step(x, y): forward, backward, update
        front; forward; backward         for epoch in ...:
        if (i + 1) % k == 0:                 for i, (x, y) in enumerate(loader):
            update; log                          front; loss = train_step(x, y)
                                                 if train_step.sync_gradients: log

The step gets what the loops assign as arguments; all else it finds where it was. A window that the data may end in the
middle of is closed by `flush()` where the script closes it, and dropped by `discard()` where the script drops it. Where
it goes on into the loop's next run, the step is told by an argument which call closes it ("manual").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import libcst as cst

from gradsync_fx.conversion.micro_step import MEAN, Parts, micro_step_of, read_elsewhere
from gradsync_fx.conversion.names import Names, names_of, together
from gradsync_fx.conversion.source import ScriptSource, Unsure, every, statements
from gradsync_fx.conversion.update import ZERO, kind_of
from gradsync_fx.conversion.window import Accumulation, Surroundings, place_of


FLAGS = (
    "update",
    "closes_window",
    "last_of_window",
)  # of the argument: one that the step does not use
BLANK = (cst.EmptyLine(indent=False),)


@dataclass(frozen=True, slots=True)
class Rewrite:
    """What replaces what. behind: goes after `outer`. notes: what to know of it, by line."""

    outer: cst.CSTNode
    function: cst.BaseStatement
    loop: cst.CSTNode
    instead: tuple[cst.BaseStatement, ...]
    gone: tuple[cst.BaseStatement, ...]
    behind: tuple[cst.BaseStatement, ...]
    notes: tuple[tuple[int, str], ...]


def loop_rewritten(source: ScriptSource, found: Accumulation, name: str, *, alone: bool) -> Rewrite:
    """name: of the step. alone: no other loop of the script trains. Raises `Unsure`."""
    place = place_of(source, found.loop)
    zeroed = [s for s in place.before if kind_of(source, s) == ZERO]
    manual = not (found.whole or found.tail) and place.nested and not zeroed
    if not (alone or found.whole or found.tail or zeroed):
        raise Unsure(found.loop, "what it leaves over may go into the first window of another loop")
    notes = _notes(source, found, manual)
    micro = micro_step_of(source, found, exact=not (found.tail or manual))
    _check(source, found, place)
    update = list(found.update.own)
    if not found.update.zeroes:
        if not (zeroed and found.whole):
            raise Unsure(update[-1], "gradients are not zeroed with the update")
        update.append(cst.parse_statement(source.text(zeroed[-1]).strip()))
    inside = together(_names(source, [*micro.step, *update]))
    given = _arguments(source, found, place, inside)
    elsewhere = read_elsewhere(source, found, [*micro.front, *micro.behind])
    results = [n for n in inside.written if n in elsewhere]
    flag = next(f for f in FLAGS if f not in inside.all) if manual else ""
    if flag and set(results) & set(together(_names(source, update)).written):
        raise Unsure(update[0], "what the update gives is read after it, and most calls make none")
    call = _call(name, results, [*given, found.condition] if flag else given)
    options = "gradient_accumulation_steps=" + ('"manual"' if flag else found.k)
    if micro.reduction != MEAN:
        options += f', reduction="{micro.reduction}"'
    head = f"@gradsync_fx.optimize({options})\ndef {name}({', '.join([*given, flag] if flag else given)}):\n    pass\n"
    function = _function(head, micro, update, results, flag)
    loop = found.loop
    instead: list[cst.BaseStatement] = []
    if found.whole:
        body: list[cst.BaseStatement] = [*micro.front, call, *micro.behind]
    else:
        synced = _synced(found.update.after, name)
        after = [_asks(source, s, found, name) for s in found.after]
        body = [*micro.front, call, *micro.behind, *synced, *after]
    block = cst.ensure_type(loop.body, cst.IndentedBlock)
    new_loop = loop.with_changes(body=block.with_changes(body=body))
    if loop is place.outer:
        new_loop = new_loop.with_changes(leading_lines=BLANK)
    instead.append(new_loop)
    if found.tail:
        instead.append(cst.parse_statement(f"{name}.flush()"))
        instead += _at_the_end(source, found, name)
    elif not (found.whole or manual):
        instead.append(cst.parse_statement(f"{name}.discard()"))
    gone = (*found.gone, *(zeroed if found.whole and not found.update.zeroes else ()))
    behind = (cst.parse_statement(f"{name}.discard()"),) if manual else ()
    return Rewrite(place.outer, function, loop, tuple(instead), gone, behind, notes)


def _names(source: ScriptSource, body: Iterable[cst.BaseStatement]) -> list[Names]:
    return [names_of(source.text(s)) for s in body]


def _check(source: ScriptSource, found: Accumulation, place: Surroundings) -> None:
    written = set(together(_names(source, [place.outer])).written)
    if found.k.partition(".")[0] in written:
        raise Unsure(found.loop, f"{found.k} changes in the loops")
    if re.search(r"\.grad\b", source.text(place.outer)):
        raise Unsure(found.loop, "gradients are read in the loops")
    for node in (found.update.optimizer, *source.models):
        if node in written:
            raise Unsure(found.loop, f"{node} is made anew in the loops")
    script = source.module.code
    if "init_process_group(" in script and not re.search(
        r"\b(DDP|DistributedDataParallel)\(", script
    ):
        raise Unsure(
            found.loop, "there are ranks, and no DistributedDataParallel: who reduces is not seen"
        )
    if re.search(r"\b(FSDP|FullyShardedDataParallel|fully_shard)\(", script):
        raise Unsure(found.loop, "parameters are sharded, which a step cannot hold")
    for name, made in source.scalers.items():
        if re.search(rf"\b{name}\.", source.text(place.outer)) and "enabled=" not in made:
            raise Unsure(
                found.loop,
                f"{name} is an enabled GradScaler, which a step cannot hold: train in bfloat16",
            )


def _notes(source: ScriptSource, found: Accumulation, manual: bool) -> tuple[tuple[int, str], ...]:
    line = source.line(found.loop)
    notes = []
    if manual:
        notes.append(
            "what an epoch leaves over goes into the next one's first window, as before: the step is told which call "
            'updates ("manual")'
        )
    elif found.tail:
        notes.append(
            "a short last window counts as before: windows are sums, divided where the script divides"
        )
    for name, made in source.scalers.items():
        if re.search(rf"\b{name}\.", source.text(found.loop)) and "enabled=False" not in made:
            notes.append(
                f"where {name} is enabled, the step is refused when it runs: train in bfloat16"
            )
    return tuple((line, note) for note in notes)


def _arguments(
    source: ScriptSource, found: Accumulation, place: Surroundings, inside: Names
) -> list[str]:
    """What the step reads and the loops assign. Raises `Unsure` for what a call leaves to the next."""
    carried = [n for n in inside.free if n in inside.written]
    if carried:
        raise Unsure(
            found.loop, f"{', '.join(carried)}: carried by the step from one call to the next"
        )
    assigned = set(together(_names(source, [place.outer])).written)
    return [n for n in inside.free if n in assigned]


def _call(name: str, results: Sequence[str], given: Sequence[str]) -> cst.BaseStatement:
    left = f"{', '.join(results)} = " if results else ""
    return cst.parse_statement(f"{left}{name}({', '.join(given)})")


def _function(
    head: str,
    micro: Parts,
    update: Sequence[cst.BaseStatement],
    results: Sequence[str],
    flag: str,
) -> cst.BaseStatement:
    """The step, decorated. flag: the argument that the update depends on, or ""."""
    body: list[cst.BaseStatement] = list(micro.step)
    if flag:
        branch = cst.ensure_type(cst.parse_statement(f"if {flag}:\n    pass\n"), cst.If)
        body.append(branch.with_changes(body=cst.IndentedBlock(list(update))))
    else:
        body += update
    if results:
        body.append(cst.parse_statement(f"return {', '.join(results)}"))
    return cst.parse_statement(head).with_changes(body=cst.IndentedBlock(body))


def _synced(after: Sequence[cst.BaseStatement], name: str) -> list[cst.BaseStatement]:
    if not after:
        return []
    branch = cst.ensure_type(cst.parse_statement(f"if {name}.sync_gradients:\n    pass\n"), cst.If)
    return [branch.with_changes(body=cst.IndentedBlock(list(after)))]


def _asks(
    source: ScriptSource, statement: cst.BaseStatement, found: Accumulation, name: str
) -> cst.BaseStatement:
    """A statement behind the step that asks Accelerate whether it updated asks the step."""
    asked = f"{found.accelerator}.sync_gradients"
    for attribute in every(statement, cst.Attribute) if found.accelerator else ():
        if source.text(attribute) == asked:
            new = cst.parse_expression(f"{name}.sync_gradients")
            statement = statement.deep_replace(attribute, new)  # type: ignore[arg-type]
    return statement


def _at_the_end(source: ScriptSource, found: Accumulation, name: str) -> list[cst.BaseStatement]:
    """What comes after an update, once more for the one that `flush` makes. Raises `Unsure` where order matters."""
    again = list(found.update.after)
    changing = source.models | source.optimizers | source.schedulers
    for statement in found.after:
        names = names_of(source.text(statement))
        if (
            found.accelerator
            and isinstance(statement, cst.If)
            and source.short(statement.test) == (f"{found.accelerator}.sync_gradients")
        ):
            again += statements(cst.ensure_type(statement.body, cst.IndentedBlock).body)
        elif found.accelerator and f"{found.accelerator}.sync_gradients" in source.text(statement):
            raise Unsure(statement, "it asks whether there was an update, beside something else")
        elif names.all & changing:
            raise Unsure(
                statement,
                "it would run before the last, short window's update, and uses what that changes",
            )
    update = together(_names(source, found.update.own))
    late = [n for s in again for n in names_of(source.text(s)).free if n in update.written]
    if late:
        raise Unsure(
            again[0], f"it reads {late[0]} of an update that `flush` makes, which returns nothing"
        )
    return _synced(again, name)
