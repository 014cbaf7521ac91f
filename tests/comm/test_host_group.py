"""Which backend runs what, and the group beside one that runs nothing on the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from gradsync_fx.comm import host_group as module
from gradsync_fx.comm.host_group import backend_of, host_group
from gradsync_fx.comm.rendezvous import Line, broadcast, is_gloo
from tests.scenarios import beside
from tests.workers import Ranks


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def of_device_alone() -> dist.ProcessGroup:
    beside.register()
    group = dist.new_group([0], backend="cuda:on_device")
    assert isinstance(group, dist.ProcessGroup)
    return group


def test_a_backend_is_of_a_device(alone: None) -> None:
    world = dist.group.WORLD
    assert world is not None
    assert backend_of(world, "cpu") == backend_of(world, "cuda") == "gloo"
    assert is_gloo(world)
    group = of_device_alone()
    assert backend_of(group, "cpu") is None
    assert backend_of(group, "cuda") == "on_device"
    assert not is_gloo(group)


def test_a_group_that_is_not_there_is_not_taken_for_one_of_a_device() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        world = dist.group.WORLD
        assert world is not None
        assert backend_of(world, "cpu") == "fake"
        assert host_group(world) is world
    finally:
        dist.destroy_process_group()


def test_a_group_of_the_host_is_its_own(alone: None) -> None:
    world = dist.group.WORLD
    assert world is not None
    assert host_group(world) is world


def test_one_is_made_beside_a_group_of_a_device_and_found_again(alone: None) -> None:
    group = of_device_alone()
    made = host_group(group)
    assert is_gloo(made)
    assert host_group(group) is made
    assert Line(group, None).gather([1.0, 2.0]) == [[1.0, 2.0]]
    broadcast(group, [torch.ones(2)])  # of the CPU


def test_it_goes_with_its_group(alone: None) -> None:
    group = of_device_alone()
    made = host_group(group)
    dist.destroy_process_group(group)
    other = of_device_alone()
    assert host_group(other) is not made
    with pytest.raises(TypeError):
        dist.get_backend_config(made)


def test_none_outlives_torchs_groups() -> None:
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group = of_device_alone()
        assert is_gloo(host_group(group))
        dist.destroy_process_group()
        del group
    assert len(module._made) == 1  # the first one is forgotten


@pytest.mark.gloo
def test_ranks_meet_beside_a_group_of_a_device(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks(beside.meet)):
        assert found["rows"] == [[0.0, 0.5], [1.0, 0.5]]
        assert found["rank"] == rank


@pytest.mark.gloo
def test_a_rank_that_is_late_is_named(ranks: Ranks) -> None:
    waited, _ = ranks(beside.late)
    assert "RankLostError" in waited
    assert "rank 1" in waited


@pytest.mark.gloo
def test_ranks_that_disagree_are_told(ranks: Ranks) -> None:
    """As over gloo."""
    one, two = ranks(beside.disagree)
    assert "RanksDisagreeError" in one
    assert "RanksDisagreeError" in two
