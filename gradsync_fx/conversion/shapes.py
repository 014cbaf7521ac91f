"""The shapes of accumulation that are known, each taken apart into an `Accumulation`.

counted     for i, batch in enumerate(loader): ... if (i + 1) % k == 0: update
no_sync     the same, where a `with` or both branches of an `if` say when DDP reduces
inner       for micro_step in range(k): ...; and the update after it
accumulate  with accelerator.accumulate(model): ...; and the update inside
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

from gradsync_fx.conversion.conditions import counter_of, positive, window_of
from gradsync_fx.conversion.names import names_of
from gradsync_fx.conversion.source import (
    LoopNode,
    ScriptSource,
    Statements,
    Unsure,
    block_of,
    every,
    statements,
)
from gradsync_fx.conversion.update import STEP, UpdateFound, kind_of, update_in
from gradsync_fx.conversion.window import Accumulation, check_flow


NULL = r"(?:contextlib\.)?nullcontext\(\)"


def accumulation_of(source: ScriptSource, loop: LoopNode) -> Accumulation:
    """Raises `Unsure` for a loop of no shape that is known."""
    if not isinstance(loop, cst.For) or loop.asynchronous or loop.orelse:
        raise Unsure(loop, "no `for` loop, or one with an `else`")
    body = statements(block_of(loop))
    for at, statement in enumerate(body):
        if isinstance(statement, cst.With) and ".accumulate(" in source.text(statement.items[0]):
            return _by_accelerate(source, loop, body, at)
    updates = [i for i, s in enumerate(body) if isinstance(s, cst.If) and _steps(source, s)]
    if len(updates) == 1:
        return _counted(source, loop, body, updates[0])
    if updates or _steps(source, *body):
        raise Unsure(loop, "the optimizer steps in every round, or at several places")
    return _inner(source, loop, body)


def _counted(source: ScriptSource, loop: cst.For, body: list, at: int) -> Accumulation:
    branch = body[at]
    counter = counter_of(source, loop)
    if counter is None:
        raise Unsure(loop, "its rounds are not counted by `enumerate` or `range`")
    flags = _flags(source, body[:at])
    test, plain = positive(_resolved(source.short(branch.test), flags))
    taken: Statements = block_of(branch)
    other: Statements = ()
    if branch.orelse is not None:
        if not isinstance(branch.orelse, cst.Else):
            raise Unsure(branch, "an `elif` beside the update")
        other = block_of(branch.orelse)
    if not plain:
        taken, other = other, taken
    if not taken:
        raise Unsure(branch, "the update stands under a negation, or in an `else` alone")
    k, tail = window_of(branch, test, counter)
    shared: list[cst.BaseStatement] = []
    mine = statements(taken)
    if other:
        shared = _twice(source, branch, mine, statements(other))
        mine = mine[len(shared) :]
    micro = _unwrapped(source, body[:at], flags, test) + shared
    update = update_in(source, mine)
    after = tuple(body[at + 1 :])
    leaving = not tail
    check_flow(source, micro, leaving=False)
    check_flow(source, [*update.own], leaving=False)
    check_flow(source, [*update.after, *after], leaving=leaving)
    micro = _without_flags(source, loop, micro, flags, [*update.after, *after], test)
    condition = source.short(branch.test) if plain and not flags else test
    return Accumulation(loop, tuple(micro), update, after, k, condition, tail)


def _inner(source: ScriptSource, loop: cst.For, body: list) -> Accumulation:
    counter = counter_of(source, loop)
    if counter is None or not source.text(loop.iter).startswith("range"):
        raise Unsure(loop, "no optimizer.step() in it, under a condition that is known")
    if not re.fullmatch(r"[\w.]+", counter.length):
        raise Unsure(loop, f"its number of rounds is no name or number: {counter.length}")
    block = next(source.around(loop))
    if not isinstance(block, cst.IndentedBlock | cst.Module):
        raise Unsure(loop, "the update after it is not found")
    lines = list(block.body)
    position = lines.index(loop)
    if not any(_steps(source, s) for s in lines[position + 1 :]):
        raise Unsure(
            loop, "no optimizer.step() in it or right after it: perhaps a function does it"
        )
    rest = statements(lines[position + 1 :])
    update = update_in(source, rest)
    gone = [s for s in lines[position + 1 :] if _all_of(s, update.own)]
    if sum(
        len(getattr(s, "body", [0])) if isinstance(s, cst.SimpleStatementLine) else 1 for s in gone
    ) != len(update.own):
        raise Unsure(update.own[-1], "the update's last line holds more than the update")
    last = f"{counter.name} == {counter.length} - 1"
    if counter.length.isdecimal():
        last = f"{counter.name} == {int(counter.length) - 1}"
    also = f"{counter.name} == {counter.length} - 1"
    flags = _flags(source, body)
    micro = _unwrapped(source, body, flags, last, also)
    check_flow(source, micro, leaving=False)
    check_flow(source, update.own, leaving=False)
    micro = _without_flags(source, loop, micro, flags, (), last, also)
    return Accumulation(
        loop, tuple(micro), update, (), counter.length, whole=True, gone=tuple(gone)
    )


def _by_accelerate(source: ScriptSource, loop: cst.For, body: list, at: int) -> Accumulation:
    block = body[at]
    call = re.fullmatch(r"(\w+)\.accumulate\(\w+\)", source.text(block.items[0].item))
    if call is None or len(block.items) > 1:
        raise Unsure(block, "more than one model, or more than accumulate() in this `with`")
    if "GradientAccumulationPlugin" in source.module.code:
        raise Unsure(block, "a GradientAccumulationPlugin may count otherwise")
    inside = statements(block_of(block))
    backward = [i for i, s in enumerate(inside) if ".backward(" in source.text(s)]
    if len(backward) != 1:
        raise Unsure(block, "not exactly one backward in it")
    micro = [*body[:at], *inside[: backward[0] + 1]]
    behind = inside[backward[0] + 1 :]
    synced = f"{call[1]}.sync_gradients"
    first = next((i for i, s in enumerate(behind) if _is_own(source, s, synced)), len(behind))
    update = update_in(source, behind[first:])
    after = (*behind[:first], *update.after, *body[at + 1 :])
    update = UpdateFound(update.own, (), update.optimizer, update.zeroes)
    _check_prepared(source, block, update, call[1])
    for part in (micro, update.own, after):
        check_flow(source, part, leaving=False)
    return Accumulation(
        loop, tuple(micro), update, after, f"{call[1]}.gradient_accumulation_steps",
        tail=True, accelerator=call[1],
    )  # fmt: skip


def _check_prepared(source: ScriptSource, block: cst.With, update: UpdateFound, name: str) -> None:
    """What Accelerate did not prepare, and a clip that does not ask it, runs in every micro-step."""
    prepared = "".join(re.findall(rf"\b{name}\.prepare\((.*?)\)", source.module.code, re.DOTALL))
    for statement in update.own:
        code = source.text(statement)
        for used in (source.optimizers | source.schedulers) & names_of(code).all:
            if not re.search(rf"\b{used}\b", prepared):
                raise Unsure(statement, f"{used} is not prepared by Accelerate")
        if "clip_grad_" in code and not isinstance(statement, cst.If):
            raise Unsure(statement, f"a clip in every micro-step, not under {name}.sync_gradients")
    if source.text(block).count(".accumulate(") != 1:
        raise Unsure(block, "several accumulate() in one another")


def _is_own(source: ScriptSource, statement: cst.BaseStatement, synced: str) -> bool:
    if isinstance(statement, cst.If) and source.short(statement.test) != synced:
        return False
    return kind_of(source, statement) is not None


def _steps(source: ScriptSource, *body: cst.CSTNode) -> bool:
    """Whether an optimizer steps anywhere in there."""
    lines = [s for b in body for s in every(b, cst.SimpleStatementLine)]
    return any(kind_of(source, s) == STEP for s in statements(lines))


def _all_of(line: cst.BaseStatement, own: Statements) -> bool:
    """Whether a line of the script is made of these statements alone."""
    if line in own:
        return True
    if not isinstance(line, cst.SimpleStatementLine):
        return False
    parts = {
        id(c) for s in own if isinstance(s, cst.SimpleStatementLine) for c in s.body[0].children
    }
    return all(any(id(c) in parts for c in small.children) for small in line.body)


# Flags: what says beforehand whether a micro-step closes the window, and contexts that are chosen by it.


def _flags(source: ScriptSource, body: Statements) -> dict[str, str]:
    """Names that are given a condition or a context in the loop, with what they are given."""
    found = {}
    for statement in body:
        if isinstance(statement, cst.SimpleStatementLine) and isinstance(
            statement.body[0], cst.Assign
        ):
            assign = statement.body[0]
            target = assign.targets[0].target
            value = source.short(assign.value)
            if isinstance(target, cst.Name) and re.search(r" [=!]= |\.no_sync\(|no_sync\b", value):
                found[target.value] = value
    return found


def _resolved(text: str, flags: dict[str, str]) -> str:
    """A condition in which the name of a flag, or its negation, is what it was given."""
    if text in flags:
        return flags[text]
    if text.startswith("not ") and text[4:] in flags:
        turned, plain = positive(flags[text[4:]])
        return f"not ({turned})" if plain else turned
    return text


def _unwrapped(source: ScriptSource, body: Statements, flags: dict[str, str], *last: str) -> list:
    """The statements without those that tell DDP when to reduce, which must be in the window's last micro-step."""
    found: list = []
    for statement in body:
        code = source.text(statement)
        if "require_backward_grad_sync" in code:
            _check_grad_sync(source, statement, flags, last)
        elif isinstance(statement, cst.With) and _is_sync(source, statement, flags, last):
            found += statements(block_of(statement))
        elif "no_sync" in code and _assigned(statement) not in flags:
            raise Unsure(statement, "no_sync() at a place that is not known")
        else:
            found.append(statement)
    return found


