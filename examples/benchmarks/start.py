"""Where the seconds of a first call go: by stage, for models of some depths, with cold and with warm caches.

    python examples/benchmarks/start.py --layers 2,7,24,48 --ranks 1,2

Each start is a process of its own (one for each rank), timed from the first call to the end of the second window.
Stages are exclusive: what torch and gradsync_fx say they are doing, less what is done inside of that. They are the
first rank's seconds; where it waits for another one's compiler, that is what it does. A cold start has an empty folder
for Inductor's cache; the precompiled header of torch's C++ code, which Inductor keeps elsewhere, is there. `peer` is
torch.compile of DDP's model, with a fused optimizer and no_sync().
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from torch._dynamo import utils as dynamo_utils
from torch.nn.parallel import DistributedDataParallel

import gradsync_fx
from gradsync_fx import progress


sys.path.append(str(Path(__file__).resolve().parent.parent))  # the GPT of the other examples
from tiny_gpt import GPT  # known only from here on


K = 2
# What torch calls what it does, and how a table says it. What is not named here is `other`.
STAGES = {
    "tracing": (
        "dynamo", "entire_frame_compile", "compile_attempt_0", "bytecode_tracing", "build_guards", "gc",
        "insert_deferred_runtime_asserts", "_compile.compile_inner",
    ),
    "AOTAutograd": ("backend_compile", "create_aot_dispatcher_function", "aot_collect_metadata"),
    "own": ("own",),
    "Inductor's passes": (
        "_recursive_joint_graph_passes", "_recursive_post_grad_passes", "additional_fake_tensor_prop", "pass",
    ),
    "code": (
        "GraphLowering.run", "Scheduler.__init__", "Scheduler.fused_nodes", "Scheduler.codegen",
        "GraphLowering.codegen", "PythonWrapperCodegen.generate", "code_gen", "GraphLowering.codegen_subgraph",
    ),
    "C++ compiler": ("compile_file", "async_compile.wait"),
    "loading": (
        "PyCodeCache.load_by_key_path", "inductor_compile", "fx_codegen_and_compile", "TritonBundler.read_and_emit",
        "CacheBase.get_system.triton_key", "inductor_codecache_torch_key", "GraphLowering.compile_to_module",
    ),
}  # fmt: skip


class Stopwatch:
    """Exclusive seconds of nested stages."""

    def __init__(self):
        self.seconds, self._open = {}, []

    def start(self, name):
        self._open.append([name, time.perf_counter(), 0.0])

    def stop(self):
        name, begun, inside = self._open.pop()
        took = time.perf_counter() - begun
        self.seconds[name] = self.seconds.get(name, 0.0) + took - inside
        if self._open:
            self._open[-1][2] += took

    def listen(self):
        """To torch's events, and to the stages of gradsync_fx."""
        events = dynamo_utils.ChromiumEventLogger
        begin, end = events.log_event_start, events.log_event_end

        def started(logger, name, *args, **kwargs):
            self.start(name)
            return begin(logger, name, *args, **kwargs)

        def ended(logger, name, *args, **kwargs):
            self.stop()
            return end(logger, name, *args, **kwargs)

        events.log_event_start, events.log_event_end = started, ended
        plain = progress.stage

        @contextmanager
        def stage(doing):
            of = {"tracing": "tracing", "compiling kernels": "C++ compiler"}
            self.start(next((stage for said, stage in of.items() if doing.startswith(said)), "own"))
            try:
                with plain(doing):
                    yield
            finally:
                self.stop()

        for module in list(sys.modules.values()):
            if getattr(module, "stage", None) is plain:
                module.stage = stage

    def table(self):
        found = dict.fromkeys((*STAGES, "other"), 0.0)
        of = {name: stage for stage, names in STAGES.items() for name in (stage, *names)}
        for name, seconds in self.seconds.items():
            found[of.get(name) or of.get(name.split(".")[0], "other")] += seconds
        return found


