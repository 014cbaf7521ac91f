"""Who has what of an optimizer: even pieces, owners that stay where they are, and what is cut out of a state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gradsync_fx.errors import OptionError
from gradsync_fx.optim.shares import Portion, Shares, refuse_divided, shares_of


@pytest.mark.parametrize("world", [2, 3, 4, 7, 64])
@pytest.mark.parametrize("elements", [0, 1, 15, 31, 32, 33, 100, 4096, 4097, 70001])
def test_pieces_are_even_and_none_is_empty(elements: int, world: int) -> None:
    portion = Portion.split(elements, world)
    if portion is None:
        assert elements < world * max(16, world)
        return
    sizes = [portion.size(rank) for rank in range(world)]
    assert sum(sizes) == portion.elements == elements
    assert min(sizes) > 0
    assert set(sizes[:-1]) == {max(sizes)}
    assert max(sizes) <= elements / world + 16


def test_the_whole_of_it_has_one_rank() -> None:
    portion = Portion.whole(10, 2, 4)
    assert [portion.of(rank) for rank in range(4)] == [(0, 0), (0, 0), (0, 10), (10, 10)]
    assert portion.elements == 10


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes]


def test_a_state_is_cut_once() -> None:
    (p, q) = parameters((10, 10), (3,))
    optimizer = torch.optim.Adam([p, q])
    shares = Shares(optimizer, 1, 2)
    split = Portion.split(100, 2)
    assert split is not None
    shares.pieces = {0: split, 1: Portion.whole(3, 0, 2)}
    whole = torch.arange(100.0).view(10, 10)
    step = torch.tensor(3.0)
    state: dict[int, dict[str, Any]] = {
        0: {"step": step, "m": whole, "rate": 0.5},
        1: {"step": step, "m": torch.ones(3)},
    }
    for _ in range(2):
        shares.adopt([0, 1], state)
        assert torch.equal(state[0]["m"], whole.flatten()[split.cuts[1] :])
        assert state[0]["step"] is step
        assert state[0]["rate"] == 0.5
        assert state[1]["m"].device.type == "meta"
        assert state[1]["step"] is step
    stands = shares.whole_form(0, state[0])
    assert stands["m"].shape == (10, 10)
    assert stands["step"] is step
    assert shares.whole_form(1, state[1])["m"].device.type == "cpu"


def test_one_optimizer_is_divided_in_one_way() -> None:
    optimizer = torch.optim.Adam(parameters((100,)))
    shares = shares_of(optimizer, 0, 2)
    assert shares_of(optimizer, 0, 2) is shares
    refuse_divided(optimizer)
    with pytest.raises(OptionError, match="divided among 2 ranks, and a step asks for 4"):
        shares_of(optimizer, 0, 4)
    assert shares_of(optimizer, 0, 4, simulated=True) is not shares
    portion = Portion.split(100, 2)
    assert portion is not None
    shares.pieces[0] = portion
    with pytest.raises(OptionError, match="pass shard_optimizer=True here, too"):
        refuse_divided(optimizer)
