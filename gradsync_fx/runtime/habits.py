"""Finds leftovers of plain accumulation in the loop around an optimized step, by reading the caller's source.

for i, batch in enumerate(loader):
    with model.no_sync():                                       # windows are the step's own
        loss = step(model, optimizer, *batch)
    clip_grad_norm_(model.parameters(), 1.0)                    # .grad is None here: nothing is clipped
    if (i + 1) % k == 0:
        optimizer.step()                                        # no gradients: nothing is updated

A loop that calls `backward` itself trains something else beside the step, and is left alone.
"""

from __future__ import annotations

import ast
import linecache
import os
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch.optim import Optimizer

from gradsync_fx._torch import compile_lock
from gradsync_fx.user_lines import is_users


OUTWARD = 8  # frames of the user's between the call of the step and its loop
_NEVER_ZEROED = (
    "the step never calls zero_grad: in plain PyTorch its gradients would grow from update to update, here each window "
    "starts with none; call optimizer.zero_grad() in the step, after optimizer.step()"
)
_CLIPPING = ("clip_grad_norm_", "clip_grad_value_")


def habits(*, zeroes: bool) -> tuple[str, ...]:
    """Warnings, each with its line, about the innermost loop that the user's code, up the stack, stands in.

    zeroes: whether the step drops its gradients itself.
    """
    frame, looked = sys._getframe().f_back, 0
    while frame is not None and looked < OUTWARD:
        file = frame.f_code.co_filename
        if is_users(file):
            looked += 1
            loop = _loop_at(file, frame.f_lineno)
            if loop is not None and f"{os.sep}site-packages{os.sep}" in file:
                return ()  # a trainer of others, which nobody mends
            if loop is not None:
                return tuple(dict.fromkeys(_in(loop, frame, zeroes=zeroes)))
        frame = frame.f_back
    return () if zeroes else (_NEVER_ZEROED,)


def _loop_at(file: str, line: int) -> ast.For | ast.While | ast.AsyncFor | None:
    """The innermost loop that a line stands in."""
    try:
        # Python 3.11 fails where two threads parse at a time, and Dynamo parses its guards.
        with compile_lock:
            tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return None  # a notebook's magics, say
    loops = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.For | ast.While | ast.AsyncFor)
        and node.lineno <= line <= (node.end_lineno or line)
    ]
    return max(loops, key=lambda node: node.lineno, default=None)


def _in(loop: ast.AST, frame: FrameType, *, zeroes: bool) -> Iterator[str]:
    calls = [node for node in _own_nodes(loop) if isinstance(node, ast.Call)]
    if not zeroes and all(_name(call) != "zero_grad" for call in calls):
        yield _NEVER_ZEROED
    if any(_name(call) == "backward" for call in calls):
        return
    for call in calls:
        name, where = _name(call), f"{frame.f_code.co_filename}:{call.lineno}"
        if name in _CLIPPING:
            yield (
                f"{name} at {where} has no effect: after a call of the step there are no gradients; call it in the "
                "step, between backward() and optimizer.step(), where it clips the window's gradient"
            )
        elif name == "step" and isinstance(_owner(call, frame), Optimizer):
            yield (
                f"optimizer.step() at {where} has no effect: after a call of the step there are no gradients; leave "
                "it out (with the `% k` around it): the step updates once for each window; for what else belongs to an "
                "update, ask step.sync_gradients"
            )
        elif name == "no_sync" or (name == "accumulate" and call in _contexts(loop)):
            yield (
                f"{name} at {where} has no effect on the step: its windows are its own, and reduce at their ends; call "
                "the step without it"
            )


def _own_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run where the tree does: those of functions defined in it do not."""
    for child in ast.iter_child_nodes(tree):
        if not isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
        ):
            yield child
            yield from _own_nodes(child)


def _contexts(loop: ast.AST) -> list[ast.expr]:
    found = [node for node in _own_nodes(loop) if isinstance(node, ast.With)]
    return [item.context_expr for node in found for item in node.items]


def _name(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _owner(call: ast.Call, frame: FrameType) -> Any:
    """The object whose method is called, where names and attributes lead to it."""
    path, node = [], getattr(call.func, "value", None)
    while isinstance(node, ast.Attribute):
        path.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    value = frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    for name in reversed(path):
        value = getattr(value, "__dict__", {}).get(name)
    return value
