"""What the ways to synchronise gradients cost, on this machine, in one run: a table, the figures as JSON, a picture.

    python examples/benchmarks/gradient_sync_table.py --quick
    python examples/benchmarks/gradient_sync_table.py --workloads gpt --placements loopback,1gbit

The ways are alive in the same processes and take turns, window by window. Then each runs by itself, with cold and with
warm caches, for its start-up time and memory. The 1 Gbit link needs root: it is made of network namespaces.
"""

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import gradsync_fx
import memory
from job import RanksFailed, run
from measure import Task
from placement import PLACEMENTS, Place, Unavailable
from plot import draw
from results import Comparison, alone_figures, compare
from tables import markdown
from ways import USUAL_WAYS, WAYS
from workloads import WORKLOADS


# Of the quick form: what runs eagerly, and ours.
QUICK_WAYS = [way for way in USUAL_WAYS if not way.startswith("ddp-") or way == "ddp-fused"]
for slow in [way for way in QUICK_WAYS if way.startswith("gradsync-")]:
    QUICK_WAYS.remove(slow)  # half a minute more to compile, each
ALONE_WINDOWS = 2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a small model, few windows, no starts alone"
    )
    parser.add_argument("--workloads", type=_among(WORKLOADS), help="default: gpt,bert,resnet")
    parser.add_argument(
        "--ways", type=_among(WAYS), help=f"of {', '.join(WAYS)} (default: all but 'without')"
    )
    parser.add_argument(
        "--placements", type=_among(PLACEMENTS), help="default: all that this machine has"
    )
    parser.add_argument(
        "--windows", type=_positive, help="measured, of each way (default: 20; quick: 4)"
    )
    parser.add_argument(
        "--in-a-row",
        type=_positive,
        default=1,
        help="windows in a turn of a way (default: 1); shows what a way hides under the next window",
    )
    parser.add_argument(
        "--k", type=_positive, default=4, help="micro-steps in a window (default: 4)"
    )
    parser.add_argument(
        "--backend", default="inductor", help="of everything compiled (default: inductor)"
    )
    parser.add_argument(
        "--alone", action=argparse.BooleanOptionalAction, help="also start each way by itself"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"), help="folder")
    args = parser.parse_args()
    args.workloads = args.workloads or (["gpt"] if args.quick else ["gpt", "bert", "resnet"])
    args.ways = args.ways or (QUICK_WAYS if args.quick else USUAL_WAYS)
    args.placements = args.placements or list(PLACEMENTS)
    args.windows = args.windows or (4 if args.quick else 20)
    if args.windows % args.in_a_row:
        parser.error(f"{args.windows} windows do not divide into turns of {args.in_a_row}")
    args.alone = not args.quick if args.alone is None else args.alone
    return args


def _among(known: dict[str, Any]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return [name for name in known if name in found]

    return names


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


class Bench:
    """All runs of one call of the script."""

    def __init__(self, args: argparse.Namespace, progress: Progress) -> None:
        self._args, self._progress = args, progress
        self._bar = progress.add_task("")
        self._alone_of: dict[str, dict[str, Any]] = {}
        self._caches = tempfile.TemporaryDirectory(prefix="gradsync-bench-cache-")

    def compared(self, workload: str, place: Place) -> Comparison:
        args = self._args
        # Once for each workload: start-up and memory do not depend on the link.
        if args.alone and workload not in self._alone_of:
            self._alone_of[workload] = {w: self._alone(workload, w, place) for w in args.ways}
        steps = len(args.ways) * (args.windows + 2)
        caches = str(Path(self._caches.name, "shared"))
        found = self._run(self._task(workload, args.ways, place), place, steps, caches, {})
        return compare(found, place.title, args.k, self._alone_of.get(workload, {}), place.rate)

    def _alone(self, workload: str, way: str, place: Place) -> dict[str, Any]:
        """Twice: the first start fills the caches that the second one finds."""
        task = self._task(workload, [way], place, alone=True)
        with tempfile.TemporaryDirectory(dir=self._caches.name) as caches:
            cold, warm = (
                self._run(task, place, ALONE_WINDOWS + 2, caches, memory.ENVIRONMENT)
                for _ in range(2)
            )
        return alone_figures(cold, warm, way, self._args.k)

    def _task(self, workload: str, ways: list[str], place: Place, *, alone: bool = False) -> Task:
        args = self._args
        return Task(
            workload=workload,
            ways=ways,
            windows=ALONE_WINDOWS if alone else args.windows,
            k=args.k,
            backend=args.backend,
            quick=args.quick,
            place=asdict(place),
            store="",
            alone=alone,
            in_a_row=1 if alone else args.in_a_row,
        )

    def _run(
        self, task: Task, place: Place, steps: int, caches: str, environment: dict[str, str]
    ) -> list[dict[str, Any]]:
        what = f"{task.workload}, {place.title}{', alone' if task.alone else ''}"
        self._progress.reset(self._bar, total=steps, description=what)

        def tell(text: str) -> None:
            self._progress.update(self._bar, advance=1, description=f"{what}: {text}")

        return run(task, place, tell, {"TORCHINDUCTOR_CACHE_DIR": caches, **environment})


def measured(args: argparse.Namespace, console: Console) -> list[Comparison]:
    """Every placement that this machine has, and every workload on it."""
    comparisons = []
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with ExitStack() as stack:
        bench = Bench(args, stack.enter_context(Progress(*columns, console=console)))
        for name in args.placements:
            try:
                with PLACEMENTS[name]() as place:
                    comparisons += [bench.compared(workload, place) for workload in args.workloads]
            except Unavailable as reason:
                console.print(f"no placement {name}: {reason}", style="yellow")
    return comparisons


def machine(args: argparse.Namespace) -> dict[str, str]:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in _lines(Path("/proc/cpuinfo"))
            if line.startswith("model name")
        ),
        platform.processor() or platform.machine(),
    )
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {model}" + "".join(f", {g}" for g in gpus),
        "versions": f"torch {torch.__version__}, gradsync_fx {gradsync_fx.__version__}, "
        f"Python {platform.python_version()}",
        "command": "gradient_sync_table.py " + " ".join(sys.argv[1:]),
        "threads": "one for each rank",
        "compiled with": args.backend,
    }


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def main() -> int:
    # As Ctrl-C: whatever was started and made has to go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args, console = arguments(), Console(soft_wrap=True)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        comparisons = measured(args, console)
    except RanksFailed as failure:
        console.print(str(failure), style="red", markup=False)
        return 1
    if not comparisons:
        console.print("nothing was measured")
        return 1
    about = machine(args)
    text = markdown(comparisons, about)
    (args.out / "table.md").write_text(text)
    figures = {"machine": about, "comparisons": [asdict(c) for c in comparisons]}
    (args.out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    draw(comparisons, [args.out / "plot.svg", args.out / "plot.png"])
    console.print(text, markup=False, highlight=False)
    return 0 if all(c.all_equal for c in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main())
