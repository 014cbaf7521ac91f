"""What has to be alike of an optimizer on all ranks, in words: what differs is shown to people as it stands here.

Its class, its groups with the plain values of each, its parameters in their order, the entries of their state. A tensor
counts by its form, a number in a tensor by its value; devices do not, as ranks have other ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from gradsync_fx.optim.state import in_groups


_PLAIN = (int, float, complex, str, bool, bytes, type(None), torch.dtype)


def likeness(optimizer: Optimizer, names: Mapping[int, str]) -> list[str]:
    """All of that. names: by id, of the parameters that ranks have in common; others are each rank's own."""
    held = [p for p in in_groups(optimizer) if id(p) in names]
    lines = settings_likeness(optimizer, names) if held else []
    for place, parameter in enumerate(held):
        name = names[id(parameter)]
        lines.append(f"with {name!r} of shape {tuple(parameter.shape)} as parameter {place}")
    for place, parameter in enumerate(held):
        state = getattr(optimizer, "state", {}).get(parameter)
        entries = ", ".join(sorted(map(str, state))) if isinstance(state, dict) and state else ""
        lines.append(f"with {entries or 'nothing'} as state of parameter {place}")
    return [f"{type(optimizer).__qualname__} {line}" for line in lines]


def settings_likeness(optimizer: Optimizer, among: Collection[int] | None = None) -> list[str]:
    """What of it may be set between two updates. among: parameters that count, by id; None for all of them."""
    groups = getattr(optimizer, "param_groups", [])
    sizes = [sum(among is None or id(p) in among for p in group["params"]) for group in groups]
    lines = [f"with parameters by group: {sizes}"]
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
