"""What has to be alike of an optimizer on all ranks, in words: what differs is shown to people as it stands here.

Its class, its groups with the plain values of each, its parameters in their order, the entries of their state. A tensor
counts by its form, a number in a tensor by its value; devices do not, as ranks have other ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from gradsync_fx.optim.state import in_groups


_PLAIN = (int, float, complex, str, bool, bytes, type(None), torch.dtype)


def likeness(optimizer: Optimizer, names: Mapping[int, str]) -> list[str]:
    """All of that. names: of parameters, by id."""
    lines = settings_likeness(optimizer)
    for place, parameter in enumerate(in_groups(optimizer)):
        name = names.get(id(parameter), "")
        lines.append(f"with {name!r} of shape {tuple(parameter.shape)} as parameter {place}")
    for place, parameter in enumerate(in_groups(optimizer)):
        state = getattr(optimizer, "state", {}).get(parameter)
        entries = ", ".join(sorted(map(str, state))) if isinstance(state, dict) and state else ""
        lines.append(f"with {entries or 'nothing'} as state of parameter {place}")
    return [f"{type(optimizer).__qualname__} {line}" for line in lines]


def settings_likeness(optimizer: Optimizer) -> list[str]:
    """What of it may be set between two updates."""
    groups = getattr(optimizer, "param_groups", [])
    lines = [f"with parameters by group: {[len(group['params']) for group in groups]}"]
    for number, group in enumerate(groups):
        held = {key: value for key, value in group.items() if key != "params"}
        lines += [
            f"with {key}={_plain(held[key])} in group {number}" for key in sorted(held, key=str)
        ]
    return lines


def _plain(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and value.device.type != "meta":
            return repr(value.detach().item())
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_plain, value))})"
    return repr(value) if isinstance(value, _PLAIN) else f"a {type(value).__qualname__}"
