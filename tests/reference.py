"""Independent references: what plain eager PyTorch computes for a window. Nothing here uses gradsync_fx.

A batch is a tuple of tensors, a window a list of batches, a run a list of windows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


Batch = tuple[Tensor, ...]
Window = list[Batch]
LossOf = Callable[..., Tensor]
Hook = Callable[[], object]


@dataclass
class Run:
    """What a run showed: the loss of every micro-step, and the model's tensors after every update."""

    losses: list[Tensor] = field(default_factory=list)
    updates: list[dict[str, Tensor]] = field(default_factory=list)

    def updated(self, model: nn.Module) -> None:
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        self.updates.append({name: t.clone() for name, t in inner.state_dict().items()})

    def __add__(self, later: Run) -> Run:
        return Run(self.losses + later.losses, self.updates + later.updates)


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def regression(windows: int, k: int, *, seed: int = 0, batch: int = 4) -> list[Window]:
    """Random data for an MLP; another seed for each rank."""
    source = torch.Generator().manual_seed(seed)
    return [
        [
            (torch.randn(batch, 8, generator=source), torch.randn(batch, 1, generator=source))
            for _ in range(k)
        ]
        for _ in range(windows)
    ]


def images(windows: int, k: int, *, seed: int = 3) -> list[Window]:
    """Random images and classes for a `Convnet`; another seed for each rank."""
    source = torch.Generator().manual_seed(seed)
    return [
        [
            (torch.randn(4, 1, 8, 8, generator=source), torch.randint(10, (4,), generator=source))
            for _ in range(k)
        ]
        for _ in range(windows)
    ]


def classification(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def accumulation(
    model: nn.Module,
    optimizer: Optimizer,
    windows: Sequence[Window],
    loss_of: LossOf = mse,
    *,
    before: Hook | None = None,
    after: Hook | None = None,
    quiet: bool = True,
) -> Run:
    """The loop that everybody writes: loss / k, backward, and after k of them one update.

    before, after: called around the update, for clipping and schedulers. Under DDP, `no_sync` around forward and
    backward of every micro-step but a window's last, unless not `quiet`.
    """
    run = Run()
    for window in windows:
        for i, batch in enumerate(window):
            last = i + 1 == len(window)
            alone = isinstance(model, DistributedDataParallel) and not last and quiet
            with model.no_sync() if alone else nullcontext():  # type: ignore[operator]
                loss = loss_of(model, *batch)
                (loss / len(window)).backward()
            run.losses.append(loss.detach())
        if before is not None:
            before()
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after()
        run.updated(model)
    return run


def joined(
    model: nn.Module,
    optimizer: Optimizer,
    ranks: Sequence[Sequence[Window]],
    loss_of: LossOf = mse,
) -> Run:
    """One process, no accumulation: the windows of all ranks joined to one batch for each update."""
    run = Run()
    for together in zip(*ranks, strict=True):
        batches = [batch for window in together for batch in window]
        parts = [torch.cat(tensors) for tensors in zip(*batches, strict=True)]
        loss = loss_of(model, *parts)
        loss.backward()
        run.losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        run.updated(model)
    return run


def twins(model: nn.Module, count: int = 2) -> list[nn.Module]:
    """The model and copies of it."""
    return [model, *(copy.deepcopy(model) for _ in range(count - 1))]


def assert_same(ours: Run, theirs: Run, *, atol: float) -> None:
    """Tensors after every update agree within `atol`, and losses within `atol` and 1e-5 of their size."""
    assert len(ours.losses) == len(theirs.losses)
    for i, (mine, other) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
        say = f"loss {i}: {{}}".format
        torch.testing.assert_close(mine, other, atol=atol, rtol=1e-5, msg=say)
    assert_same_tensors(ours, theirs, atol=atol)


def assert_same_tensors(ours: Run, theirs: Run, *, atol: float) -> None:
    """`assert_same` without the losses."""
    assert len(ours.updates) == len(theirs.updates)
    for i, (mine, other) in enumerate(zip(ours.updates, theirs.updates, strict=True)):
        assert mine.keys() == other.keys()
        for name, tensor in mine.items():
            say = f"{name} after update {i}: {{}}".format
            torch.testing.assert_close(tensor, other[name], atol=atol, rtol=0, msg=say)


def assert_bitwise(first: Run, second: Run) -> None:
    """Tensors are equal after every update, to the last bit."""
    assert len(first.updates) == len(second.updates) > 0
    for i, (mine, other) in enumerate(zip(first.updates, second.updates, strict=True)):
        for name, tensor in mine.items():
            assert torch.equal(tensor, other[name]), f"{name} after update {i}"


def assert_same_parameters(ours: nn.Module, theirs: nn.Module, *, atol: float = 1e-6) -> None:
    """For a step that `drive` cannot call: parameters agree within `atol` at the end of the run."""
    names = [name for name, _ in ours.named_parameters()]
    for name, mine, other in zip(names, ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=atol, rtol=0, msg=f"{name}: {{}}".format)
