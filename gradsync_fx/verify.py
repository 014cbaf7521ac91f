"""What must hold for each program, checked whenever one is built: the proof that users get from the graph itself."""

from __future__ import annotations

from torch.fx import Node

from gradsync_fx import ops
from gradsync_fx.errors import VerificationError
from gradsync_fx.ops import argument
from gradsync_fx.plan import Plan
from gradsync_fx.program import Kind, Program, Slot, writes


def verify(program: Program, plan: Plan) -> None:
    """Raises `VerificationError` naming the node that breaks the program's specification.

    all          no marker left, but those of opaque updates; every collective has its wait, its one reader
    accumulate   no gradient collective (unless sync_each_batch), no write to a parameter or to optimizer state
    boundary,    one all-reduce for each bucket with a group; every accumulator is written
    tail
    """
    nodes = list(program.module.graph.nodes)
    slot_of = dict(
        zip(program.module.graph.find_nodes(op="placeholder"), program.slots, strict=True)
    )
    for node in nodes:
        opaque = plan.closing and "opaque" in node.meta
        if node.target in (ops.LEAF_GRAD, ops.UPDATE, ops.NOTE) and not opaque:
            raise _broken(program, node, "a marker is left over")
        if ops.is_collective(node) and any(
            u.target is not ops.WAIT and not _unpacks(u) for u in node.users
        ):
            raise _broken(program, node, "its result is read without a wait")
    written = [slot_of[argument(w, 0)] for w in writes(program.module)]
    inserted = sum(
        1
        for b in plan.buckets
        if b.reduction.group is not None and (b.part in plan.closing or plan.sync_each_batch)
    )
    stays = sum(
        1
        for n in plan.step.module.graph.nodes
        if ops.is_collective(n) and n not in plan.regions.beyond
    )
    found = sum(1 for n in nodes if ops.is_collective(n))
    if not plan.closing:
        # A weight that finds no bucket to travel with goes alone.
        weights = len(plan.parts) if plan.weighing and plan.sync_each_batch and plan.group else 0
        _check_accumulate(program, written, found, stays + inserted + weights)
    wanted = {plan.step.leaves[leaf].name for b in plan.closing_buckets() for leaf in b.leaves}
    missing = wanted - {s.key for s in written if s.kind is Kind.ACCUMULATOR}
    if missing:
        raise VerificationError(
            f"{program.name} program", seen=f"accumulators not reset: {sorted(missing)}"
        )


def _check_accumulate(program: Program, written: list[Slot], found: int, allowed: int) -> None:
    for slot in written:
        if slot.kind in (Kind.PARAMETER, Kind.STATE):
            raise VerificationError(
                "accumulate program",
                seen=f"it writes the {slot.kind.value} {slot.name!r}",
                wanted="writes to accumulators, buffers and the user's own tensors only",
            )
    if found > allowed:
        raise VerificationError(
            "accumulate program", seen=f"{found} collectives", wanted=f"at most {allowed}"
        )


def _unpacks(node: Node) -> bool:
    return all(u.target is ops.WAIT for u in node.users)


def _broken(program: Program, node: Node, seen: str) -> VerificationError:
    return VerificationError(f"{program.name} program, node {node.name}", seen=seen)
