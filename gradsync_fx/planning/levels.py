"""The two levels of a mesh, checked against the ranks of a step; one group for each mesh, whichever captures ask."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from gradsync_fx.comm.host_group import is_there
from gradsync_fx.comm.two_levels import TwoLevels
from gradsync_fx.errors import OptionError


# By name. torch calls them by name alone, so they are held here as long as the groups that they use are there.
_made: dict[str, TwoLevels] = {}


def find_levels(
    mesh: DeviceMesh | None, group: ProcessGroup | None, parameters: Iterable[torch.Tensor]
) -> TwoLevels | None:
    """The group over which sums are reduced in two levels; None without a mesh.

    Raises `OptionError` for a mesh of other ranks than the step's, or of another device than its parameters.
    """
    if mesh is None:
        return None
    ranks = dist.get_process_group_ranks(group) if group is not None else [0]
    held = mesh.mesh.flatten().tolist()
    if sorted(held) != sorted(ranks):
        raise _unfit(
            f"a mesh of ranks {mesh.mesh.tolist()}",
            f"each of the step's ranks {ranks} in it, once",
            "build it over the ranks of the step: "
            'init_device_mesh("cpu", (machines, ranks_per_machine)), or pass process_group=',
        )
    if group is None:
        return None
    devices = sorted({p.device.type for p in parameters} - {mesh.device_type})
    if devices:
        raise _unfit(
            f"a mesh of {mesh.device_type!r}, and parameters on {devices[0]!r}",
            "a mesh of the parameters' device",
            f'init_device_mesh("{devices[0]}", ...)',
        )
    for gone in [n for n, made in _made.items() if not is_there(made.inside)]:
        del _made[gone]
    known = next((made for made in _made.values() if made.mesh is mesh), None)
    if known is not None and known.over is group:
        return known
    # The same name in every process and every run: code that was compiled for it is found again.
    name = f"{group.group_name} in two levels {mesh.mesh.tolist()}"
    number = 1
    while (numbered := name if number == 1 else f"{name} ({number})") in _made:
        number += 1
    made = _made[numbered] = TwoLevels(mesh, group, numbered)
    return made


def _unfit(seen: str, wanted: str, fix: str) -> OptionError:
    return OptionError("argument 'device_mesh'", seen=seen, wanted=wanted, fix=fix)
