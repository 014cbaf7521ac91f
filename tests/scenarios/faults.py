"""What ranks do to which a fault happens: two windows, saved before each call; and what they see of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

import gradsync_fx
from gradsync_fx.ir.ops import ALL_REDUCE
from tests.scripts import Two, plain
from tests.truth import Script, Slot


K, CALLS = 3, 6
COPY = torch.ops.aten.copy_.default


def script_of(rank: int) -> Script:
    return [Slot(seed=1 + i + 10 * rank) for i in range(CALLS)]


def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Two()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def asserting(model: torch.nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """`plain` for small inputs. It stands here because pytest rewrites the asserts of a test's own file."""
    loss = torch.nn.functional.mse_loss(model(x, "both"), y)
    assert loss < 1e3
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.5)  # Python raises here


def fail() -> None:
    raise OverflowError("in the program")


STRIKES = {f.__name__: f for f in (kill, interrupt, fail)}


@dataclass(frozen=True)
class Fault:
    """Where it strikes, whom, in which call, and how.

    where: "compiling", "tracing", "saving", or the place in a program: "start", "reduction" (before the first
    all-reduce), "writing" (between the first two writes).
    """

    where: str
    rank: int
    call: int
    how: str = "kill"

    def strike(self, *args: object) -> None:
        STRIKES[self.how]()


class Struck(Interpreter):
    """Runs a program node by node; `strike` comes before one node."""

    def __init__(self, module: GraphModule, where: str, strike: Callable[[], None]) -> None:
        super().__init__(module, garbage_collect_values=False)
        nodes = list(module.graph.nodes)
        writes = [n for n in nodes if n.target is COPY]
        reductions = [n for n in nodes if n.target is ALL_REDUCE]
        places = {"start": nodes[:1], "reduction": reductions[:1], "writing": writes[1:2]}
        self._at = next(iter(places.get(where, [])), None)
        self._strike = strike

    def run_node(self, n: Node) -> Any:
        if n is self._at:
            self._strike()
        return super().run_node(n)


class Backend:
    """Runs programs as they are, until a fault strikes in one of them, or while the boundary program is compiled."""

    def __init__(self, fault: Fault | None) -> None:
        self.fault, self.call, self._compiled = fault, 0, 0

    def __call__(self, module: GraphModule, inputs: list[Any]) -> Any:
        self._compiled += 1
        fault = self.fault
        if fault is None:
            return module
        if fault.where == "compiling" and self.call == fault.call:
            fault.strike()
        struck = Struck(module, fault.where, fault.strike)

        def run(*args: Any) -> Any:
            here = self.fault is not None and self.call == fault.call
            return (struck.run if here else module)(*args)

        return run


def saved_for_all(folder: str, world: int) -> int:
    """The newest call before which every rank has saved."""
    names = {path.name for path in Path(folder).glob("*.rank*")}
    whole = [i for i in range(CALLS) if all(f"{i}.rank{r}" in names for r in range(world))]
    return max(whole, default=0)


