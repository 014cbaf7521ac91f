"""The numbers of a call in one vector: where it lies, what it holds, and that nothing else is changed."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from gradsync_fx.lowering.number_vector import NumberVector, with_vector


def numbers(*values: float) -> list[torch.Tensor]:
    return [torch.tensor(v, dtype=torch.float64) for v in values]


def test_a_program_is_given_its_numbers_in_one_vector_at_one_address() -> None:
    vector = NumberVector((1, 3), torch.device("cpu"))
    x, y = torch.ones(2), torch.zeros(3)
    places, seen = set(), []
    for lr, divisor in ((0.1, 4.0), (0.2, 3.0)):
        a, b = numbers(lr, divisor)
        first, second, held = vector.inputs([x, a, y, b])
        assert first is x
        assert second is y
        places.add(held.data_ptr())
        seen.append(held.tolist())
    assert len(places) == 1
    assert seen == [[0.1, 4.0], [0.2, 3.0]]  # in float64, as they were


def test_programs_have_vectors_of_their_own() -> None:
    one, other = (NumberVector((0,), torch.device("cpu")) for _ in range(2))
    (a,), (b,) = one.inputs(numbers(1.0)), other.inputs(numbers(2.0))
    assert a.item() == 1.0
    assert b.item() == 2.0


def test_a_compiled_program_takes_what_the_program_takes() -> None:
    run = with_vector(lambda args: [args[0] * args[1][0]], (0,), torch.device("cpu"))
    (lr,) = numbers(0.5)
    assert run([lr, torch.tensor(4.0)]) == [torch.tensor(2.0)]


def test_a_device_is_sent_pinned_memory_and_not_waited_for() -> None:
    """With stand-ins for what the CPU does not have: pinned memory, and a tensor on the device."""
    asked: list[Any] = []
    plain, like = torch.tensor, torch.empty_like

    def pinned(values: Any, **kwargs: Any) -> torch.Tensor:
        asked.append(("pinned", kwargs.pop("pin_memory")))
        return plain(values, **kwargs)

    def on_device(tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        asked.append(("device", str(kwargs["device"])))
        return like(tensor).as_subclass(_Seen)

    class _Seen(torch.Tensor):
        def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            asked.append(("copy", non_blocking))
            return super().copy_(source)

    vector = NumberVector((0,), torch.device("cuda:0"))
    with (
        mock.patch.object(torch, "tensor", pinned),
        mock.patch.object(torch, "empty_like", on_device),
    ):
        for value in (1.0, 2.0):
            vector.inputs([plain(value, dtype=torch.float64)])
    assert asked == [
        ("pinned", True), ("device", "cuda:0"), ("copy", True), ("pinned", True), ("copy", True),
    ]  # fmt: skip
