"""What a window costs on 8 ranks, told before anything runs: nothing is trained or sent, nor the large GPT allocated.

python examples/inspect_step.py
gradsync-fx inspect examples/inspect_step.py:gpt -k 4 --world-size 8 --html report.html
gradsync-fx diff examples/inspect_step.py:gpt
"""

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import gradsync_fx
from tiny_gpt import GPT


RANKS = 8
WINDOW = 4  # micro-steps
BATCH = 4  # sequences in a micro-step


def train_step(model, optimizer, ids):
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def arguments(**size: int) -> tuple:
    """What a call of the step takes."""
    model = GPT(**size)
    ids = torch.randint(256, (BATCH, model.position.shape[0] + 1))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4), ids


def gpt() -> tuple:
    """FACTORY for the command line: the GPT that train_text.py trains."""
    return train_step, arguments()


def large_gpt() -> tuple:
    """The same, wider, with a billion parameters, on the meta device: shapes without memory."""
    with torch.device("meta"):
        return train_step, arguments(width=4096, depth=5, heads=32, length=1024)


def speed_up(report, console: Console) -> None:
    """The estimate for several k, as bars."""
    estimate = report.predicted
    table = Table(
        title=f"{estimate.hardware.name}, {report.world_size} ranks: speed-up over syncing every micro-step",
        title_justify="left",
        box=None,
    )
    table.add_column("k", justify="right")
    table.add_column()
    most = max(factor for _, factor in estimate.speedup)
    for k, factor in estimate.speedup:
        table.add_row(str(k), "█" * round(40 * factor / most) + f" {factor:.2f}x")
    console.print(table)


def main() -> None:
    console = Console(soft_wrap=True)
    window = {"gradient_accumulation_steps": WINDOW, "world_size": RANKS}
    step, args = gpt()
    console.print(str(gradsync_fx.explain(step, *args, **window)), highlight=False)

    step, args = large_gpt()
    report = gradsync_fx.explain(step, *args, **window, hardware="h100-400g")
    count = sum(parameter.numel() for parameter in args[0].parameters())
    console.print(
        f"\n{count / 1e9:.2f} billion parameters on the {args[2].device} device; per window and rank:\n"
        f"{report.bytes_before / 1e9:.1f} GB in {report.collectives_before} all-reduces before, "
        f"{report.bytes_after / 1e9:.1f} GB in {report.collectives_after} after\n"
    )
    speed_up(report, console)


if __name__ == "__main__":
    main()
