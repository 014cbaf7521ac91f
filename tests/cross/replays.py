"""Updates by recordings: torch's own recording code, with a recorder for the device, over kernels that are interpreted.

record() or record("float") -> the programs as code for a GPU, as mode="reduce-overhead" has it
replay(made)                -> what came of six updates by it, beside an eager loop

They are jobs of two processes: Triton compiles in one or interprets in it. "float": the planted fault, numbers of
Python's.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from tests.cross.cases import Case


CASE = Case("mlp", clip=True, ranks=1)
K, UPDATES = 2, 6


@dataclass(frozen=True, slots=True)
class Made:
    """One program. holders: names of its inputs as Inductor has them. parts: of each recording the static inputs, those
    that are written, and whether it has no backward. verdict: what the journal says."""

    source: str
    holders: tuple[str, ...]
    parts: tuple[tuple[tuple[int, ...], tuple[int, ...], bool], ...]
    verdict: str


def record(fault: str = "") -> dict[str, Made]:
    import torch._inductor.compile_fx as compile_fx
    import torch._inductor.config as inductor_config

    from gradsync_fx.ir.journal import Journal
    from gradsync_fx.lowering import lower as lowering
    from gradsync_fx.lowering.target.absent import absent
    from gradsync_fx.lowering.target.cards import find_card
    from gradsync_fx.passes import device_numbers
    from tests.cross.lowered import kernels_of
    from tests.cross.steps import captured, programs_of

    made: dict[str, Made] = {}
    with ExitStack() as stack:
        binaries = stack.enter_context(absent(find_card(f"cuda:{CASE.target}")))
        stack.enter_context(kernels_of(CASE, binaries))
        step = stack.enter_context(captured(CASE))
        stack.enter_context(inductor_config.patch({"triton.cudagraph_or_error": True}))
        parts = _kept(stack, compile_fx, "cudagraphify")
        graphs = _kept(stack, lowering, "compile_fx_inner")
        if fault:
            stack.enter_context(mock.patch.object(device_numbers, "_may_move", _is_no_float))
            stack.enter_context(mock.patch.object(lowering, "recording_of", _recorded_anyhow))
        options = replace(step.facts.options, mode="reduce-overhead")
        for name, program in programs_of(CASE, step).items():
            parts.clear()
            graphs.clear()
            journal = Journal()
            lowering.lower(program, step.facts.capture.fake_mode, options, journal)
            (((module, _), _, graph),) = graphs
            made[name] = Made(
                graph.source_code,
                tuple(n.name for n in module.graph.find_nodes(op="placeholder")),
                tuple(
                    (
                        tuple(how["static_input_idxs"]),
                        tuple(how["mutated_input_idxs"]),
                        how["is_inference"],
                    )
                    for _, how, _ in parts
                ),
                str(journal.recordings[program.name]),
            )
    return made


def _kept(stack: ExitStack, owner: Any, name: str) -> list[Any]:
    """Arguments and results of a function, as it is called from here on."""
    inner, calls = getattr(owner, name), list[Any]()

    def called(*args: Any, **how: Any) -> Any:
        result = inner(*args, **how)
        calls.append((args, how, result))
        return result

    stack.enter_context(mock.patch.object(owner, name, called))
    return calls


def _is_no_float(holder: Any) -> bool:
    return not any("_local_scalar" in str(user.target) for user in holder.users)


def _recorded_anyhow(rewritten: Any, *, asked: bool) -> Any:
    from gradsync_fx.ir.journal import Recording

    return Recording(rewritten.program.name, asked)


class Recorder:
    """In place of what records on a device. A replay runs what was recorded, on the recorded inputs: those that move
    are copied to where they lay, and numbers are those of the recording."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, model: Any, inputs: Any, static: Any = (), **how: Any) -> Any:
        import torch

        self.count += 1
        assert how["is_inference"]
        moving = [
            i for i, v in enumerate(inputs) if isinstance(v, torch.Tensor) and i not in static
        ]
        kept = [v.clone() if i in moving else v for i, v in enumerate(inputs)]
        assert not set(moving) & set(how["mutated_input_idxs"])

        def replay(given: list[Any]) -> Any:
            for i in moving:
                kept[i].copy_(given[i])
            for i in static:
                assert given[i].data_ptr() == kept[i].data_ptr(), "a static input has moved"
            return model(list(kept))

        return replay, model(list(kept))


