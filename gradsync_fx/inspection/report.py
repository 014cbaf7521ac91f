"""The report: data first, a table for the terminal as one view of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradsync_fx import ops
from gradsync_fx.captured import CapturedStep
from gradsync_fx.errors import WindowError
from gradsync_fx.journal import Entry
from gradsync_fx.options import Options
from gradsync_fx.plan import Bucket


@dataclass(frozen=True, slots=True)
class Collective:
    """One gradient all-reduce of a window: its parameters, and the bytes each rank puts in."""

    parameters: tuple[str, ...]
    bytes: int
    op: str
    group: str


@dataclass(frozen=True, slots=True)
class Report:
    """Counts are for one window of `k` micro-steps, bytes for one rank.

    before: every micro-step reduces its gradients, as DDP does without `no_sync`. after: this program pair.
    kept: collectives that are no gradient reduction and run in every micro-step.
    regions: nodes of the captured step by role.
    """

    k: int
    world_size: int
    collectives: tuple[Collective, ...]
    kept: tuple[str, ...]
    collectives_before: int
    collectives_after: int
    bytes_before: int
    bytes_after: int
    regions: dict[str, int]
    unused_parameters: tuple[str, ...]
    warnings: tuple[str, ...]
    passes: tuple[Entry, ...]
    programs: dict[str, int]

    def __str__(self) -> str:
        rows = [
            ("", "before", "after"),
            ("gradient collectives", str(self.collectives_before), str(self.collectives_after)),
            ("bytes per rank", f"{self.bytes_before:,}", f"{self.bytes_after:,}"),
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [f"one window: k = {self.k} micro-steps, {self.world_size} ranks"]
        lines += [f"  {a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows]
        lines.append("nodes: " + ", ".join(f"{n} {role}" for role, n in self.regions.items()))
        lines.append("programs: " + ", ".join(f"{p} {n} nodes" for p, n in self.programs.items()))
        lines += [f"kept in every micro-step: {name}" for name in self.kept]
        lines += [f"no gradient: {name}" for name in self.unused_parameters]
        lines += [f"note: {text}" for text in self.warnings]
        return "\n".join(lines)


def make_report(captures: Sequence[CapturedStep], options: Options) -> Report:
    """The report of the latest capture. Raises `WindowError` when there is none yet."""
    if not captures:
        raise WindowError(
            "report",
            seen="nothing has been captured yet",
            wanted="a call of the step before",
            fix="call the step, or step.prepare(...), first",
        )
    captured = captures[-1]
    k, sync_each = max(options.steps), options.sync_each_batch
    found = tuple(
        _collective(captured, b) for b in captured.plan.buckets if b.reduction.group is not None
    )
    beyond = captured.regions.beyond
    kept = tuple(
        f"{n.target} at {ops.user_line(n)}"
        for n in captured.capture.step.module.graph.nodes
        if ops.is_collective(n) and n not in beyond
    )
    size = sum(c.bytes for c in found)
    return Report(
        k=k,
        world_size=captured.setting.world,
        collectives=found,
        kept=kept,
        collectives_before=k * len(found),
        collectives_after=(k if sync_each else 1) * len(found),
        bytes_before=k * size,
        bytes_after=(k if sync_each else 1) * size,
        regions=_regions(captured),
        unused_parameters=tuple(n for n in captured.capture.parameters if n not in captured.names),
        warnings=_notes(captured),
        passes=tuple(captured.journal.entries),
        programs={n: len(p.module.graph.nodes) for n, p in captured.programs.items()},
    )


def _collective(captured: CapturedStep, bucket: Bucket) -> Collective:
    leaves = [captured.capture.step.leaves[i] for i in bucket.leaves]
    size = 0
    for leaf in leaves:
        dtype = captured.plan.wire_dtype or captured.plan.accumulators[leaf.name].dtype
        size += leaf.parameter.numel() * dtype.itemsize
    names = tuple(leaf.name for leaf in leaves)
    return Collective(names, size, bucket.reduction.op, bucket.reduction.group or "")


def _regions(captured: CapturedStep) -> dict[str, int]:
    roles = {"forward": 0, "backward": 0, "gradient sync": 0, "beyond (clipping, update)": 0}
    for node in captured.capture.step.module.graph.nodes:
        if node.op != "call_function" or node.target is ops.NOTE:
            continue
        if node in captured.regions.beyond:
            sync = ops.is_collective(node) or node.target is ops.WAIT
            roles["gradient sync" if sync else "beyond (clipping, update)"] += 1
        else:
            roles["backward" if node.meta.get("autograd_backward") else "forward"] += 1
    return roles


def _notes(captured: CapturedStep) -> tuple[str, ...]:
    notes = []
    for ddp in captured.capture.ddp:
        unused = [
            flag for flag in ("static_graph", "find_unused_parameters") if getattr(ddp, flag, False)
        ]
        notes += [
            f"DistributedDataParallel({flag}=True) is not used: its reducer never runs"
            for flag in unused
        ]
    return tuple(notes)
