"""Names of a step's parameters and buffers: the model's own, and the same in every branch of the step.

A name must not depend on which module a call meets first, as branches of a step, other ranks and later runs find sums
by it. So all that the step could meet is named first, in the order of `Observed.within_reach`, and what only the trace
met comes after.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradsync_fx._torch import BatchNorm
from gradsync_fx.capture.trace_state import Observed, outermost, readable
from gradsync_fx.optim.state import parameters_of


Named = dict[str, torch.Tensor]


def named_tensors(seen: Observed) -> tuple[Named, Named]:
    """Parameters and buffers of the modules met, by the outermost module's names (no `module.` of DDP); and of those
    that an optimizer met trains, where another branch of the step calls them.

    Where two models have a name in common, the later one's begins with the path that leads to it.
    """
    counted = (*_trained_elsewhere(seen), *seen.roots())
    those = {id(t) for _, m in counted for t in (*m.parameters(), *m.buffers())}
    parameters: Named = {}
    buffers: Named = {}
    for path, root in outermost([*seen.within_reach, *seen.modules]):
        inner = root.module if isinstance(root, DistributedDataParallel) else root
        wrapped = any(isinstance(m, DistributedDataParallel) for m in inner.modules())
        for found, named in (
            (parameters, inner.named_parameters()),
            (buffers, inner.named_buffers()),
        ):
            known = set(map(id, found.values()))
            for name, tensor in named:
                if id(tensor) not in known:
                    name = name.replace(".module.", ".") if wrapped else name
                    found[_free(name, readable(path) or type(inner).__name__, found)] = tensor
    return _of(parameters, those), _of(buffers, those)


def _free(name: str, path: str, taken: Named) -> str:
    if name in taken:
        name = f"{path}.{name}"
    number, free = 2, name
    while free in taken:
        number, free = number + 1, f"{name} ({number})"
    return free


def _of(found: Named, wanted: set[int]) -> Named:
    return {name: tensor for name, tensor in found.items() if id(tensor) in wanted}


def _trained_elsewhere(seen: Observed) -> list[tuple[str, nn.Module]]:
    """Modules that an optimizer met trains, and that only another branch of the step may call."""
    trained = {id(p) for o in seen.optimizers for p in parameters_of(o)}
    return [
        (path, m) for path, m in seen.within_reach if any(id(p) in trained for p in m.parameters())
    ]


def ddp_modules(seen: Observed) -> tuple[DistributedDataParallel, ...]:
    """All of them, also those inside of other modules; the outer one first."""
    return tuple(m for m in _inside(seen) if isinstance(m, DistributedDataParallel))


def holders(seen: Observed) -> tuple[nn.Module, ...]:
    """Modules that hold parameters themselves, of all that the step could meet."""
    return tuple(m for m in _inside(seen) if next(m.parameters(recurse=False), None) is not None)


def _inside(seen: Observed) -> dict[nn.Module, None]:
    """All modules that the step could meet, also those inside of others; the outer one first."""
    known = (*_trained_elsewhere(seen), *seen.modules)
    return dict.fromkeys(m for _, root in known for m in root.modules())


def batch_norms(seen: Observed) -> tuple[str, ...]:
    """Names of the BatchNorm layers that train."""
    found = []
    for _, root in seen.roots():
        inner = root.module if isinstance(root, DistributedDataParallel) else root
        for name, module in inner.named_modules():
            if isinstance(module, BatchNorm) and module.training:
                found.append(name or type(module).__name__)
    return tuple(found)