def replay(made: dict[str, Made]) -> dict[str, Any]:
    import torch
    from torch._inductor import cudagraph_trees

    from gradsync_fx.lowering.target.absent import absent
    from gradsync_fx.lowering.target.cards import find_card
    from tests.cross.steps import captured, parts, programs_of

    torch.manual_seed(0)
    theirs, _, _ = parts(CASE)
    held = {name: p.detach().clone() for name, p in theirs.named_parameters()}
    start = {name: p.clone() for name, p in held.items()}
    batches = [(torch.randn(16, 64), torch.randint(32, (16,))) for _ in range(K * UPDATES)]
    rates = [1e-2 / (t + 1) for t in range(UPDATES)]
    train_eagerly(theirs, batches, rates)
    recorder = Recorder()
    with (
        absent(find_card(f"cuda:{CASE.target}")),
        captured(CASE) as step,
        mock.patch.object(cudagraph_trees, "cudagraphify", recorder),
    ):
        programs = programs_of(CASE, step)
        sums_and_state: dict[str, Any] = {}
        runs = {
            name: _Run(made[name], programs[name], held, sums_and_state)
            for name in ("accumulate", "boundary")
        }
        (binding,) = step.programs.bindings.values()
        update = binding.trace()
        for i, (x, y) in enumerate(batches):
            if i % K < K - 1:
                runs["accumulate"](x, y, [])
                continue
            binding.optimizer.param_groups[0]["lr"] = rates[i // K]
            runs["boundary"](x, y, binding.scalars(update))
            binding.commit(update, [])
    # By the way that a tensor went: an element whose gradient is nearly 0 goes a full step of AdamW by its rounding.
    differences = [
        (held[name] - p.detach()).norm() / (p.detach() - start[name]).norm()
        for name, p in theirs.named_parameters()
    ]
    return {
        "worst": max(d.item() for d in differences),
        "recordings": recorder.count,
        "parts": {name: len(one.parts) for name, one in made.items()},
        "verdicts": {name: one.verdict for name, one in made.items()},
    }


def train_eagerly(model: Any, batches: list[Any], rates: list[float]) -> None:
    """The independent reference: a plain loop."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: rates[min(t, UPDATES - 1)])
    for i, (x, y) in enumerate(batches):
        (torch.nn.functional.cross_entropy(model(x), y) / K).backward()
        if i % K == K - 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


class _Run:
    """A program as it would be called, over tensors of the CPU: each by the name of the parameter, or of the input."""

    def __init__(
        self, made: Made, program: Any, held: dict[str, Any], sums_and_state: dict[str, Any]
    ) -> None:
        import torch

        from gradsync_fx.lowering.number_vector import NumberVector
        from tests.cross.interpret import _load

        self._program, self._held, self._sums_and_state = program, held, sums_and_state
        self._call: Any = _load(made.source)
        parts = [self._recorded(*part) for part in made.parts]
        self._call.__self__.recursively_apply_fns(parts)
        names = [n.name for n in program.module.graph.find_nodes(op="placeholder")]
        numbers = tuple(i for i, name in enumerate(names) if name not in made.holders)
        self._vector = NumberVector(numbers, torch.device("cpu")) if numbers else None

    def _recorded(self, static: Any, written: Any, inference: bool) -> Any:
        from torch._inductor import compile_fx

        def recorded(model: Any) -> Any:
            return compile_fx.cudagraphify(
                model,
                static,
                device_index=0,
                stack_traces=[],
                is_backward=False,
                is_inference=inference,
                mutated_input_idxs=written,
            )

        return recorded

    def __call__(self, x: Any, y: Any, scalars: list[Any]) -> None:
        args = [
            self._value(slot, form, x, y, scalars)
            for slot, form in zip(self._program.slots, self._program.inputs(), strict=True)
        ]
        self._call(self._vector.inputs(args) if self._vector else args)

    def _value(self, slot: Any, form: Any, x: Any, y: Any, scalars: list[Any]) -> Any:
        import torch

        from gradsync_fx.ir.program import Kind

        if slot.kind is Kind.DATA:
            return x if form.dtype.is_floating_point else y
        if slot.kind is Kind.PARAMETER:
            return self._held[slot.name]
        if slot.kind is Kind.SCALAR:
            is_divisor = "divisor" in slot.name
            return (
                torch.tensor(float(K), dtype=torch.float64) if is_divisor else scalars[slot.key[1]]
            )
        blank = torch.zeros(tuple(form.shape), dtype=form.dtype)
        return self._sums_and_state.setdefault(f"{slot.kind} {slot.name}", blank)
