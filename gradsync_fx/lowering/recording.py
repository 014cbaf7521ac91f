"""CUDA graphs of a program: what can be recorded of it, and what its callers are spared.

held tensors, the vector of numbers    static: recorded where they lie, read and written there by every replay
the batch, what another stage gave     copied to where the recorded ones lay
Python's numbers                       replayed as they were: a program that is given a float is not recorded
results                                lie in memory that the next call writes: handed out as copies
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gradsync_fx._torch import OpOverload, group_of_name, is_recorded
from gradsync_fx.comm.host_group import backend_of
from gradsync_fx.ir.journal import Recording
from gradsync_fx.ir.memory import base_of, written
from gradsync_fx.ir.ops import ITEM, is_collective
from gradsync_fx.ir.program import Kind, output_values
from gradsync_fx.passes.device_numbers import accelerator_of, host_numbers
from gradsync_fx.passes.rewritten import Rewritten
from gradsync_fx.user_lines import warn_user


# What lies at the same address in every call, unless the user replaces it: then the call is recorded anew.
HELD = frozenset(
    (Kind.PARAMETER, Kind.BUFFER, Kind.ACCUMULATOR, Kind.WEIGHT, Kind.STATE, Kind.INVARIANT)
)
_ALIGNED = 16  # bytes; what else lies is copied ahead of each call
_Run = Callable[[list[Any]], Any]


def held_inputs(rewritten: Rewritten) -> dict[int, str]:
    """Positions among the main graph's inputs of tensors on the device that stay where they are, with their names."""
    given = rewritten.slots
    holders = rewritten.main.graph.find_nodes(op="placeholder")
    found = {
        i: f"{slot.kind} {slot.name!r}"
        for i, (slot, holder) in enumerate(zip(given, holders, strict=False))
        if slot.kind in HELD and holder.meta["val"].device.type != "cpu"
    }
    if rewritten.numbers:
        found[len(given)] = "the vector of numbers"
    return found


def recording_of(rewritten: Rewritten, *, asked: bool) -> Recording:
    """What can be recorded of a program, by its graph."""
    name = rewritten.program.name
    device = accelerator_of(rewritten.program.inputs())
    if device is None:
        return Recording(name, asked, "its tensors are on the CPU")
    if device.type != "cuda":
        return Recording(name, asked, f"torch has no such graphs for {device.type!r}")
    never = next(_never(rewritten), "")
    apart = () if never else tuple(dict.fromkeys(_apart(rewritten.main)))
    return Recording(name, asked, never, apart)


def _never(rewritten: Rewritten) -> Iterator[str]:
    holders = rewritten.main.graph.find_nodes(op="placeholder")
    held = held_inputs(rewritten)
    if rewritten.program.voted:
        yield "commit decides on the host whether its update is made"
    if rewritten.program.arriving:
        yield "parameters arrive while it runs, and the host waits for each where it is read"
    yield from _on_host(rewritten.main)
    for number in host_numbers(rewritten):
        yield f"{number} is a number of Python's, which a recording would keep as it was"
    for i, (holder, slot) in enumerate(zip(holders, rewritten.slots, strict=False)):
        value = holder.meta["val"]
        if not isinstance(value, torch.Tensor) or not holder.users:
            continue
        what = f"{slot.kind} {slot.name!r}"
        if value.device.type == "cpu" and value.dim() == 0:
            yield f"{what} is one number on the CPU, which a recording would keep as it was"
        writers = [u for u in holder.users if _writes(u, holder)]
        if writers and i not in held and value.device.type != "cpu":
            yield f"{what} is written, and is another tensor in every call"


def _on_host(module: GraphModule) -> Iterator[str]:
    """Collectives of the device's tensors that something else than the device runs, as gloo does."""
    for node in filter(is_collective, module.graph.nodes):
        if not isinstance(node.target, OpOverload):
            continue
        names = (argument.name for argument in node.target._schema.arguments)
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        if isinstance(given.get("group_name"), str):
            backend = backend_of(group_of_name(given["group_name"]), "cuda")
            if backend not in ("nccl", "fake"):
                yield f"{node.name} runs over {backend}, on the host"


def _writes(node: Node, holder: Node) -> bool:
    return any(i < len(node.args) and node.args[i] is holder for i in written(node.target))


def _apart(module: GraphModule) -> Iterator[str]:
    """What a recording leaves out."""
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        value = node.meta.get("val")
        tensors = value if isinstance(value, list | tuple) else [value]
        devices = {v.device.type for v in tensors if isinstance(v, torch.Tensor)}
        given = [n.meta.get("val") for n in node.all_input_nodes]
        came = {v.device.type for v in given if isinstance(v, torch.Tensor)}
        if node.target is ITEM:
            yield f"{node.args[0]}, whose value the host waits for"
        elif "cpu" in devices | came:
            both = len(devices | came) > 1
            yield f"{node.name}, {'a copy between devices' if both else 'which runs on the CPU'}"
        elif not is_recorded(node):
            yield f"{node.name} ({node.target}), which torch does not record"


def warn_once(recording: Recording, recordings: dict[str, Recording]) -> None:
    """Says why a program is not recorded, unless that was said of another one of this step."""
    if recording.never and not any(r.never and r.asked for r in recordings.values()):
        warn_user(
            f"no CUDA graph of the {recording.program} program: {recording.never}. It runs as without "
            "mode='reduce-overhead'"
        )


class Recorded:
    """A program that Inductor records, for callers that keep what they are given.

    run: the compiled program. plain: makes one that is not recorded. held: as in `held_inputs`.
    """

    def __init__(
        self,
        run: _Run,
        plain: Callable[[], _Run],
        held: dict[int, str],
        module: GraphModule,
        tell: Callable[[str], None],
    ) -> None:
        self._run, self._plain, self._held, self._tell = run, plain, held, tell
        self._instead: _Run | None = None
        self._own = [
            isinstance(v, Node) and base_of(v).op != "placeholder" for v in output_values(module)
        ]

    def __call__(self, args: list[Any]) -> list[Any]:
        if self._instead is None:
            astray = next((n for i, n in self._held.items() if args[i].data_ptr() % _ALIGNED), None)
            if astray is None:
                torch.compiler.cudagraph_mark_step_begin()  # nobody holds results of an earlier call
                return self._copied(self._run(args))
            # A copy of it would be recorded, and written in its place.
            self._tell(f"{astray} lies at an address that is no multiple of {_ALIGNED} bytes")
            self._instead = self._plain()
        return list(self._instead(args))

    def _copied(self, results: Any) -> list[Any]:
        return [
            value.clone() if own and isinstance(value, torch.Tensor) else value
            for own, value in zip(self._own, results, strict=True)
        ]
