"""A plain training step of a byte-level GPT, whose ranks reduce once per window of four calls.

The text is the Python standard library's own source code. Alone, or on two ranks of this machine:

    python examples/train_text.py
    torchrun --nproc-per-node 2 examples/train_text.py
"""

import math
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Generator, Tensor

import gradsync_fx
from launch import command_line, moved, of_rank_0, ranks, replicated
from stdlib_text import divided
from tiny_gpt import GPT


WINDOW = 4  # micro-steps
BATCH = 4  # sequences in a micro-step


def train_step(model, optimizer, x, y):
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def batch(text: Tensor, count: int, length: int, places: Generator) -> tuple[Tensor, Tensor]:
    """Pieces of the text from random places, and the same pieces one byte further on."""
    starts = torch.randint(len(text) - length - 1, (count, 1), generator=places)
    pieces = text[starts + torch.arange(length + 1)].long()
    return moved((pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()))


@torch.no_grad()
def validate(gpt: GPT, held_out: Tensor, length: int) -> float:
    """Mean loss per byte over pieces that are the same at every call."""
    x, y = batch(held_out, 128, length, Generator().manual_seed(0))
    return F.cross_entropy(gpt(x).flatten(0, 1), y.flatten()).item()


def table(report) -> Table:
    made = Table("per rank and window", "before the rewrite", "after")
    before, after = report.collectives_before, report.collectives_after
    made.add_row("gradient all-reduces", f"{before:,}", f"{after:,}")
    made.add_row("gradient bytes", f"{report.bytes_before:,}", f"{report.bytes_after:,}")
    return made


def train(console: Console, rank: int, world: int, seconds: float, backend: str, shape) -> None:
    torch.manual_seed(0)  # the same weights on every rank
    gpt = GPT(**shape)
    model, length = replicated(gpt), shape["length"]
    training, held_out = (torch.frombuffer(text, dtype=torch.uint8) for text in divided())
    size = sum(p.numel() for p in gpt.parameters())
    console.print(f"{size:,} parameters; {len(training):,} bytes of text; ranks: {world}")
    start = validate(gpt, held_out, length)

    done = 0.0  # the part of the training time that is over
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=2e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min((n + 1) / 20, 1) * (0.55 + 0.45 * math.cos(math.pi * done))
    )
    step = gradsync_fx.optimize(train_step, gradient_accumulation_steps=WINDOW, backend=backend)
    places = Generator().manual_seed(1 + rank)  # each rank reads elsewhere

    def window() -> float:
        total = 0.0
        for _ in range(WINDOW):
            total += step(model, optimizer, *batch(training, BATCH, length, places)).item()
            if step.sync_gradients:
                scheduler.step()
        return total / WINDOW

    console.print(f"Tracing the step and compiling its programs ({backend}), once ...")
    begin = time.monotonic()
    with console.status("compiling"):
        window()
    seconds = max(seconds - (time.monotonic() - begin), seconds / 4)  # what is left to train in
    console.print(f"{step.compile_count} programs; now training for {seconds:.0f} s")

    columns = BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        bar, begin = progress.add_task("", total=1.0), time.monotonic()
        while done < 1:
            loss = window()
            spent = time.monotonic() - begin
            speed = (step.micro_step - WINDOW) * BATCH * length * world / spent
            done = min(of_rank_0(spent / seconds), 1)
            said = f"loss {loss:.3f}  {speed:,.0f} tokens/s"
            progress.update(bar, completed=done, description=said)

    end = validate(gpt, held_out, length)
    console.print(f"{step.optimizer_step} updates; validation loss {start:.3f} -> {end:.3f}")
    console.print(table(step.report()))


def main() -> None:
    parser = command_line(__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, help="in all (default: 180; quick: 8)")
    args = parser.parse_args()
    shape = {"width": 32, "depth": 1, "length": 32} if args.quick else {"length": 128}
    seconds = args.seconds or (8 if args.quick else 180)
    with ranks() as (rank, world):
        train(Console(quiet=rank > 0), rank, world, seconds, args.backend, shape)


if __name__ == "__main__":
    main()
