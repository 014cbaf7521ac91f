"""Records of storages while a step runs eagerly: what each value is made of, and what an operation writes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gradsync_fx._torch import tree_leaves, tree_map_only
from gradsync_fx.eager.actions import Action


@dataclass(frozen=True, slots=True)
class Origin:
    """What a value is made of.

    reads: optimizers whose gradients (gradient) or updated parameters are in it. data: what is neither a parameter nor
    a buffer. kept: the storages of buffers and other tensors that were there before the call. sign: equal for values
    that were made in the same way, of the same numbers.
    """

    reads: frozenset[int] = frozenset()
    gradient: bool = False
    data: bool = False
    kept: frozenset[int] = frozenset()
    sign: int = 0

    def joined(self, other: Origin) -> Origin:
        """What is made of both, with this one's sign."""
        return replace(
            self,
            reads=self.reads | other.reads,
            gradient=self.gradient or other.gradient,
            data=self.data or other.data,
            kept=self.kept | other.kept,
        )


@dataclass(slots=True)
class Held:
    """A storage that is known. slot: its number among the noted. parameter: whose gradient it is."""

    alive: StorageWeakRef
    origin: Origin
    born: bool = True
    slot: int | None = None
    parameter: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Count:
    """A write of what a tensor becomes of itself alone. action: its note. before: the tensor's value.

    The count of an average is one, and belongs to the update; that of all calls is none. Which it is shows at the end
    of the call: by whether a write of the update is made of it.
    """

    target: torch.Tensor
    before: torch.Tensor
    late: Origin
    action: Action


def alive(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def written_by(function: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    schema = getattr(function, "_schema", None)
    if getattr(function, "namespace", "") == "c10d":  # whose schemas do not tell
        return [t for t in tree_leaves(args[0]) if isinstance(t, torch.Tensor)]
    if schema is None or not schema.is_mutable:
        return []
    found: list[Any] = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name))
    return [t for t in found if isinstance(t, torch.Tensor)]


def on_copies(given: Any, targets: list[torch.Tensor]) -> Any:
    copies = {id(t): t.detach().clone() for t in targets}
    return tree_map_only(torch.Tensor, lambda t: copies.get(id(t), t), given)


def as_given(result: Any, copied: Any, given: Any) -> Any:
    """A result of copies, with the originals in their places."""
    pairs = zip(tree_leaves(copied), tree_leaves(given), strict=True)
    back = {id(copy): tensor for copy, tensor in pairs if isinstance(copy, torch.Tensor)}
    return tree_map_only(torch.Tensor, lambda t: back.get(id(t), t), result)
