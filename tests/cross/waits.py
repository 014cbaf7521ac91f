"""The runtime itself in warm calls, over fake CUDA tensors: whatever would make the host wait for the device raises.

watch(name, fault) -> how many warm calls ran, how many of them updated, and how many copies were made

It raises what was waited for.

Programs are lowered for the device, and give fake results. On a real device torch.cuda.set_sync_debug_mode("error")
does what `Watch` does here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

from tests.cross.cases import Case


CASES = {
    "plain": Case("mlp", clip=True, ranks=1),
    "weighed": Case("mlp", weights=True, skip_nonfinite=True, ranks=1),
    "a k for each": Case("mlp", k_each=True, ranks=1),
    "adafactor": Case("mlp", optimizer="adafactor", ranks=1),
    "muon": Case("mlp", optimizer="muon", ranks=1),
}
COLD, WARM = 16, 8  # Adafactor is traced for its first updates one by one


def watched(watch: Any, inner: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with watch:
            return inner(*args)

    return run


def watch(name: str, fault: str = "") -> tuple[int, int, int]:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    from gradsync_fx.comm import host_copy
    from gradsync_fx.ir.program import output_values
    from gradsync_fx.lowering import number_vector
    from gradsync_fx.lowering.number_vector import NumberVector, with_vector
    from gradsync_fx.lowering.target.absent import absent
    from gradsync_fx.lowering.target.cards import find_card
    from gradsync_fx.optimized_step import OptimizedStep
    from gradsync_fx.options import Options
    from gradsync_fx.passes import FOR_INDUCTOR, rewrite
    from gradsync_fx.runtime import program_cache
    from gradsync_fx.runtime.accumulators import Accumulators
    from gradsync_fx.runtime.captured_facts import CapturedFacts
    from gradsync_fx.runtime.captured_window import MicroStep
    from gradsync_fx.runtime.executor import Executor
    from tests.cross.steps import optimizers, parts, step_of, window_of

    aten, case, mode = torch.ops.aten, CASES[name], FakeTensorMode()
    pinned: list[Any] = []

    class Watch(TorchDispatchMode):
        """Raises on what copies between host and device other than from and to pinned memory, without waiting."""

        copies = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            named = kwargs or {}
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            devices = {t.device.type for t in tensors}
            if func in (
                aten._local_scalar_dense.default,
                aten.is_nonzero.default,
                aten.equal.default,
            ):
                assert devices == {"cpu"}, f"the host waits: {func}"
            if func is aten._to_copy.default and "device" in named:
                assert devices == {torch.device(named["device"]).type}, f"the host waits: {func}"
            if func is aten.copy_.default and len(devices) > 1:
                on_host = next(t for t in tensors if t.device.type == "cpu")
                queued = named.get("non_blocking") or len(args) > 2 and args[2]
                assert queued, "the host waits: a copy that blocks"
                assert any(on_host is t for t in pinned), (
                    "the host waits: memory that is not pinned"
                )
                self.copies += 1
            return func(*args, **named)

    def in_pinned(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            tensor = make(*args, **kwargs)
            if pin_memory:
                tensor = mode.from_tensor(tensor)
                pinned.append(tensor)
            return tensor

        return made

    class WithPinnedMemory:
        """torch, for modules that ask it for what this machine does not have."""

        tensor, empty = staticmethod(in_pinned(torch.tensor)), staticmethod(in_pinned(torch.empty))
        empty_like, stack = staticmethod(torch.empty_like), staticmethod(torch.stack)
        float64, Tensor, device = torch.float64, torch.Tensor, torch.device
        Event = mock.MagicMock()

    def lower(program: Any, fake_mode: Any, options: Any, journal: Any, known: Any) -> Any:
        rewritten = rewrite(program, fake_mode, journal, FOR_INDUCTOR, options.without)
        values = [
            v.meta["val"] if isinstance(v, torch.fx.Node) else v
            for v in output_values(program.module)
        ]

        def run(args: list[Any]) -> list[Any]:
            with mode:
                return [
                    torch.empty(v.shape, dtype=v.dtype, device=v.device)
                    if isinstance(v, torch.Tensor)
                    else v
                    for v in values
                ]

        return (
            with_vector(run, rewritten.numbers, torch.device("cuda:0"))
            if rewritten.numbers
            else run
        )

    calls, warm = 0, False
    made_in: dict[int, int] = {}
    copied = host_copy.HostCopy.__init__

    def born(copy: Any, tensor: Any) -> None:
        copied(copy, tensor)
        made_in[id(copy)] = calls

    def values(copy: Any) -> list[float]:
        """Of what an earlier window left, a window's length of calls ago: the device is past it, or nearly."""
        old = calls - made_in[id(copy)]
        assert old >= 4 or not warm, f"the host waits: for what was queued {old} calls ago"
        return [1.0] * copy._held.numel()

    with ExitStack() as stack:
        stack.enter_context(absent(find_card(f"cuda:{case.target}")))
        for owner, what, stand_in in (
            (program_cache, "lower", lower),
            (number_vector, "torch", WithPinnedMemory),
            (host_copy, "torch", WithPinnedMemory),
            (host_copy.HostCopy, "__init__", born),
            (host_copy.HostCopy, "values", values),
        ):
            stack.enter_context(mock.patch.object(owner, what, stand_in))
        if fault in ("this window", "weights"):  # asked for as on a CPU
            unmasked = mock.PropertyMock(return_value=False)
            stack.enter_context(mock.patch.object(CapturedFacts, "masks", unmasked))
        if fault == "weights":  # read where the program adds them up

            def read(held: Any) -> tuple[float, ...]:
                return tuple(float(weight) for weight in held.weights.values())

            stack.enter_context(mock.patch.object(Accumulators, "weights_read", read))
        if fault == "pageable":

            def inputs(vector: Any, args: list[Any]) -> list[Any]:
                numbers = mode.from_tensor(torch.zeros(len(vector._positions), dtype=torch.float64))
                return [
                    torch.empty_like(numbers, device="cuda:0").copy_(numbers, non_blocking=True)
                ]

            stack.enter_context(mock.patch.object(NumberVector, "inputs", inputs))
        with mode, torch.device("cuda:0"):
            model, x, y = parts(case)
        held = optimizers(case, model)
        step = OptimizedStep(step_of(case, held), Options.of(window_of(case, held)))
        for _ in range(COLD):
            step(model, x, y)
            calls += 1
        watching, updates = Watch(), 0
        # Not around the call itself: Dynamo traces anew where a mode is in force.
        for owner, what in ((MicroStep, "__call__"), (Executor, "finish"), (Executor, "make_up")):
            stack.enter_context(
                mock.patch.object(owner, what, watched(watching, getattr(owner, what)))
            )
        warm = True
        for _ in range(WARM):
            step(model, x, y)
            calls += 1
            updates += step._executor._synced is not False
        warm = False
        assert step.optimizer_step  # the last one is settled before the stand-ins go
    return WARM, updates, watching.copies
