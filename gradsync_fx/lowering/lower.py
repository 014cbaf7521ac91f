"""A program becomes a callable: Inductor, or the graph itself for tests and debugging."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch.fx import GraphModule

from gradsync_fx._torch import (
    NOT_FOR_OUR_PROGRAMS,
    TracingContext,
    compile_fx_inner,
    in_order_with_collectives,
    inductor_config,
    inductor_globals,
    inductor_joint_passes,
    list_mode_options,
    lookup_backend,
    loops_split_evenly,
    select_decomp_table,
    tracing,
)
from gradsync_fx.comm.inplace_all_reduce import START_SUMS, WAIT_SUMS
from gradsync_fx.comm.inplace_pieces import GATHER_PIECES, START_PIECES
from gradsync_fx.ir.journal import Journal
from gradsync_fx.ir.program import Program, output_values
from gradsync_fx.lowering.ahead import looked
from gradsync_fx.lowering.compile_lock import compile_once, program_fingerprint
from gradsync_fx.lowering.in_halves import InHalves
from gradsync_fx.lowering.kernels_together import compiled_beside, kernels_together
from gradsync_fx.lowering.number_vector import NumberVector, with_vector
from gradsync_fx.lowering.recording import Recorded, held_inputs, recording_of, warn_once
from gradsync_fx.options import Options
from gradsync_fx.passes import AS_IT_IS, FOR_INDUCTOR, FOR_OTHERS, rewrite
from gradsync_fx.passes.blocks import BODIES, name_body
from gradsync_fx.passes.device_numbers import accelerator_of
from gradsync_fx.passes.pointwise_updates import run_calls
from gradsync_fx.passes.rewritten import Block, Rewritten, copy_module
from gradsync_fx.progress import detail


Compiled = Callable[[list[Any]], Any]
GRAPHS = "triton.cudagraphs"


@dataclass(frozen=True, slots=True)
class How:
    """How Inductor compiles a graph.

    settings: its own. held: positions of the inputs that stay where they are. inference: whether it is told that the
    graph has no backward of its own; its recordings know forward, backward and this. On a CPU it would only put the
    nodes in another order.
    """

    settings: dict[str, Any]
    held: tuple[int, ...] = ()
    inference: bool = False


def decompositions(options: Options) -> dict[Any, Any]:
    """Inductor wants its own table already at capture; the others keep torch's ops and so eager's numbers."""
    if options.backend != "inductor":
        return {}
    with inductor_config.patch(_patches(options)):  # fallback_random, say, is another table
        return dict(select_decomp_table())


def as_it_is(options: Options) -> bool:
    """Whether programs run as graphs of torch's own calls, one after the other."""
    return options.backend in ("eager", "aot_eager")


def lower(
    program: Program,
    fake_mode: Any,
    options: Options,
    journal: Journal,
    known: dict[str, Compiled] | None = None,
) -> Compiled:
    """Compiles a program. The callable takes the list of its inputs, which it may empty, and returns its outputs.

    known: updates that were compiled for other programs of the step, by what they compute; grows.
    """
    if is_rewritten(program, options):
        rewritten = rewrite(program, fake_mode, journal, FOR_INDUCTOR, options.without)
        if program.closes:
            journal.exchanged[program.name] = rewritten.exchanged
        return _inductor(rewritten, options, journal, {} if known is None else known)
    if as_it_is(options) or options.backend == "inductor":
        if not program.voted:
            return lambda args: program.module(*args)
        rewritten = rewrite(program, fake_mode, journal, AS_IT_IS)
        return _two_calls(rewritten, lambda module, _: module)
    backend = (
        lookup_backend(options.backend) if isinstance(options.backend, str) else options.backend
    )
    rewritten = rewrite(program, fake_mode, journal, FOR_OTHERS)
    if rewritten.halves is not None:
        return _two_calls(rewritten, backend)
    compiled = backend(rewritten.main, program.inputs())
    return lambda args: compiled(*args)


