"""Correctness and timing on one CUDA device. Exits with 2, and says why, where there is none.

    python examples/benchmarks/gpu_check.py

One rank over NCCL; two ranks that share the device over gloo; CUDA graphs (`mode="reduce-overhead"`); bf16 autocast.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from rich.console import Console
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import gradsync_fx
from workloads import WORKLOADS, batches


NO_DEVICE = 2  # exit code
WINDOW, WINDOWS = 4, 4
GPT = WORKLOADS["gpt"](False)
Step = Callable[[Any], Tensor]


def device() -> torch.device:
    return torch.device("cuda", 0)


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT.build().to(device())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    loss = GPT.loss(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def autocast_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = GPT.loss(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def trained(step: Any = None, *, autocast: bool = False) -> tuple[list[float], list[Tensor]]:
    """Losses and parameters after the windows; without a step, of the eager loop that accumulates by hand.

    Several ranks: the eager loop averages its gradients over them itself.
    """
    model, optimizer = parts()
    rank = dist.get_rank() if dist.is_initialized() else 0
    losses = []
    for i, batch in enumerate(batches(GPT, rank, WINDOW * WINDOWS, device())):
        if step is not None:
            losses.append(step(model, optimizer, batch).item())
            continue
        with torch.autocast("cuda", dtype=torch.bfloat16) if autocast else nullcontext():
            loss = GPT.loss(model, batch)
        (loss / WINDOW).backward()
        losses.append(loss.item())
        if (i + 1) % WINDOW == 0:
            if dist.is_initialized():
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
    return losses, [p.detach().clone() for p in model.parameters()]


def apart(mine: list[Tensor], others: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(mine, others, strict=True))


def optimized(step: Callable[..., Tensor] = train_step, **options: Any) -> Any:
    return gradsync_fx.optimize(step, gradient_accumulation_steps=WINDOW, **options)


def within(found: float, limit: float, what: str) -> float:
    if not found <= limit:
        raise AssertionError(f"{what}: {found:.2e}, and at most {limit:.0e} was expected")
    return found


def check_nccl() -> dict[str, Any]:
    """One rank in an NCCL group, against the eager loop."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            (eager, wanted), (losses, found) = trained(), trained(optimized())
        finally:
            dist.destroy_process_group()
    off = max(abs(a - b) / b for a, b in zip(losses, eager, strict=True))
    return {
        "losses differ by": within(off, 2e-3, "losses"),
        "parameters differ by": within(apart(found, wanted), 2e-3, "parameters"),
    }


def check_gloo() -> dict[str, Any]:
    """Two ranks on the one device: equal parameters bit for bit, near the eager loop's; overlap in rank 0's trace."""
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(gloo_rank, (folder,), nprocs=2)
        return json.loads(Path(folder, "found").read_text())


def gloo_rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    _, wanted = trained()
    step = optimized(bucket_cap_mb=4.0)
    _, found = trained(step)
    for parameter in found:
        other = parameter.clone()
        dist.broadcast(other, 0)
        assert torch.equal(parameter, other), "the ranks' parameters differ"
    off = within(apart(found, wanted), 2e-3, "parameters")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        trained(step)
    if rank == 0:
        shown = {"parameters differ by": off, "all-reduce behind kernels": hidden_share(profiler)}
        Path(folder, "found").write_text(json.dumps(shown))
    dist.destroy_process_group()


def hidden_share(profiler: Any) -> float:
    """The part of the all-reduces' time in which a kernel ran on the device."""
    events = profiler.events()
    kernels = sorted(
        (e.time_range.start, e.time_range.end)
        for e in events
        if e.device_type == torch.autograd.DeviceType.CUDA
    )
    reduces = [e.time_range for e in events if e.name == "gloo:all_reduce"]
    covered, whole = 0.0, sum(r.end - r.start for r in reduces)
    for r in reduces:
        reached = r.start
        for start, end in kernels:
            start, end = max(start, reached), min(end, r.end)
            if end > start:
                covered, reached = covered + end - start, end
    return covered / whole if whole else 0.0


def check_graphs() -> dict[str, Any]:
    """CUDA graphs give what the same programs give without, bit for bit, and no output lies in an accumulator."""
    _, wanted = trained(optimized())
    captures = 0
    begin = torch.cuda.CUDAGraph.capture_begin

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal captures
        captures += 1
        begin(*args, **kwargs)

    with mock.patch.object(torch.cuda.CUDAGraph, "capture_begin", counted):
        step = optimized(mode="reduce-overhead")
        _, found = trained(step)
    within(apart(found, wanted), 0.0, "parameters with and without CUDA graphs")
    model, optimizer = parts()
    batch = batches(GPT, 0, 1, device())[0]
    loss = step(model, optimizer, batch)
    held = {g.untyped_storage().data_ptr() for g in step.gradients().values()}
    assert loss.untyped_storage().data_ptr() not in held, "the loss lies in an accumulator"
    step.discard()
    return {"graphs captured": captures, "programs": step.compile_count}


def check_autocast() -> dict[str, Any]:
    """bf16 autocast in the step, against the eager loop with the same."""
    eager, _ = trained(autocast=True)
    losses, _ = trained(optimized(autocast_step))
    off = max(abs(a - b) / b for a, b in zip(losses, eager, strict=True))
    return {"losses differ by": within(off, 2e-2, "losses")}


def timing() -> dict[str, Any]:
    """Milliseconds and kernels of the two kinds of calls, plain and with CUDA graphs."""
    found: dict[str, Any] = {}
    for mode in (None, "reduce-overhead"):
        model, optimizer = parts()
        step = optimized(mode=mode)
        data = batches(GPT, 0, 40 * WINDOW, device())
        times: dict[bool, list[float]] = {False: [], True: []}
        for i, batch in enumerate(data):
            torch.cuda.synchronize()
            start = time.perf_counter()
            step(model, optimizer, batch)
            torch.cuda.synchronize()
            if i >= 4 * WINDOW:  # compiled, and CUDA graphs captured
                times[step.sync_gradients].append(1e3 * (time.perf_counter() - start))
        kernels = {}
        for batch in data[:WINDOW]:
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                step(model, optimizer, batch)
                torch.cuda.synchronize()
            kernels[step.sync_gradients] = len(profiler.events())
        for closes, name in ((False, "accumulate"), (True, "boundary")):
            found[f"{mode or 'default'}, {name}, ms"] = statistics.median(times[closes])
            found[f"{mode or 'default'}, {name}, kernels and copies"] = kernels[closes]
    return found


CHECKS = {
    "NCCL, one rank": check_nccl,
    "gloo, two ranks on the device": check_gloo,
    "CUDA graphs": check_graphs,
    "bf16 autocast": check_autocast,
    "timing": timing,
}


def main() -> int:
    console = Console(soft_wrap=True)
    if not torch.cuda.is_available():
        console.print(f"no CUDA device is seen by torch {torch.__version__}: nothing to check here")
        return NO_DEVICE
    console.print(
        f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    )
    failed = 0
    for name, check in CHECKS.items():
        try:
            shown = check()
        except Exception as error:
            failed += 1
            console.print(f"{name}: FAILED, {type(error).__name__}: {error}", markup=False)
            continue
        for what, value in shown.items():
            text = f"{value:.3g}" if isinstance(value, float) else value
            console.print(f"{name}: {what} {text}", markup=False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
