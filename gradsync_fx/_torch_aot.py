"""The private parts of torch that say what AOTAutograd did round a graph, and that make the fake tensors in one.

Beside _torch.py, as that file is long. Seen in torch 2.13.0; a name that is gone raises `VersionError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradsync_fx._torch import (
    FakeTensor,
    MutationType,
    OutputType,
    TracingContext,
    functorch_config,
    inductor_config,
    missing_name,
)


try:
    from torch._C import _len_torch_function_stack as torch_functions_in_force
    from torch._ops import HigherOrderOperator, OpOverloadPacket
    from torch.fx.passes.shape_prop import TensorMetadata
    from torch.utils._mode_utils import no_dispatch
    from torch.utils._python_dispatch import (
        _get_current_dispatch_mode_stack as dispatch_modes_in_force,
    )
    from torch.utils._sympy.reference import TensorReferenceAnalysis
except ImportError as missing:
    raise missing_name(str(missing)) from missing


def work_round_the_graph(placeholders: int) -> str:
    """What AOTAutograd does before or after the graph that it compiled just now; "" where it only calls it.

    placeholders: how many inputs the graph has.
    """
    context = TracingContext.try_get()
    found = context.fw_metadata if context is not None else None
    if context is None or found is None:
        return "nothing is known of its inputs"
    inside = (MutationType.NOT_MUTATED, MutationType.MUTATED_IN_GRAPH)
    about, results = found.input_info, found.output_info
    reasons = (
        (len(about) != placeholders, "inputs that are views of one storage"),
        (any(a.mutation_type not in inside for a in about), "an input that is written after it"),
        (any(a.mutates_metadata for a in about), "an input that becomes another tensor"),
        (any(r.output_type != OutputType.non_alias for r in results), "a result that is a view"),
        (any(r.dynamic_dims for r in results), "a result of symbolic shape"),
        (bool(found.num_intermediate_bases), "results that share memory"),
        (bool(found.traced_tangents), "a backward of its own"),
        (bool(found.tokens), "effects in order"),
        (bool(found.is_rng_op_functionalized), "random numbers handed in"),
        (found.grad_enabled_mutation is not None, "a grad mode that it changes"),
        (bool(context.guards_context.aotautograd_guards), "inputs that may be one tensor"),
    )
    return next((reason for applies, reason in reasons if applies), "")


def compiler_settings() -> str:
    """Equal where AOTAutograd and Inductor are set alike."""
    return f"{functorch_config.get_hash().hex()} {inductor_config.get_hash().hex()}"


def plain_fake(value: Any) -> bool:
    """Whether a fake tensor is no more than its form: no view for autograd, no known numbers."""
    return (
        type(value) is FakeTensor
        and value.layout is torch.strided
        and value.constant is None
        and value.real_tensor is None
        and not value._is_view()
        and not value.is_conj()
        and not value.is_neg()
        and not value.is_quantized
    )


def memory_key(tensor: torch.Tensor) -> int:
    """Equal for tensors in one storage, as long as it is."""
    return int(tensor.untyped_storage()._cdata)


class FakeMemory:
    """Makes fake tensors of one mode; those of one storage by its number."""

    def __init__(self, fake_mode: Any) -> None:
        self._mode = fake_mode
        self._storages: dict[int, torch.UntypedStorage] = {}

    def tensor(
        self,
        storage: int,
        nbytes: int,
        dtype: torch.dtype,
        device: torch.device,
        shape: Sequence[int],
        strides: Sequence[int],
        offset: int,
    ) -> FakeTensor:
        """A fake tensor of this form, in storage number `storage`, of `nbytes` bytes."""
        with no_dispatch():
            if storage not in self._storages:
                self._storages[storage] = torch.UntypedStorage(nbytes, device="meta")
            form = torch.empty(0, dtype=dtype, device="meta")
            form.set_(self._storages[storage], offset, tuple(shape), tuple(strides))
            return FakeTensor(self._mode, form, device)