def _check_grad_sync(
    source: ScriptSource, statement: cst.BaseStatement, flags: dict[str, str], last: Sequence[str]
) -> None:
    inner = statements(block_of(statement)) if isinstance(statement, cst.If) else [statement]
    assign = inner[0].body[0] if isinstance(inner[0], cst.SimpleStatementLine) else None
    if len(inner) != 1 or not isinstance(assign, cst.Assign):
        raise Unsure(statement, "require_backward_grad_sync is set together with something else")
    condition = _resolved(source.short(assign.value), flags)
    if condition not in last:
        raise Unsure(statement, "DDP reduces in another micro-step than the one before the update")


def _is_sync(
    source: ScriptSource, block: cst.With, flags: dict[str, str], last: Sequence[str]
) -> bool:
    """Whether a `with` is no_sync() but in the last micro-step. Raises `Unsure` where it is for others."""
    text = source.short(block.items[0].item)
    text = flags.get(text, text)
    if "no_sync" not in text:
        return False
    chosen = re.fullmatch(rf"{NULL} if (.+) else \w+\.no_sync\(\)", text)
    turned = re.fullmatch(rf"\w+\.no_sync\(\) if (.+) else {NULL}", text)
    found = chosen or turned
    if found is None or len(block.items) > 1:
        raise Unsure(block, "no_sync() under a condition that is not known")
    condition, plain = positive(_resolved(found[1], flags))
    if condition not in last or plain != bool(chosen):
        raise Unsure(block, "DDP reduces in another micro-step than the one before the update")
    return True