def _two_calls(rewritten: Rewritten, backend: Callable[[GraphModule, list[Any]], Any]) -> InHalves:
    """Both halves, each by a backend whose results take their inputs one by one."""
    halves = rewritten.halves
    assert halves is not None

    def one(module: GraphModule) -> Compiled:
        made = backend(module, _values(module))
        return lambda args: made(*args)

    second = None if halves.second is None else one(halves.second)
    outputs = len(output_values(rewritten.program.module))
    return InHalves(halves, one(halves.first), second, outputs)


def _values(module: GraphModule) -> list[Any]:
    return [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]


def is_rewritten(program: Program, options: Options) -> bool:
    """Whether Inductor compiles a program, after all passes of its own."""
    return options.backend == "inductor" and not _is_complex(program)


def _is_complex(program: Program) -> bool:
    """Whether it has complex inputs: Inductor has no kernels for them, and knows no product with a symbolic number."""
    return any(v.is_complex() for v in program.inputs() if isinstance(v, torch.Tensor))


def _inductor(
    rewritten: Rewritten, options: Options, journal: Journal, known: dict[str, Compiled]
) -> Compiled:
    program, cut, halves = rewritten.program, rewritten.cut, rewritten.halves
    patches = {**rewritten.settings, **_patches(options)}
    device = accelerator_of(program.inputs())
    if device is None:
        # Turning convolutions to channels last is for GPUs: on a CPU it costs more than they do.
        patches.setdefault("layout_optimization", False)
    else:
        # It would put each reduction right before its wait.
        patches.setdefault("reorder_for_locality", False)

    graphs = 1 + len(rewritten.updates) + len(rewritten.blocks)
    graphs += halves is not None and halves.second is not None
    numbered = count(1)

    def compiled(module: GraphModule, inputs: list[Any], fake_mode: Any, how: How) -> Compiled:
        detail(f"{next(numbered)}/{graphs}")
        module.recompile()  # Inductor's cache knows a module by its code
        shared = "shared_compile" not in options.without
        spare = copy_module(module)  # Inductor changes what it compiles
        try:
            return _compiled(module, inputs, fake_mode, how, shared)
        except Exception as failure:
            return _compiled_anew(spare, inputs, fake_mode, how, failure)

    def unless_there(
        held: dict[str, Compiled], key: str, module: GraphModule, fake_mode: Any
    ) -> Compiled:
        if key in held:
            next(numbered)
        else:
            held[key] = compiled(module, _values(module), fake_mode, plain)
        return held[key]

    def once(module: GraphModule, fake_mode: Any) -> Compiled:
        """A graph that other programs of the step may have, too: the tail's update is the boundary's."""
        inputs = _values(module)
        module.recompile()
        constants = [
            id(getattr(module, str(n.target))) for n in module.graph.find_nodes(op="get_attr")
        ]
        key = f"{program_fingerprint(module, inputs, patches)} {constants}"
        return unless_there(known, key, module, fake_mode)

    def body(block: Block) -> None:
        """What repeats, in this program and in others, of any step."""
        block.module.recompile()
        name = program_fingerprint(block.module, _values(block.module), patches)
        name_body(rewritten, block, name)
        unless_there(BODIES, name, block.module, rewritten.fake_mode)

    values = _values(rewritten.main)
    plain = How({**patches, GRAPHS: False}, inference=device is not None)
    asked = patches.get(GRAPHS, inductor_config.triton.cudagraphs)
    recording = recording_of(rewritten, asked=asked)
    if asked and options.mode in (None, "reduce-overhead"):  # in others it is one thing of many
        warn_once(recording, journal.recordings)
    for block in rewritten.blocks:
        body(block)
    if halves is not None:
        first = compiled(halves.first, _values(halves.first), rewritten.fake_mode, plain)
    elif asked and not recording.never:
        spare, held = copy_module(rewritten.main), held_inputs(rewritten)
        how = How({**patches, GRAPHS: True}, tuple(held), inference=True)
        made = compiled(rewritten.main, values, rewritten.fake_mode, how)
        recording = replace(recording, parts=len(getattr(made, "partition_maps", None) or ()))

        def instead() -> Compiled:
            return compiled(spare, values, rewritten.fake_mode, plain)

        def not_recorded(why: str) -> None:
            after = replace(recording, never=why, apart=(), parts=0)
            warn_once(after, journal.recordings)
            journal.recordings[program.name] = after

        main: Compiled = Recorded(made, instead, held, spare, not_recorded)
    else:
        main = compiled(rewritten.main, values, rewritten.fake_mode, plain)
    journal.recordings[program.name] = recording
    for kernel, body in rewritten.updates.items():
        kernel.run = once(body, kernel.fake_mode)
    outputs = len(output_values(program.module))
    if halves is not None:
        second = None if halves.second is None else once(halves.second, rewritten.fake_mode)
        vector = None
        if rewritten.numbers:
            vector = NumberVector(rewritten.numbers, values[-1].device).inputs
        after = partial(run_calls, cut.calls) if cut.calls else None
        return InHalves(halves, first, second, outputs, vector, after)
    if rewritten.numbers:
        main = with_vector(main, rewritten.numbers, values[-1].device)
    if not cut.calls:
        return main

    def run(args: list[Any]) -> list[Any]:
        inputs = list(args)
        results = list(main(args))
        run_calls(cut.calls, inputs, results[outputs:])
        return results[:outputs]

    return run


