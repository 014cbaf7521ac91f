"""What a watch saw, judged: its events cut into windows, the rules applied to them, and the result as data."""

from __future__ import annotations

import torch.distributed as dist

from gradsync_fx.diagnosis.findings import Diagnosis, WindowSeen
from gradsync_fx.diagnosis.rules import findings
from gradsync_fx.diagnosis.watch import Watch
from gradsync_fx.diagnosis.windows import Loop, Window


def judged(
    watch: Watch, seen: tuple[Window, ...], k: int, world: int, *, cut: bool = False
) -> Diagnosis:
    """seen: the windows of the watch. k: micro-steps meant for a window. cut: the watch ended before the loop did."""
    trained = frozenset().union(*(w.parameters for w in seen)) or frozenset(watch.parameters)
    mine = {i: p for i, p in watch.parameters.items() if i in trained}
    used = [w for w in watch.wrappers if any(id(p) in trained for p in w.parameters())]
    loop = Loop(
        windows=seen,
        k=k,
        world=world,
        wrapped=frozenset(id(p) for w in used for p in w.parameters()),
        bytes=sum(p.numel() * p.element_size() for p in mine.values() if p.requires_grad),
        sharded=any(hasattr(p, "device_mesh") for p in mine.values()),
        cut=cut,
    )
    shown = loop.closed if cut else loop.windows
    return Diagnosis(
        findings=findings(loop),
        windows=tuple(_seen(w, loop) for w in shown if w.micro_steps),
        micro_steps=k,
        world_size=world,
        gradient_bytes=loop.bytes,
    )


def world_of(watch: Watch, group: dist.ProcessGroup | None = None) -> int:
    """How many ranks train together now: of the group, else of a DDP module in use, else of the default group."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    used = [w for w in watch.wrappers if any(id(p) in watch.parameters for p in w.parameters())]
    if group is None and used:
        group = used[0].process_group
    return dist.get_world_size(group)


def _seen(window: Window, loop: Loop) -> WindowSeen:
    counts = [m.backward.collectives for m in window.micro_steps]
    known = [c for c in counts if c is not None]
    reduced = sum(m.reduces for m in window.micro_steps)
    return WindowSeen(
        micro_steps=len(window.micro_steps),
        reduced=reduced,
        collectives=sum(known) if len(known) == len(counts) else None,
        bytes=reduced * loop.bytes,
        updated=bool(window.steps),
    )