def _twice(source: ScriptSource, at: cst.If, last: list, others: list) -> list:
    """The micro-step that both branches have: as it is in the last, under no_sync() in the others."""
    if len(others) != 1 or not isinstance(others[0], cst.With):
        raise Unsure(at, "the branch without the update is not one `with model.no_sync()`")
    block = others[0]
    if not re.fullmatch(r"\w+\.no_sync\(\)", source.text(block.items[0].item)):
        raise Unsure(block, "the branch without the update is not under model.no_sync()")
    inner = statements(block_of(block))
    same = [source.text(s).split() for s in inner] == [
        source.text(s).split() for s in last[: len(inner)]
    ]
    if not same:
        raise Unsure(at, "the branches with and without the update do not begin alike")
    return last[: len(inner)]


def _assigned(statement: cst.BaseStatement) -> str | None:
    if isinstance(statement, cst.SimpleStatementLine) and isinstance(statement.body[0], cst.Assign):
        target = statement.body[0].targets[0].target
        return target.value if isinstance(target, cst.Name) else None
    return None


def _without_flags(
    source: ScriptSource,
    loop: LoopNode,
    micro: list[cst.BaseStatement],
    flags: dict[str, str],
    others: Statements,
    *last: str,
) -> list[cst.BaseStatement]:
    """Without the contexts and the flags of the update, where nothing else in the script asks for these."""
    found = []
    micro = [s for s in micro if "no_sync" not in flags.get(_assigned(s) or "", "")]
    for statement in micro:
        name = _assigned(statement)
        if name in flags and positive(flags[name])[0] in last:
            word = rf"\b{name}\b"
            rest = [s for s in [*micro, *others] if s is not statement]
            inside = any(re.search(word, source.text(s)) for s in rest)
            all_of = len(re.findall(word, source.module.code))
            if not inside and all_of == len(re.findall(word, source.text(loop))):
                continue
        found.append(statement)
    return found