def loss_of(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def ours(model, optimizer, without):
    def train_step(ids):
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return gradsync_fx.optimize(
        train_step, gradient_accumulation_steps=K, verbose=False, without=without
    )


def peer(model, optimizer):
    """What people write: the compiled model, and no_sync() by hand."""
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    compiled, calls = torch.compile(wrapped), 0

    def train_step(ids):
        nonlocal calls
        calls += 1
        last = calls % K == 0
        quiet = wrapped.no_sync() if dist.is_initialized() and not last else nullcontext()
        with quiet:
            (loss_of(compiled, ids) / K).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()

    return train_step


def child(args):
    """One rank of one start; prints its figures."""
    torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = GPT(width=args.width, depth=args.child, heads=6, length=64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=args.way == "peer")
    watch = Stopwatch()
    step = peer(model, optimizer) if args.way == "peer" else ours(model, optimizer, args.without)
    if args.way != "peer":
        importlib.import_module("gradsync_fx.runtime.executor")  # all that has stages with it
    watch.listen()
    data = [torch.randint(256, (2, 65)) for _ in range(2 * K)]
    begun, cpu = time.perf_counter(), time.process_time()
    for ids in data:
        step(ids)
    whole = time.perf_counter() - begun
    warm = []
    for ids in data * 3:
        start = time.perf_counter()
        step(ids)
        warm.append(time.perf_counter() - start)
    if world == 1 or dist.get_rank() == 0:
        calls = [sorted(warm[i::K])[len(warm) // (2 * K)] for i in range(K)]
        print("FIGURES", json.dumps({
            "seconds": whole, "process": time.process_time() - cpu, "stages": watch.table(), "calls": calls,
        }))  # fmt: skip
    if world > 1:
        dist.destroy_process_group()


def started(args, way, layers, ranks, folder, without=()):
    """One start of all ranks in fresh processes."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
    ] if ranks > 1 else [sys.executable]  # fmt: skip
    command += [__file__, "--child", str(layers), "--way", way, "--width", str(args.width)]
    command += ["--without", ",".join(without)] if without else []
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FIGURES ")]
    if not lines:
        raise SystemExit(f"{way}, {layers} layers, {ranks} ranks:\n{done.stderr[-3000:]}")
    return json.loads(lines[0].removeprefix("FIGURES "))


def table(rows):
    stages = (*STAGES, "other")
    lines = [
        ["way", "layers", "ranks", "caches", "seconds", *stages, "calls, ms"],
        ["---", "---:", "---:", "---", "---:", *["---:"] * len(stages), "---:"],
    ]
    for row in rows:
        calls = " / ".join(f"{1e3 * c:.0f}" for c in row["calls"])
        lines.append([
            row["way"], str(row["layers"]), str(row["ranks"]), row["caches"], f"{row['seconds']:.1f}",
            *(f"{row['stages'][s]:.1f}" for s in stages), calls,
        ])  # fmt: skip
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def numbers(text):
    return [int(n) for n in text.split(",")]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=numbers, default=[2, 7, 24, 48])
    parser.add_argument("--ranks", type=numbers, default=[1, 2])
    parser.add_argument(
        "--ways",
        default="gradsync,whole,peer",
        help="whole: without=('blocks',); peer: torch.compile",
    )
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"), help="folder")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument(
        "--without", type=lambda text: tuple(text.split(",")), default=(), help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    if args.child is not None:
        child(args)
        return 0
    console, rows = Console(soft_wrap=True), []
    for layers in args.layers:
        for ranks in args.ranks:
            for way in args.ways.split(","):
                without = ("blocks",) if way == "whole" else ()
                with tempfile.TemporaryDirectory() as folder:
                    for caches in ("cold", "warm"):
                        found = started(args, way, layers, ranks, folder, without)
                        rows.append(
                            {
                                "way": way,
                                "layers": layers,
                                "ranks": ranks,
                                "caches": caches,
                                **found,
                            }
                        )
                        console.print(
                            f"{way}, {layers} layers, {ranks} ranks, {caches}: {found['seconds']:.1f} s"
                        )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "start.md").write_text(table(rows))
    (args.out / "start.json").write_text(json.dumps(rows, indent=1) + "\n")
    console.print(table(rows), markup=False, highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
