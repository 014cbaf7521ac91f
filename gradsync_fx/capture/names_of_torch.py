"""Names of torch's own classes and functions, as a step reads them: constants, where Dynamo has an attribute to come.

PEFT's DoRA asks `type(module.weight).__module__.startswith("torchao.")`. The class of a tensor is guarded on already.
"""

from __future__ import annotations

from typing import Any

from gradsync_fx._torch import BaseTorchVariable


_NAMES = ("__module__", "__name__", "__qualname__")


def torch_name_of(owner: Any, name: str) -> str | None:
    """What the attribute `name` of one of Dynamo's variables is, where that is a name of torch; else None."""
    if name not in _NAMES or not isinstance(owner, BaseTorchVariable):
        return None
    text = getattr(owner.value, name, None)
    return text if isinstance(text, str) else None