def train(
    rank: int, world: int, folder: str, fault: Fault | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Goes on from the newest files; saves before each call. How it ended, and what the window is like then."""
    mine = fault if fault is not None and fault.rank == rank else None
    backend: Any = Backend(mine) if options.get("backend") is None else options["backend"]
    model, optimizer = fresh()
    more = {name: value for name, value in options.items() if name not in ("backend", "slow")}
    step: Any = gradsync_fx.optimize(plain, gradient_accumulation_steps=K, backend=backend, **more)
    start = saved_for_all(folder, world)
    if start:
        states = step.load(f"{folder}/{start}.rank{rank}")
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])
    began = time.monotonic()
    try:
        for i, slot in enumerate(script_of(rank)):
            if i < step.micro_step:
                continue
            with struck_outside(mine, i + 1):
                step.save(
                    f"{folder}/{i}.rank{rank}",
                    model=model.state_dict(),
                    optimizer=optimizer.state_dict(),
                )
                if isinstance(backend, Backend):
                    backend.call = i + 1
                if options.get("slow") == rank and (i + 1) % K == 0:
                    time.sleep(2.0)
                began = time.monotonic()
                step(model, optimizer, *slot.batch(), slot.branch)
    except BaseException as error:
        ended = time.monotonic() - began
        return {
            **told(error), "seconds": ended, "pending": step.pending,
            "save": refusal(step.state_dict), "skip": refusal(step.skip),
            "discard": refusal(step.discard), "parameters": parameters(model),
        }  # fmt: skip
    return {"type": "", "parameters": parameters(model), "steps": step.optimizer_step}


def struck_outside(fault: Fault | None, call: int) -> Any:
    """A block in which the fault strikes where no program runs."""
    if fault is None or fault.call != call or fault.where not in ("saving", "tracing"):
        return nullcontext()
    place = {
        "saving": "gradsync_fx.runtime.atomic_files.os.fsync",
        "tracing": "gradsync_fx.capture.tracer._capture",
    }
    return mock.patch(place[fault.where], side_effect=fault.strike)


def parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items()}


def told(error: BaseException) -> dict[str, str]:
    return {"type": type(error).__name__, "text": str(error), "cause": repr(error.__cause__)}


def refusal(call: Callable[[], object]) -> str:
    """The type and text of the error; empty where there is none."""
    try:
        call()
    except gradsync_fx.GradSyncError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def interrupted_in_the_meeting(rank: int, folder: str) -> dict[str, Any]:
    """Rank 0 waits at the boundary for rank 1, which is late, and is interrupted; it saves, and leaves."""
    model, optimizer = fresh()
    step: Any = gradsync_fx.optimize(plain, gradient_accumulation_steps=K, backend="aot_eager")
    for slot in script_of(rank)[: K - 1]:
        step(model, optimizer, *slot.batch(), slot.branch)
    if rank == 0:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        time.sleep(4.0)
    last = script_of(rank)[K - 1]
    began = time.monotonic()
    found = {"type": ""}
    try:
        step(model, optimizer, *last.batch(), last.branch)
    except BaseException as error:
        found = told(error)
    seconds = time.monotonic() - began
    step.save(
        f"{folder}/{step.micro_step}.rank{rank}",
        model=model.state_dict(),
        optimizer=optimizer.state_dict(),
    )
    return {**found, "seconds": seconds, "skip": refusal(step.skip), "leaves": True}


def raises(rank: int) -> dict[str, Any]:
    """Rank 1 gets a batch that does not fit in its fifth call, catches the error, and goes on."""
    model, optimizer = fresh()
    step: Any = gradsync_fx.optimize(plain, gradient_accumulation_steps=K, backend="aot_eager")
    seen = []
    for i, slot in enumerate(script_of(rank)):
        if rank == 1 and i in (4, 5):  # in an accumulate call, and in a boundary
            try:
                step(model, optimizer, torch.ones(4, 5), torch.ones(4, 1), "both")
            except RuntimeError as error:  # torch's own, of the shapes
                seen.append(str(error))
        step(model, optimizer, *slot.batch(), slot.branch)
    return {"seen": seen, "parameters": parameters(model)}


def raises_eagerly(rank: int) -> dict[str, Any]:
    """The step runs eagerly, and raises on rank 1 in a boundary."""

    def whole(model: Any, optimizer: Any, x: Tensor, y: Tensor, bad: bool) -> None:
        torch.nn.functional.mse_loss(model(x, "both"), y).backward()
        if bad:
            raise OverflowError
        if x.sum().item() > 1e9:
            raise ZeroDivisionError
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = fresh()
    step: Any = gradsync_fx.optimize(
        whole, gradient_accumulation_steps=2, on_unsupported="eager", rank_timeout=2.0
    )
    found: dict[str, Any] = {"type": ""}
    first, second = script_of(rank)[:2]
    assert first is not None
    assert second is not None
    step(model, optimizer, *first.batch(), False)
    try:
        step(model, optimizer, *second.batch(), rank == 1)
    except Exception as error:
        found = told(error)
    return {**found, "again": refusal(lambda: step(model, optimizer, *second.batch(), False))}


def differ(rank: int, which: str) -> dict[str, Any]:
    """Rank 1 has another model or another option. Both call twice."""
    torch.manual_seed(0)
    model, (_, optimizer) = Two(), fresh()
    options: dict[str, Any] = {}
    if rank == 1:
        if which == "number":
            model.more = torch.nn.Linear(2, 2)
        elif which == "shape":
            model.idle = torch.nn.Linear(2, 3)
        elif which == "buffers":
            model.register_buffer("seen", torch.zeros(3))
        elif which == "reduction":
            options["reduction"] = "sum"
        elif which == "windows":
            options["skip_nonfinite"] = True
        else:
            options[which] = 1.0 if which == "bucket_cap_mb" else torch.bfloat16
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step: Any = gradsync_fx.optimize(
        plain, gradient_accumulation_steps=1, backend="aot_eager", **options
    )
    (slot, *_) = script_of(rank)
    before = parameters(model)
    errors = [refusal(lambda: step(model, optimizer, *slot.batch(), slot.branch)) for _ in range(2)]
    moved = not all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    return {"errors": errors, "moved": moved, "pending": step.pending}


def hangs(rank: int, absent: int, timeout: float | None, how: str) -> dict[str, Any]:
    """Of three ranks one stops calling, but lives: it hangs elsewhere, or comes too late. The others ask by name."""
    model, optimizer = fresh()
    run = gradsync_fx.optimize(
        plain, gradient_accumulation_steps=2, backend="aot_eager", rank_timeout=timeout
    )
    try:
        for call in range(4):
            if call == 3 and rank == absent:
                if how == "hangs":
                    return {"type": "", "text": ""}
                time.sleep(4 * (timeout or 1))
            slot = Slot(seed=call + 10 * rank)
            run(model, optimizer, *slot.batch(), "both")
    except gradsync_fx.GradSyncError as error:
        return {"type": type(error).__name__, "text": str(error)}
    return {"type": "", "text": "none"}
