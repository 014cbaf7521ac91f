"""Flat pieces of tensors as boxes of them."""

from __future__ import annotations

import math
import random

import torch

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
