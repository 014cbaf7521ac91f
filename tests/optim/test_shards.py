"""Flat pieces of tensors as boxes of them."""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from gradsync_fx.optim.shards import ShardTensor, boxes


def test_boxes_are_the_elements_in_their_order() -> None:
    source = random.Random(0)
    for _ in range(500):
        shape = [source.randint(1, 5) for _ in range(source.randint(1, 4))]
        count = math.prod(shape)
        start, end = sorted((source.randint(0, count), source.randint(0, count)))
        tensor = torch.arange(count).view(shape)
        found = [torch.arange(0)]
        for offsets, sizes in boxes(shape, start, end):
            cut = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            found.append(tensor[cut].flatten())
        assert torch.equal(torch.cat(found), torch.arange(start, end))


def test_few_boxes() -> None:
    assert list(boxes((4, 3), 2, 10)) == [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    assert list(boxes((4, 3), 0, 12)) == [((0, 0), (4, 3))]
    assert list(boxes((), 0, 1)) == [((), ())]
    assert list(boxes((4, 3), 5, 5)) == []


def test_a_shard_is_the_memory_of_its_piece() -> None:
    piece = torch.arange(8.0)
    shard = ShardTensor.of(piece, (4, 3), 2)
    assert shard.size() == (4, 3)
    for item in shard.__create_write_items__("name", shard):
        shard.__get_tensor_shard__(item.index).zero_()
    assert not piece.any()


@pytest.mark.parametrize("count", [6, 0])
def test_copies_are_shards_in_memory_of_their_own(count: int) -> None:
    """As `async_save` makes them, in a thread or for another process; and of what a rank has nothing of."""
    shard = ShardTensor.of(torch.arange(float(count)), (3, 4), 2 if count else 0)
    ways: list[Callable[[ShardTensor], Any]] = [
        lambda s: StateDictStager().stage({"held": s})["held"],
        copy.deepcopy,
        lambda s: pickle.loads(pickle.dumps(s)),
    ]
    for way in ways:
        made = way(shard)
        assert isinstance(made, ShardTensor)
        assert (made.size(), made.start) == (shard.size(), shard.start)
        assert torch.equal(made.elements(), torch.arange(float(count)))
        made.elements().fill_(7.0)
        assert torch.equal(shard.elements(), torch.arange(float(count)))
