"""What a micro-step of a captured step has to do, in FLOPs and bytes to send."""

from __future__ import annotations

from torch.fx import Node

from gradsync_fx.inspection.costs import Load
from gradsync_fx.ir.flops import flops_of
from gradsync_fx.runtime.captured_step import CapturedStep


def load_of(captured: CapturedStep) -> Load:
    """What a micro-step has to do, and when each bucket's gradients are there."""
    beyond = captured.facts.regions.beyond
    forward = total = 0
    after: dict[Node, int] = {}
    for node in captured.facts.capture.step.module.graph.nodes:
        if node.op == "call_function" and node not in beyond:
            flops = flops_of(node)
            total += flops
            if not node.meta.get("autograd_backward"):
                forward += flops
        after[node] = total
    buckets = []
    for number, bucket in enumerate(captured.facts.buckets):
        if bucket.reduction.group is None:
            continue
        markers = [captured.facts.regions.gradients[leaf][0] for leaf in bucket.leaves]
        ready = max(after[m.all_input_nodes[0]] for m in markers)
        leaves = [captured.facts.capture.step.leaves[i] for i in bucket.leaves]
        dtype = (
            captured.facts.setting.wire_dtype
            or captured.programs.plan.accumulators[leaves[0].name].dtype
        )
        size = sum(leaf.parameter.numel() for leaf in leaves) * dtype.itemsize
        buckets.append((f"bucket {number}", ready / total if total else 1.0, size))
    setting = captured.facts.setting
    # The ranks of a machine share its link, and send the bytes of one rank over it.
    ranks = setting.world if setting.levels is None else setting.levels.mesh.shape[0]
    facts = captured.facts
    leaves = [leaf for leaf in facts.capture.step.leaves.values() if leaf.name in facts.reduced]
    new = sum(leaf.parameter.numel() * leaf.parameter.itemsize for leaf in leaves)
    gathered = new if facts.shares else 0
    return Load(forward, total, tuple(buckets), ranks, gathered, hides=bool(facts.arriving))
