"""What must hold for each program, checked whenever one is built: the proof that users get from the graph itself."""

from __future__ import annotations

import torch
from torch.fx import Node

from gradsync_fx.errors import VerificationError
from gradsync_fx.ir import ops
from gradsync_fx.ir.ops import argument
from gradsync_fx.ir.program import Kind, Program, Slot, writes
from gradsync_fx.passes.symbolic import Machine, Ref
from gradsync_fx.passes.terms import Terms
from gradsync_fx.planning.plan import Bucket, Plan, carrier


def verify(program: Program, plan: Plan, *, tail: bool) -> None:
    """Raises `VerificationError` naming the node or input that breaks the program's specification.

    all          no marker left, but those of opaque updates; every collective has its wait, its one reader
    accumulate   no gradient collective (unless sync_each_batch), no write to optimizer state, nor to a parameter but
                 those that the forward makes
    boundary,    one all-reduce for each bucket with a group, no more and no fewer
    tail
    held sums    of a part that closes: zero at the end; of one that stays open: what it was and this call's term, once
    and weights  (in a tail: what it was)
    masked       what an update writes is what it was where the window's weight is 0

    So over the programs of a window each sum is 0 + t1 + ... + tk when its part closes, whichever programs ran, and a
    call that closes only some parts leaves none half written.
    """
    for node in program.module.graph.nodes:
        opaque = plan.closing and "opaque" in node.meta
        if node.target in (ops.LEAF_GRAD, ops.UPDATE, ops.NOTE) and not opaque:
            raise _broken(program, node, "a marker is left over")
        if ops.is_collective(node) and any(
            u.target is not ops.WAIT and not _unpacks(u) for u in node.users
        ):
            raise _broken(program, node, "its result is read without a wait")
    holders = program.module.graph.find_nodes(op="placeholder")
    held = dict(zip(program.slots, holders, strict=True))
    written = {argument(w, 0) for w in writes(program.module)}
    in_forward = _written_in_forward(plan)
    for slot, holder in held.items():
        guarded = slot.kind is Kind.STATE or (
            slot.kind is Kind.PARAMETER and slot.key not in in_forward
        )
        if not plan.closing and guarded and holder in written:
            raise VerificationError(
                "accumulate program",
                seen=f"it writes the {slot.kind.value} {slot.name!r}",
                wanted="writes to accumulators, buffers and the user's own tensors only",
            )
    _check_reductions(program, plan, tail=tail)
    _check_sums(program, plan, held, tail=tail)


def _written_in_forward(plan: Plan) -> set[int]:
    """Keys of the parameters that every call writes, whatever its window does."""
    step, regions = plan.step, plan.regions
    slots = dict(zip(step.module.graph.find_nodes(op="placeholder"), step.slots, strict=True))
    return {
        slots[argument(write, 0)].key
        for write in writes(step.module)
        if write not in regions.boundary_writes or write in regions.early_writes
    }


def _check_reductions(program: Program, plan: Plan, *, tail: bool) -> None:
    found = sum(1 for n in program.module.graph.nodes if n.meta.get("bucket"))
    reducing = tuple(plan.closing_buckets())
    if plan.sync_each_batch:  # a tail finds sums that were reduced call by call
        reducing = () if tail else plan.buckets
    wanted = sum(_reductions_of(plan, bucket, tail=tail) for bucket in reducing)
    weighed = {b.part for b in reducing} if plan.weighing and plan.group else set()
    wanted += sum(1 for part in weighed if carrier(plan, part) is None and _is_read(plan, part))
    if found != wanted:
        raise VerificationError(
            f"{program.name} program",
            seen=f"{found} reductions of gradients",
            wanted=f"{wanted}: one for each bucket that closes",
        )


def _is_read(plan: Plan, part: int) -> bool:
    """Whether the weight of a part, summed over the ranks, is read: divided by, held, or scaled by."""
    assert plan.weighing is not None
    held = part not in plan.closing or plan.wire_dtype is torch.float16
    return plan.weighing.divides or plan.masked or (plan.sync_each_batch and held)


def _reductions_of(plan: Plan, bucket: Bucket, *, tail: bool) -> int:
    """One, and one more for each time that its gradients are zeroed and computed again in the step."""
    if bucket.reduction.group is None:
        return 0
    markers = plan.regions.gradients
    times = 1 if tail else max(len(markers[leaf]) for leaf in bucket.leaves)
    # What no update of the program shares out is reduced beside the rest.
    apart = plan.scatters(bucket) and any(leaf not in plan.pieces for leaf in bucket.leaves)
    return times + (times if apart else 0)


def _check_sums(program: Program, plan: Plan, held: dict[Slot, Node], *, tail: bool) -> None:
    terms = Terms()
    machine = Machine(terms)
    inputs = [machine.bind(terms.make("input", i)) for i in range(len(held))]
    machine.run(program.module, inputs)
    part_of = {plan.step.leaves[i].name: part for i, part in plan.part_of_leaf.items()}
    if plan.masked:
        _check_masked(program, plan, machine, inputs)
    found = set()
    for i, (slot, holder) in enumerate(held.items()):
        if slot.kind not in (Kind.ACCUMULATOR, Kind.WEIGHT):
            continue
        found.add(slot.key)
        before, after = terms.make("input", i), machine.memory[inputs[i].root]
        if slot.kind is Kind.ACCUMULATOR and slot.key not in part_of:
            right, wanted = (
                after is before,
                "what it was: its window's end empties it",
            )  # an early sum
        elif (part_of[slot.key] if slot.kind is Kind.ACCUMULATOR else slot.key) in plan.closing:
            right, wanted = after is terms.make("filled", (float, 0.0)), "zero"
        elif tail:
            right, wanted = after is before, "what it was"
        else:
            once = len(holder.users) == 2  # the add, and the write of it
            right = once and after.op is torch.ops.aten.add.Tensor and after.args[0] is before
            wanted = "what it was and this call's term, once"
        if not right:
            raise VerificationError(
                f"{program.name} program, {slot.kind.value} {slot.name!r}",
                seen=f"at the end it is {after}",
                wanted=wanted,
            )
    closing = {plan.step.leaves[leaf].name for b in plan.closing_buckets() for leaf in b.leaves}
    if not closing <= found:
        raise VerificationError(
            f"{program.name} program", seen=f"accumulators not reset: {sorted(closing - found)}"
        )


def _check_masked(program: Program, plan: Plan, machine: Machine, inputs: list[Ref]) -> None:
    """Of optimizer state and of parameters that the forward does not write."""
    in_forward = _written_in_forward(plan)
    where, positive = torch.ops.aten.where.self, torch.ops.aten.gt.Scalar
    for i, slot in enumerate(program.slots):
        kept = slot.kind is Kind.PARAMETER and slot.key not in in_forward
        before, after = machine.terms.make("input", i), machine.memory[inputs[i].root]
        if (not kept and slot.kind is not Kind.STATE) or after is before:
            continue
        masked = after.op is where and after.args[2] is before
        if not masked or after.args[0].op is not positive:
            raise VerificationError(
                f"{program.name} program, {slot.kind.value} {slot.name!r}",
                seen=f"at the end it is {after}",
                wanted="what it was where the window's weight is 0",
            )


def _unpacks(node: Node) -> bool:
    return all(u.target is ops.WAIT for u in node.users)


def _broken(program: Program, node: Node, seen: str) -> VerificationError:
    return VerificationError(f"{program.name} program, node {node.name}", seen=seen)
