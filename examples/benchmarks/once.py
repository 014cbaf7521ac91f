"""What computing once per window buys: calls with and without it, interleaved, in one process.

    python examples/benchmarks/once.py
    python examples/benchmarks/once.py --models weight_norm,fake --rows 8 --target cuda:sm_90

Each model is trained twice in turns, once as it is and once with without=("invariants",). Times are medians; a window
is the sum of its calls, opening and closing included.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import gradsync_fx


sys.path.append(str(Path(__file__).resolve().parent.parent))  # what the examples share
from tiny_gpt import GPT  # known only from here on


K = 8


class Merged(nn.Module):
    """A low-rank change of a frozen weight, merged into it."""

    def __init__(self, width, rank=8):
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, width) * 0.02)
        self.b = nn.Parameter(torch.zeros(width, rank))

    def forward(self, w):
        return w + 2.0 * self.b @ self.a


class Fake(nn.Module):
    """Fake quantisation of each row to 8 bits, by torch's op."""

    def forward(self, w):
        scale = w.detach().abs().amax(1) / 127
        zero = torch.zeros(w.shape[0], dtype=torch.int32)
        return torch.fake_quantize_per_channel_affine(w, scale, zero, 0, -128, 127)


class Straight(nn.Module):
    """The same by hand, with a gradient straight through."""

    def forward(self, w):
        scale = w.detach().abs().amax(1, keepdim=True) / 127
        return w + (torch.round(w / scale).clamp(-128, 127) * scale - w).detach()


def linear(kind, width):
    layer = nn.Linear(width, width)
    if kind == "weight_norm":
        return weight_norm(layer)
    if kind == "spectral_norm":
        return spectral_norm(layer).eval()
    if kind == "merged":
        layer.weight.requires_grad_(False)
    if kind != "plain":
        made = {"merged": lambda: Merged(width), "fake": Fake, "straight": Straight}[kind]()
        parametrize.register_parametrization(layer, "weight", made)
    return layer


def made(kind, width, rows, without):
    """An optimized step, and the batches of a window."""
    torch.manual_seed(0)
    if kind == "autocast_gpt":
        model = GPT(width=352, depth=2, length=512)
        data = [(torch.randint(0, 128, (1, rows)),) for _ in range(K)]
    else:
        model = nn.Sequential(
            linear(kind, width), nn.ReLU(), linear(kind, width), nn.ReLU(), nn.Linear(width, 10)
        )
        data = [(torch.randn(rows, width), torch.randint(0, 10, (rows,))) for _ in range(K)]
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)

    def train_step(x, y=None):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast_gpt"):
            out = model(x)
            target = x if y is None else y
            loss = F.cross_entropy(out.flatten(0, -2).float(), target.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = gradsync_fx.optimize(train_step, gradient_accumulation_steps=K, without=without)
    return step, data


def compared(kind, width, rows, windows):
    """Medians of both, in seconds, and what is held."""
    pairs = [made(kind, width, rows, without) for without in ((), ("invariants",))]
    for step, data in pairs:
        for batch in data * 2:
            step(*batch)
    accumulate, boundary, whole = ([[], []] for _ in range(3))
    for window in range(windows):
        for j in (0, 1) if window % 2 else (1, 0):
            step, data = pairs[j]
            took = []
            for batch in data:
                start = time.perf_counter()
                step(*batch)
                took.append(time.perf_counter() - start)
            accumulate[j] += took[1:-1]
            boundary[j].append(took[-1])
            whole[j].append(sum(took))
    report = pairs[0][0].report().once
    return {
        "model": kind,
        "rows": rows,
        **{
            f"{name}{of}": statistics.median(values[j])
            for name, values in (
                ("accumulate", accumulate),
                ("boundary", boundary),
                ("window", whole),
            )
            for j, of in ((0, ""), (1, "_without"))
        },
        "found": report.found,
        "held": len(report.held),
        "bytes": report.bytes,
    }


def on_target(kind, width, rows, target):
    """Launches and bytes of an accumulate call that are spared in the code for a card."""
    step, data = made(kind, width, rows, ())
    once = gradsync_fx.explain(
        step.__wrapped__, *data[0], gradient_accumulation_steps=K, target=target
    ).once
    return {"launches_saved": once.launches, "bytes_saved": once.moved}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    kinds = "plain,weight_norm,spectral_norm,merged,fake,straight,autocast_gpt"
    parser.add_argument("--models", default=kinds)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument(
        "--rows", default="8,64", help="of a micro-batch; tokens, for the GPT: 32,128,512"
    )
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument(
        "--target", help='such as "cuda:sm_90": saved launches and bytes there, too'
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = []
    for kind in args.models.split(","):
        sizes = "32,128,512" if kind == "autocast_gpt" and args.rows == "8,64" else args.rows
        for rows in map(int, sizes.split(",")):
            found.append(compared(kind, args.width, rows, args.windows))
            if args.target:
                found[-1] |= on_target(kind, args.width, rows, args.target)
    table = Table(box=None)
    for column in ("model", "rows", "accumulate ms", "without", "ratio", "boundary ms", "without",
                   "window ms", "without", "ratio", "held", "MiB"):  # fmt: skip
        table.add_column(column, justify="right")
    for f in found:
        ms = {k: f"{1e3 * v:.2f}" for k, v in f.items() if isinstance(v, float)}
        table.add_row(
            f["model"], str(f["rows"]), ms["accumulate"], ms["accumulate_without"],
            f"{f['accumulate'] / f['accumulate_without']:.2f}", ms["boundary"], ms["boundary_without"],
            ms["window"], ms["window_without"], f"{f['window'] / f['window_without']:.2f}",
            str(f["held"]), f"{f['bytes'] / 2**20:.1f}",
        )  # fmt: skip
    Console(width=130).print(table)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "once.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
