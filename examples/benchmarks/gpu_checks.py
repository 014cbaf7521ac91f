"""The checks of gpu_check.py: each runs in a process of its own, and tells what it finds line by line."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils import collect_env

import gradsync_fx
from gpu_shares import check_hidden, check_shares, check_votes, differs_from_rank_0
from twins import WINDOW, Case, accumulated, eager, start_of
from verdicts import Check, Line, at_most, distance, equal, near


PLANNING = Path(__file__).with_name("gpu_check.py")
BACKEND = "GRADSYNC_CHECK_BACKEND"  # what ranks are to talk over, in their environment
CPU = torch.device("cpu")
GRAPHS = "reduce-overhead"
MLP, GPT = Case("tiny", clip=True), Case("gpt", clip=True)
TARGETS = {(8, 0): "cuda:sm_80", (9, 0): "cuda:sm_90", (10, 0): "cuda:sm_100"}


def card() -> torch.device:
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def check_machine() -> Iterator[Line]:
    """What all figures are of."""
    found = torch.cuda.get_device_properties(card())
    yield Line(
        found.name,
        None,
        {
            "capability": f"{found.major}.{found.minor}",
            "memory in GiB": found.total_memory / 2**30,
            "cards": torch.cuda.device_count(),
            "driver": collect_env.get_nvidia_driver_version(collect_env.run),
            "torch": torch.__version__,
            "CUDA": torch.version.cuda,
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            "gradsync_fx": gradsync_fx.__version__,
        },
    )


def compared(device: torch.device, **options: Any) -> Iterator[Line]:
    """Accumulate, boundary and tail on a device, beside an eager loop on the CPU."""
    for case in (
        MLP,
        Case("tiny", clip=True, weights=True),
        Case("tiny", skips=True),
        Case("tiny", clip=True, weights=True, skips=True),
        GPT,
        Case("gpt", weights=True, skips=True),
    ):
        found, wanted = accumulated(case, device, **options), eager(case, CPU)
        yield at_most(str(case), distance(found, wanted, start_of(case)), 1e-2)


def check_values() -> Iterator[Line]:
    yield from compared(card())


def check_bf16() -> Iterator[Line]:
    """Autocast, beside an eager loop with the same on the card."""
    case = Case("gpt", clip=True, bf16=True)
    off = distance(accumulated(case, card()), eager(case, card()), start_of(case))
    yield at_most(str(case), off, 0.1)


def check_host() -> Iterator[Line]:
    """Warm calls in which torch raises where the host waits for the card."""
    for mode in (None, GRAPHS):
        for case in (MLP, Case("gpt", clip=True, weights=True), Case("gpt", skips=True)):
            what = f"{case}, mode={mode}"
            model, optimizer, scheduler = case.parts(card())
            step = gradsync_fx.optimize(case.step(), **case.options, mode=mode)
            calls = case.calls(card(), 6 * WINDOW)
            waited = ""
            for i, call in enumerate(calls):
                warm = i >= 4 * WINDOW  # compiled, and recorded
                torch.cuda.set_sync_debug_mode("error" if warm else "default")
                try:
                    step(model, optimizer, *call)
                except RuntimeError as error:
                    waited = f"call {i}: {str(error).splitlines()[0]}"
                    break
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                if step.sync_gradients:
                    scheduler.step()
            yield Line(f"{what}: {waited or 'no wait'}", not waited)
            step.discard()


def check_recordings() -> Iterator[Line]:
    """CUDA graphs under a scheduler, with clipping and bias corrections: replayed with the numbers of each call."""
    count = 8 * WINDOW
    for case in (MLP, GPT):
        seen: Counter[str] = Counter()
        with _counted(seen, "capture_begin"), _counted(seen, "replay"):
            model, optimizer, scheduler = case.parts(card())
            step = gradsync_fx.optimize(case.step(), **case.options, mode=GRAPHS)
            for i, call in enumerate(case.calls(card(), count)):
                if i == count - 2 * WINDOW:
                    warm = Counter(seen)
                step(model, optimizer, *call)
                if step.sync_gradients:
                    scheduler.step()
        late = seen - warm
        found = [p.detach().clone() for p in model.parameters()]
        off = distance(found, eager(case, card(), count), start_of(case))
        yield at_most(f"{case}, parameters", off, 1e-2)
        yield Line(
            f"{case}, recorded", warm["capture_begin"] > 0, {"recordings": warm["capture_begin"]}
        )
        replays = late["replay"]
        yield equal(f"{case}, recorded anew when warm", late["capture_begin"], 0)
        yield Line(
            f"{case}, replayed in warm calls",
            replays >= 2 * WINDOW,
            {"replays": replays, "calls": 2 * WINDOW},
        )


def _counted(seen: Counter[str], name: str) -> Any:
    """Counts calls of a method of torch's CUDA graphs."""
    plain = getattr(torch.cuda.CUDAGraph, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        seen[name] += 1
        return plain(*args, **kwargs)

    return mock.patch.object(torch.cuda.CUDAGraph, name, counting)


def planned(target: str) -> None:
    """In a process that sees no card: kernels of each program as they are made for it, as JSON on stdout."""
    found = {}
    for case in (MLP, GPT):
        model, optimizer, _ = case.parts(CPU)
        call = case.calls(CPU, 1)[0]
        report = gradsync_fx.explain(
            case.step(), model, optimizer, *call, target=target, world_size=1, **case.options
        )
        found[str(case)] = {
            program.name: {
                kind: sum(k.launches for k in program.kernels if k.kind == kind)
                for kind in ("triton", "library")
            }
            for program in report.code.programs
        }
    sys.stdout.write(json.dumps(found))


def check_launches() -> Iterator[Line]:
    """Triton's kernels are as many as in the code that is made without a card; a library's call may be several."""
    capability = torch.cuda.get_device_capability(card())
    if capability not in TARGETS:
        yield Line(f"no target has the capability {capability}: launches are not compared", None)
        return
    command = [sys.executable, str(PLANNING), "--planned", TARGETS[capability]]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    made = subprocess.run(command, env=hidden, capture_output=True, text=True, check=False)
    if made.returncode:
        raise RuntimeError(f"the code cannot be made without the card: {made.stderr[-600:]}")
    wanted = json.loads(made.stdout.splitlines()[-1])
    for case in (MLP, GPT):
        model, optimizer, _ = case.parts(card())
        step = gradsync_fx.optimize(case.step(), **case.options)
        for i, call in enumerate(case.calls(card(), 3 * WINDOW)):
            watch = i >= 3 * WINDOW - 2  # the last two: one of each kind
            with profile(activities=[ProfilerActivity.CUDA]) if watch else nullcontext() as seen:
                step(model, optimizer, *call)
                torch.cuda.synchronize()
            if watch:
                program = "boundary" if step.sync_gradients else "accumulate"
                kinds = kinds_of(on_card(seen.events()))
                plan = wanted[str(case)][program]
                yield equal(f"{case}, {program}, Triton's kernels", kinds["triton"], plan["triton"])
                library = kinds["library"]
                yield Line(
                    f"{case}, {program}, others",
                    library >= plan["library"],
                    {
                        "kernels": library,
                        "library calls": plan["library"],
                        "copies and fills": kinds["copy"],
                    },
                )


def on_card(events: Any) -> list[str]:
    """The names of what ran there; calls of the host and ranges that somebody named are no kernels."""
    kind = torch.autograd.DeviceType.CUDA
    return [e.name for e in events if e.device_type == kind and not e.is_user_annotation]


def kinds_of(events: list[str]) -> Counter[str]:
    """By their names: Triton's, copies and fills, and those of libraries."""
    found: Counter[str] = Counter()
    for name in events:
        if name.startswith("triton_"):
            found["triton"] += 1
        elif name.startswith(("Memcpy", "Memset")):
            found["copy"] += 1
        else:
            found["library"] += 1
    return found


def check_memory() -> Iterator[Line]:
    """The report's estimate beside what torch's allocator gave out in warm calls."""
    case = Case("gpt", clip=True, quick=False)
    torch.mm(*(torch.ones(64, 64, device=card()) for _ in range(2)))  # cuBLAS has its workspace now
    before = torch.cuda.memory_allocated()
    model, optimizer, _ = case.parts(card())
    step = gradsync_fx.optimize(case.step(), **case.options)
    peaks: dict[str, int] = {}
    for i in range(3 * WINDOW):
        call = case.calls(card(), 1)[0]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step(model, optimizer, *call)
        torch.cuda.synchronize()
        if i >= 2 * WINDOW:
            program = "boundary" if step.sync_gradients else "accumulate"
            peaks[program] = torch.cuda.max_memory_allocated() - before
        del call
    memory = step.report().memory
    held = sum(memory.held.values())
    estimates = {p.name: held + p.temporaries for p in memory.programs}
    mib = 2**20
    for name, peak in peaks.items():
        yield near(f"{case}, {name}, MiB at the peak", peak / mib, estimates[name] / mib, 0.1)


def check_times() -> Iterator[Line]:
    """Medians, in milliseconds, of calls that the host waits for."""
    case = Case("gpt", clip=True, quick=False)
    for mode in (None, GRAPHS):
        model, optimizer, _ = case.parts(card())
        step = gradsync_fx.optimize(case.step(), **case.options, mode=mode)
        times: dict[str, list[float]] = {"accumulate": [], "boundary": []}
        for i, call in enumerate(case.calls(card(), 30 * WINDOW)):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            step(model, optimizer, *call)
            torch.cuda.synchronize()
            if i >= 5 * WINDOW:
                name = "boundary" if step.sync_gradients else "accumulate"
                times[name].append(1e3 * (time.perf_counter() - begin))
        medians = {f"{name}, ms": statistics.median(taken) for name, taken in times.items()}
        yield Line(f"{case}, mode={mode}", None, medians)


@contextmanager
def joined() -> Iterator[str]:
    """In a process that torchrun started, one of several ranks; gives what they talk over."""
    backend = os.environ[BACKEND]
    torch.cuda.set_device(card())
    dist.init_process_group(backend)
    try:
        yield backend
    finally:
        dist.destroy_process_group()


def check_ranks() -> Iterator[Line]:
    """In each process that torchrun started: equal parameters bit for bit, near those of the eager loop."""
    with joined() as backend:
        rank, world = dist.get_rank(), dist.get_world_size()
        modes = (None, GRAPHS) if backend == "nccl" else (None,)
        for mode in modes:
            case, count = Case("gpt", clip=True, weights=True), 2 * WINDOW
            cut = {"mode": mode, "bucket_cap_mb": 1.0}
            found = accumulated(case, card(), count, rank, **cut)
            apart = sum(map(differs_from_rank_0, found))
            what = f"{case}, rank {rank} of {world} over {backend}, mode={mode}"
            yield equal(f"{what}, parameters that differ from rank 0's", apart, 0)
            off = distance(found, eager(case, card(), count, rank), start_of(case))
            yield at_most(what, off, 1e-2)


def of_ranks(check: Callable[[torch.device, str], Iterator[Line]]) -> Check:
    """A check that ranks make together, on a card."""

    def run() -> Iterator[Line]:
        with joined() as backend:
            yield from check(card(), backend)

    return run


CHECKS: dict[str, Check] = {
    "machine": check_machine,
    "values beside the CPU": check_values,
    "bf16 autocast": check_bf16,
    "the host never waits": check_host,
    "recordings": check_recordings,
    "launches": check_launches,
    "memory": check_memory,
    "times": check_times,
    "ranks": check_ranks,
    "shares": of_ranks(check_shares),
    "votes": of_ranks(check_votes),
    "hidden gathers": of_ranks(check_hidden),
}
# Those that several ranks make together.
OF_RANKS = ("ranks", "shares", "votes", "hidden gathers")
