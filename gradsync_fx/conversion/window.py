"""What all shapes of accumulation come down to: one loop whose body is a micro-step, and when it updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst

from gradsync_fx.conversion.source import LoopNode, ScriptSource, Unsure, every
from gradsync_fx.conversion.update import UpdateFound


@dataclass(frozen=True, slots=True)
class Accumulation:
    """A loop that accumulates, taken apart.

    loop: its body is a micro-step. micro: the body's statements up to the update, without the `with` and the flags that
    say when to reduce. update: what closes a window. after: statements of the body behind the update, for each
    micro-step. k: micro-steps in a window, as text. condition: of the update, as text; "" where the window is the loop
    itself, or Accelerate decides. tail: whether the end of the data closes a window, too. whole: the loop is one
    window. gone: statements beside the loop that are part of its update. accelerator: its name.
    """

    loop: LoopNode
    micro: tuple[cst.BaseStatement, ...]
    update: UpdateFound
    after: tuple[cst.BaseStatement, ...]
    k: str
    condition: str = ""
    tail: bool = False
    whole: bool = False
    gone: tuple[cst.BaseStatement, ...] = ()
    accelerator: str = ""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where a loop stands. outer: the outermost loop around it, or itself. nested: whether that is another.

    before: statements of the blocks around it, inside of `outer`, that run before it.
    """

    outer: LoopNode
    before: tuple[cst.BaseStatement, ...]
    nested: bool


def place_of(source: ScriptSource, loop: LoopNode) -> Surroundings:
    """Raises `Unsure` for a loop with something around it that is not known."""
    outer: LoopNode = loop
    inside: cst.BaseStatement = loop
    before: list[cst.BaseStatement] = []
    for node in source.around(loop):
        if isinstance(node, cst.FunctionDef):
            _check_function(source, node, loop)
            return Surroundings(outer, tuple(before), outer is not loop)
        if isinstance(node, cst.Module):
            return Surroundings(outer, tuple(before), outer is not loop)
        if isinstance(node, cst.IndentedBlock):
            if not _only_ifs_from(source, node):
                before = [*node.body[: node.body.index(inside)], *before]
        elif isinstance(node, cst.For | cst.While):
            outer = inside = node
        elif isinstance(node, cst.If):
            inside = node
        elif isinstance(node, cst.Else):
            raise Unsure(loop, "the loop stands in an `else`")
        else:
            around = type(node).__name__.lower()
            raise Unsure(
                loop,
                f"there is a `{around}` around the loop, and what it means for a step is not known",
            )
    raise AssertionError("a node outside of its module")


def _only_ifs_from(source: ScriptSource, block: cst.IndentedBlock) -> bool:
    """Whether no loop is around a block: what stands in it before the loop runs once."""
    for node in source.around(block):
        if isinstance(node, cst.For | cst.While):
            return False
        if isinstance(node, cst.FunctionDef):
            return True
    return True


def _check_function(source: ScriptSource, function: cst.FunctionDef, loop: LoopNode) -> None:
    """A step that is made in a function that a loop calls would be made, and compiled, again each time."""
    name = function.name.value
    if function.asynchronous or any(
        isinstance(n, cst.ClassDef | cst.FunctionDef) for n in source.around(function)
    ):
        raise Unsure(loop, f"the loop stands in a method, or a function inside of another: {name}")
    for call in every(source.module, cst.Call):
        called = isinstance(call.func, cst.Name) and call.func.value == name
        if called and any(isinstance(n, cst.For | cst.While) for n in source.around(call)):
            raise Unsure(
                loop,
                f"{name}() is called in a loop: a step that is made in it would be made again by each call. Make the "
                "step once, and hand it in",
            )


def check_flow(source: ScriptSource, body: Sequence[cst.BaseStatement], *, leaving: bool) -> None:
    """Raises `Unsure` where statements leave the loop, or hide what runs. leaving: whether `break` is right."""
    kinds = (
        cst.Try,
        cst.Match,
        cst.Continue,
        cst.Return,
        cst.Yield,
        cst.Await,
        cst.While,
        cst.Del,
        cst.Raise,
    )
    for statement in body:
        for kind in (*kinds, *(() if leaving else (cst.Break,))):
            if every(statement, kind):
                raise Unsure(statement, f"a `{kind.__name__.lower()}` in the loop")
