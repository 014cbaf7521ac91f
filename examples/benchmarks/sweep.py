"""What people bring: optimizers and models, each tried beside eager PyTorch. Writes the table of docs/zoo.md.

Each row runs in a process of its own, with a time limit: two windows of two micro-steps, by `optimize` and by a loop of
plain PyTorch that sums the gradients itself; the largest difference of a parameter is noted. A row whose package is
not installed says so.

    python examples/benchmarks/sweep.py --write      # all rows, into docs/zoo.md
    python examples/benchmarks/sweep.py SGD Whisper  # some of them, to the terminal
"""

import argparse
import copy
import importlib.metadata
import multiprocessing
import platform
import queue
import random
import time
import warnings
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

import gradsync_fx
from zoo import ROWS


PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
K, WINDOWS, LIMIT = 2, 2, 300
PACKAGES = (
    *("transformers", "peft", "timm", "diffusers", "torchao"),
    *("schedulefree", "lion-pytorch", "prodigyopt", "pytorch-optimizer"),
)
HEAD = """\
# Optimizers and models people bring

`python examples/benchmarks/sweep.py --write` makes this page. Each row is two windows of two micro-steps, in a
process of its own, with the default backend, beside a loop of plain PyTorch that sums the gradients itself.
Difference: the largest one of a parameter (or of an average of the weights) after that. Seconds: the first two calls,
which trace and compile both programs; models are small, with random weights. "As it is": the update is not compiled
([which are](optimizers.md)). "Eagerly": refused, and run with `on_unsupported="eager"`. Adam's updates make much of
gradients that are zero but for rounding (a bias ahead of a softmax): such a parameter may differ by up to the rate.
SOAP's eigenvectors and Muon's bfloat16 products do likewise; both differ by 0 with `backend="aot_eager"`.

"""


def closure(loss_of, optimizer, batch):
    optimizer.zero_grad()
    loss = loss_of(*batch)
    loss.backward()
    return loss


def train_step(phases, batch):
    """One step of each phase: a model, or several in turn (a discriminator, a generator)."""
    for loss_of, optimizer, after in phases:
        if isinstance(optimizer, torch.optim.LBFGS):
            loss = optimizer.step(partial(closure, loss_of, optimizer, batch))
            continue
        loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        for _, each, _ in phases:
            each.zero_grad()
        after()
    return loss


def reference(phases, batches):
    """The same in plain PyTorch: gradients are summed by hand; each optimizer steps in a window's last micro-step."""
    sums = [{} for _ in phases]
    for i, batch in enumerate(batches):
        for (loss_of, optimizer, after), total in zip(phases, sums, strict=True):
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            found = torch.autograd.grad(loss_of(*batch), trained, allow_unused=True)
            for p, g in zip(trained, found, strict=True):
                if g is not None:
                    total[p] = total[p] + g if p in total else g
            if i % K == K - 1:
                for p in trained:
                    p.grad = total[p] / K if p in total else None
                optimizer.step()
                optimizer.zero_grad()
                total.clear()
                after()


def seeded() -> None:
    random.seed(0)
    torch.manual_seed(0)


def ours(make, net, batches, **options):
    """Runs the windows; seconds of the first two calls, and whether an update ran as it is."""
    phases = make(net)
    step = gradsync_fx.optimize(train_step, gradient_accumulation_steps=K, verbose=False, **options)
    seeded()
    start = time.perf_counter()
    for i, batch in enumerate(batches):
        step(phases, batch)
        if i == K - 1:
            seconds = time.perf_counter() - start
    return seconds, "as it is" in str(step.report())


def differences(one, other) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((p.detach().float() - q.detach().float()).abs().max().item() for p, q in pairs)


def tried(name: str) -> tuple[str, str, str]:
    """Outcome, seconds and difference of a row."""
    seeded()
    try:
        net, make, data = ROWS[name]()
    except ImportError as missing:
        return f"not installed: {missing.name}", "", ""
    batches = [data() for _ in range(K * WINDOWS)]
    start, plain = copy.deepcopy(net), copy.deepcopy(net)
    try:
        seconds, as_it_is = ours(make, net, batches)
        outcome = "works, update as it is" if as_it_is else "works"
    except gradsync_fx.GradSyncError as refusal:
        said = f"{refusal.culprit.rpartition('/')[2]}: {refusal.seen}".replace("|", "/")[:200]
        try:
            net = start
            seconds, _ = ours(make, net, batches, on_unsupported="eager")
            outcome = f"works eagerly; refused: {said}"
        except Exception:  # torch's own, too: the gradients of an eager step are dense
            return f"refused: {said}", "", ""
    phases = make(plain)
    seeded()
    reference(phases, batches)
    return outcome, f"{seconds:.1f}", f"{differences(net, plain):.1e}"


def answer(name: str, results) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        results.put(tried(name))
    except Exception as failure:  # a row that fails is a row of the table
        results.put(
            (f"fails: {type(failure).__name__}: {str(failure).splitlines()[0][:150]}", "", "")
        )


def row(name: str) -> str:
    """A row of the table, measured in another process."""
    context = multiprocessing.get_context("fork")  # torch is imported once
    results = context.Queue()
    process = context.Process(target=answer, args=(name, results))
    process.start()
    try:
        outcome, seconds, difference = results.get(timeout=LIMIT)
    except queue.Empty:
        outcome, seconds, difference = f"not done in {LIMIT} s", "", ""
    process.terminate()
    process.join()
    return f"| {name} | {outcome} | {seconds} | {difference} |"


def versions() -> str:
    found = [f"torch {torch.__version__}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"Python {platform.python_version()}, {', '.join(found)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW")
    parser.add_argument("--write", action="store_true", help="write docs/zoo.md")
    parser.add_argument(
        "--machine", default=platform.processor(), help="what the page says it ran on"
    )
    args = parser.parse_args()
    lines = ["| | outcome | seconds | difference |", "|---|---|---|---|"]
    for name in args.rows or ROWS:
        lines.append(row(name))
        Console(soft_wrap=True).print(lines[-1], markup=False)
        if args.write:
            where = f"{args.machine}; {versions()}. Other work ran beside it.\n"
            PAGE.write_text(HEAD + "\n".join(lines) + f"\n\nMeasured on {where}")


if __name__ == "__main__":
    main()
