"""The group over which ranks speak on the host: a collective of the device would wait for all that runs there.

"gloo", "cpu:gloo,cuda:nccl"   the group itself
"nccl" (of the device alone)   a gloo group of the same ranks beside it, made once, and found again

It goes when the group goes: with all of torch's groups, or when the next one is asked for.
"""

from __future__ import annotations

import weakref
from contextlib import suppress

import torch.distributed as dist
from torch.distributed import ProcessGroup

from gradsync_fx.comm.two_levels import TwoLevels
from gradsync_fx.errors import OptionError


# Groups without a backend for the CPU, and what was made beside each.
_beside: weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()
# All that were made, with the group that each stands beside: torch holds them as long as nobody destroys them.
_made: list[tuple[weakref.ref[ProcessGroup], weakref.ref[ProcessGroup]]] = []


def backend_of(group: ProcessGroup, device: str) -> str | None:
    """What runs a group's collectives of tensors on this type of device; None where nothing does."""
    if isinstance(group, TwoLevels):
        group = group.inside
    pairs = (one.partition(":") for one in dist.get_backend_config(group).split(","))
    return {kind: backend for kind, _, backend in pairs}.get(device)


def host_group(group: ProcessGroup) -> ProcessGroup:
    """A group of the same ranks whose collectives run on the host. All of them ask for the first time together."""
    if backend_of(group, "cpu") is not None:
        return group
    beside = _beside.get(group)
    if beside is None:
        _destroy_orphans()
        beside = _beside[group] = _beside_of(group)
        _made.append((weakref.ref(group), weakref.ref(beside)))
    return beside


def in_order_of(group: ProcessGroup, beside: ProcessGroup) -> list[int]:
    """For each rank of a group its rank in the one beside it: torch sorts the ranks of a new group."""
    there = dist.get_process_group_ranks(beside)
    return [there.index(rank) for rank in dist.get_process_group_ranks(group)]


def _beside_of(group: ProcessGroup) -> ProcessGroup:
    if not dist.is_gloo_available():
        raise OptionError(
            "the process group",
            seen=f"its backend is {dist.get_backend_config(group)!r}, which runs nothing on the host, and this torch "
            "has no gloo",
            wanted="ranks that can tell each other where they stand without waiting for the device",
            fix="use a torch with gloo, or a group with a backend for the CPU, as 'cpu:mpi,cuda:nccl'",
        )
    ranks = dist.get_process_group_ranks(group)
    beside = dist.new_group(
        ranks,
        backend="gloo",
        use_local_synchronization=True,  # ranks outside of the group know nothing of it
        group_desc="gradsync_fx: positions of ranks",
    )
    assert isinstance(beside, ProcessGroup)
    return beside


def _destroy_orphans() -> None:
    """Those beside groups that are gone."""
    for owner, beside in list(_made):
        group, other = owner(), beside()
        if other is not None and is_there(other):
            if group is not None and is_there(group):
                continue
            dist.destroy_process_group(other)
        if group is not None:
            _beside.pop(group, None)
        _made.remove((owner, beside))


def is_there(group: ProcessGroup) -> bool:
    """Whether torch knows it: it may have been destroyed while somebody holds it."""
    with suppress(ValueError, TypeError):  # torch's, in and outside of a job
        return bool(dist.get_backend_config(group))
    return False
