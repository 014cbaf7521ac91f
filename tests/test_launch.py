"""Which device and which backend an example takes; cards are made up here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch.distributed as dist


EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, which has not asked yet where it runs."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import launch  # type: ignore[import-not-found]

    cached = launch.device
    cached.cache_clear()
    yield launch
    cached.cache_clear()


def seen(
    monkeypatch: pytest.MonkeyPatch, kind: str, count: int, *, nccl: bool = True, ranks: int = 1
) -> None:
    """What torch and torchrun say of this machine."""
    accelerator = torch.device(kind) if count else None
    found = mock.Mock(return_value=accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_RANK", str(ranks - 1))


@pytest.mark.parametrize(
    ("kind", "count", "nccl", "ranks", "device", "backend"),
    [
        ("cuda", 0, True, 2, "cpu", "gloo"),
        ("cuda", 2, True, 2, "cuda:1", "nccl"),
        ("cuda", 8, True, 2, "cuda:1", "nccl"),
        ("cuda", 1, True, 1, "cuda:0", "nccl"),
        ("cuda", 1, True, 2, "cpu", "gloo"),
        ("cuda", 2, False, 2, "cpu", "gloo"),
        ("mps", 1, False, 1, "cpu", "gloo"),
    ],
)
def test_where_a_rank_runs(
    kind: str, count: int, nccl: bool, ranks: int, device: str, backend: str,
    launch: ModuleType, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    seen(monkeypatch, kind, count, nccl=nccl, ranks=ranks)
    assert launch.device() == torch.device(device)
    assert launch.group_backend() == backend


@pytest.mark.parametrize(("count", "rank", "said"), [(0, 0, 0), (1, 0, 1), (1, 1, 0)])
def test_more_ranks_than_cards_are_told_so_once(
    count: int, rank: int, said: int, launch: ModuleType,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """By the first rank of a machine; without cards there is nothing to say."""
    seen(monkeypatch, "cuda", count, ranks=2)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: False)
    with launch.ranks() as (own, world):
        assert (own, world) == (0, 1)
    assert capsys.readouterr().out.count("more ranks than cards (1)") == said


def test_a_process_alone_has_a_group_where_asked(launch: ModuleType) -> None:
    with launch.ranks(joined=True) as place:
        assert place == (0, 1)
        assert dist.get_backend() == "gloo"
    assert not dist.is_initialized()


def test_what_is_moved(launch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors and modules, through what holds them; a replicated module stays the same object."""
    monkeypatch.setattr(launch, "device", lambda: torch.device("meta"))
    batch = {"x": torch.zeros(2), "pair": (torch.zeros(1), [torch.zeros(3)])}
    found = launch.moved(batch)
    assert found["x"].is_meta
    assert isinstance(found["pair"], tuple)
    assert found["pair"][1][0].is_meta
    net = torch.nn.Linear(2, 2)
    assert launch.replicated(net) is net
    assert net.weight.is_meta