def _ordered(module: GraphModule) -> list[Any]:
    """Ops in which ranks meet. In memory a wait is a meeting, too: it comes in one order everywhere."""
    waits = module.graph.find_nodes(op="call_function", target=WAIT_SUMS)
    in_memory = any(n.args[0][0].meta["val"].device.type == "cpu" for n in waits)
    return [START_SUMS, START_PIECES, GATHER_PIECES, *([WAIT_SUMS] if in_memory else [])]


def _compiled_anew(
    module: GraphModule,
    inputs: list[Any],
    fake_mode: Any,
    how: How,
    failure: Exception,
) -> Compiled:
    """Past the files of Inductor's cache. failure: of compiling with them."""
    with compiled_beside(failure):
        return _compiled(module, inputs, fake_mode, how, shared=False)


def _patches(options: Options) -> dict[str, Any]:
    """Inductor's own settings, of the mode and by name."""
    patches: dict[str, Any] = dict(NOT_FOR_OUR_PROGRAMS)
    patches.update(list_mode_options(options.mode) if options.mode else {})
    patches.update({k.replace("-", "_"): v for k, v in (options.options or {}).items()})
    return patches


def _compiled(
    module: GraphModule, inputs: list[Any], fake_mode: Any, how: How, shared: bool
) -> Compiled:
    looked()
    # A fresh context: strides that another program left in it would be taken for this one's. Inductor's passes make
    # tensors of their own, as if called by AOTAutograd: with the fake mode in force.
    with (
        fake_mode,
        tracing(TracingContext(fake_mode)),
        inductor_globals.set_fake_mode(fake_mode),
        inductor_config.patch(how.settings),
        in_order_with_collectives(*_ordered(module)),
        loops_split_evenly(),
        kernels_together(),
    ):
        module = inductor_joint_passes(module)
        (out,) = module.graph.find_nodes(op="output")
        visible = [i for i, v in enumerate(output_values(module)) if isinstance(v, torch.fx.Node)]
        out.meta["user_visible_output_idxs"] = visible
        with compile_once(module, inputs, how.settings) if shared else nullcontext():
            compiled: Compiled = compile_fx_inner(
                module, inputs, static_input_idxs=how.held, is_inference=how.inference
            )
    return compiled
