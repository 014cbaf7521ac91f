"""A mean over all tokens of a window and all ranks, though each micro-batch has another number of them.

The micro-batches are docstrings of Python's standard library as bytes, padded to one length: a
mean over each of them counts a byte of a short one for more. Alone, or on two ranks:

    python examples/token_weighted.py
    torchrun --nproc-per-node 2 examples/token_weighted.py
"""

import copy

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import gradsync_fx
from launch import command_line, moved, ranks, replicated
from stdlib_text import docstrings
from tiny_gpt import GPT


WINDOW = 4  # micro-steps
BATCH = 1  # docstrings in a micro-step
LENGTH = 128  # bytes that a docstring is cut or padded to


def update(model, optimizer, ids, mask):
    """Any step with a mean over the bytes that are there; returns the norm of what it updates with."""
    losses = F.cross_entropy(
        model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    counted = mask[:, 1:].flatten()  # a byte is predicted from those before it
    ((losses * counted).sum() / counted.sum()).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def train_step(model, optimizer, ids, mask):
    gradsync_fx.micro_batch_weight(mask[:, 1:].sum())  # the only line that weighting takes
    return update(model, optimizer, ids, mask)


def padded(texts: list[str]) -> tuple[Tensor, Tensor]:
    """Bytes, and 1.0 where there is one; every text has two at least."""
    pieces = [text.encode()[:LENGTH] for text in texts]
    rows = [list(piece.ljust(LENGTH, b"\0")) for piece in pieces]
    sizes = torch.tensor([[len(piece)] for piece in pieces])
    return torch.tensor(rows), (torch.arange(LENGTH) < sizes).float()


def apart(model: nn.Module, other: nn.Module) -> float:
    """The largest difference of two models' parameters."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def compare(console: Console, rank: int, world: int, windows: int, backend: str) -> None:
    texts = [text for text, _ in docstrings(["json", "email"]) if len(text) > 1]
    batches = [moved(padded(texts[i : i + BATCH])) for i in range(0, len(texts), BATCH)]
    torch.manual_seed(0)  # the same weights on every rank
    truth = moved(GPT(width=32, depth=1, length=LENGTH))
    nets = {name: copy.deepcopy(truth) for name in ("weighted", "mean")}
    models = {name: replicated(net) for name, net in nets.items()}
    optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.5) for name, net in nets.items()}
    eager = torch.optim.SGD(truth.parameters(), lr=0.5)
    shared = {"gradient_accumulation_steps": WINDOW, "backend": backend}
    steps = {
        "weighted": gradsync_fx.optimize(train_step, reduction="weighted", **shared),
        "mean": gradsync_fx.optimize(update, reduction="mean", **shared),
    }

    table = Table("window", "bytes of each micro-step", *steps, "one process, all bytes")
    table.title = "norm of the gradient that an update is made with"
    for n in range(windows):
        everyone = batches[n * WINDOW * world : (n + 1) * WINDOW * world]
        norms = {}
        for batch in everyone[rank::world]:
            for name, step in steps.items():
                norms[name] = step(models[name], optimizers[name], *batch)
        # Every rank does this for itself: one batch of all that the ranks' windows hold.
        wanted = update(truth, eager, *(torch.cat(parts) for parts in zip(*everyone, strict=True)))
        sizes = " ".join(f"{mask[:, 1:].sum():.0f}" for _, mask in everyone)
        norms = [f"{norm:.6f}" for norm in (*norms.values(), wanted)]
        table.add_row(str(n + 1), sizes, *norms)
    console.print(table)

    off = {name: apart(net, truth) for name, net in nets.items()}
    console.print(f"parameters after {windows} updates, largest difference from one process:")
    for name in nets:
        console.print(f'  reduction="{name}": {off[name]:.1e}')
    assert off["weighted"] < 1e-5, "not the mean over all bytes"
    assert off["mean"] > 1e-3, "the micro-batches are too alike to show anything"


def main() -> None:
    args = command_line(__doc__.splitlines()[0]).parse_args()
    with ranks() as (rank, world):
        console = Console(quiet=rank > 0, soft_wrap=True)
        compare(console, rank, world, 2 if args.quick else 8, args.backend)


if __name__ == "__main__":
    main()
