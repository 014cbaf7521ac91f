"""A program becomes a callable: Inductor, or the graph itself for tests and debugging."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from gradsync_fx._torch import (
    NOT_FOR_OUR_PROGRAMS,
    TracingContext,
    compile_fx_inner,
    fresh_cache,
    in_order_with_collectives,
    inductor_cache_dir,
    inductor_config,
    inductor_globals,
    inductor_joint_passes,
    list_mode_options,
    lookup_backend,
    select_decomp_table,
    tracing,
)
from gradsync_fx.comm.inplace_all_reduce import START_SUMS
from gradsync_fx.gc_off import gc_off
from gradsync_fx.ir.program import Program, output_values
from gradsync_fx.lowering.compile_lock import compile_once
from gradsync_fx.options import OPTIMIZATIONS, Options
from gradsync_fx.passes.check_lowered import Behind, check_lowered
from gradsync_fx.passes.fuse import add_products, norms_as_sums, numbers_as_tensors, write_early
from gradsync_fx.passes.inline import copy_module, inline_bodies
from gradsync_fx.passes.overlap import gradient_reductions, reduce_in_place, wait_late
from gradsync_fx.passes.pointwise_updates import (
    Cut,
    Kernel,
    KernelCall,
    Wait,
    cut_updates,
    run_calls,
)
from gradsync_fx.user_lines import warn_user


Compiled = Callable[[list[Any]], Any]


def decompositions(options: Options) -> dict[Any, Any]:
    """Inductor wants its own table already at capture; the others keep torch's ops and so eager's numbers."""
    if options.backend != "inductor":
        return {}
    with inductor_config.patch(_patches(options)):  # fallback_random, say, is another table
        return dict(select_decomp_table())


def as_it_is(options: Options) -> bool:
    """Whether programs run as graphs of torch's own calls, one after the other."""
    return options.backend in ("eager", "aot_eager")


def lower(program: Program, fake_mode: Any, options: Options) -> Compiled:
    """Compiles a program. The callable takes the list of its inputs, which it may empty, and returns its outputs."""
    if options.backend == "inductor" and not _is_complex(program):
        return _inductor(program, fake_mode, options)
    if as_it_is(options) or options.backend == "inductor":
        return lambda args: program.module(*args)
    backend = (
        lookup_backend(options.backend) if isinstance(options.backend, str) else options.backend
    )
    module = copy_module(program.module)
    inline_bodies(module, fake_mode)
    compiled = backend(module, program.inputs())
    return lambda args: compiled(*args)


def _is_complex(program: Program) -> bool:
    """Whether it has complex inputs: Inductor has no kernels for them, and knows no product with a symbolic number."""
    return any(v.is_complex() for v in program.inputs() if isinstance(v, torch.Tensor))


@dataclass(slots=True)
class Rewritten:
    """What Inductor is handed for a program: the main graph, what was cut out of it, and each kernel's graph."""

    main: GraphModule
    cut: Cut
    updates: dict[Kernel, GraphModule]

    def check(self, program: Program) -> None:
        """Raises `VerificationError` unless all together is the program (check_lowered.py)."""
        behind = [self._behind(call, len(program.slots)) for call in self.cut.calls]
        check_lowered(program, self.main, behind)

    def _behind(self, call: KernelCall | Wait, inputs: int) -> Behind:
        values = call.sums if isinstance(call, Wait) else (*call.tensors, *call.scalars)
        positions = tuple(v.index + (inputs if v.kind == "extra" else 0) for v in values)
        return Behind(None if isinstance(call, Wait) else self.updates[call.kernel], positions)


def rewrite(program: Program, fake_mode: Any, optimizations: Collection[str]) -> Rewritten:
    """All rewrites of the graph on its way to Inductor, in their order; the program itself stays readable."""
    module = copy_module(program.module)
    if gradient_reductions(module):
        if "overlap" in optimizations:
            wait_late(module)
        if "in_place" in optimizations:
            reduce_in_place(module, fake_mode)
    cut = cut_updates(module) if "updates" in optimizations else Cut()
    inline_bodies(module, fake_mode)
    norms_as_sums(module, fake_mode)
    if "products" in optimizations:
        add_products(module, fake_mode)
    write_early(module)
    numbers_as_tensors(module, fake_mode)
    updates = {kernel: copy_module(kernel.module) for kernel in cut.kernels}
    for kernel, body in updates.items():
        numbers_as_tensors(body, kernel.fake_mode)
    return Rewritten(module, cut, updates)


def _inductor(program: Program, fake_mode: Any, options: Options) -> Compiled:
    patches = _patches(options)
    optimizations = set(OPTIMIZATIONS).difference(options.without)
    if "overlap" in optimizations and gradient_reductions(program.module):
        # Inductor's own order of least memory starts all-reduces late.
        patches.setdefault("reorder_for_peak_memory", False)
    if all(v.device.type == "cpu" for v in program.inputs() if isinstance(v, torch.Tensor)):
        # Turning convolutions to channels last is for GPUs: on a CPU it costs more than they do.
        patches.setdefault("layout_optimization", False)
    with gc_off():
        rewritten = rewrite(program, fake_mode, optimizations)
        rewritten.check(program)
    cut = rewritten.cut

    def compiled(module: GraphModule, inputs: list[Any], fake_mode: Any) -> Compiled:
        module.recompile()  # Inductor's cache knows a module by its code
        shared = "shared_compile" in optimizations
        spare = copy_module(module)  # Inductor changes what it compiles
        try:
            return _compiled(module, inputs, fake_mode, patches, shared)
        except Exception as failure:
            return _compiled_anew(spare, inputs, fake_mode, patches, failure)

    main = compiled(rewritten.main, program.inputs(), fake_mode)
    if not cut.calls:
        return main
    for kernel, body in rewritten.updates.items():
        inputs = [n.meta["val"] for n in body.graph.find_nodes(op="placeholder")]
        kernel.run = compiled(body, inputs, kernel.fake_mode)
    outputs = len(output_values(program.module))

    def run(args: list[Any]) -> list[Any]:
        inputs = list(args)
        results = list(main(args))
        run_calls(cut.calls, inputs, results[outputs:])
        return results[:outputs]

    return run


def _compiled_anew(
    module: GraphModule,
    inputs: list[Any],
    fake_mode: Any,
    patches: dict[str, Any],
    failure: Exception,
) -> Compiled:
    """Past the files of Inductor's cache, of which one may be torn: by a full disk, or a process that was killed.

    failure: of compiling with the cache, which goes on unless this succeeds.
    """
    folder, beside = inductor_cache_dir(), tempfile.mkdtemp(prefix="gradsync_fx-")
    try:
        with fresh_cache(dir=beside, delete=False):  # kernels may be loaded later
            compiled = _compiled(module, inputs, fake_mode, patches, shared=False)
    except Exception:
        shutil.rmtree(beside, ignore_errors=True)
        raise failure from failure.__cause__
    warn_user(
        f"a file in Inductor's cache is damaged ({type(failure).__name__}); the program was compiled anew, beside it. "
        f"To have it cached again, delete {folder}, or set TORCHINDUCTOR_CACHE_DIR to another folder"
    )
    return compiled


def _patches(options: Options) -> dict[str, Any]:
    """Inductor's own settings, of the mode and by name."""
    patches: dict[str, Any] = dict(NOT_FOR_OUR_PROGRAMS)
    patches.update(list_mode_options(options.mode) if options.mode else {})
    patches.update({k.replace("-", "_"): v for k, v in (options.options or {}).items()})
    return patches


def _compiled(
    module: GraphModule, inputs: list[Any], fake_mode: Any, patches: dict[str, Any], shared: bool
) -> Compiled:
    # A fresh context: strides that another program left in it would be taken for this one's. Inductor's passes make
    # tensors of their own, as if called by AOTAutograd: with the fake mode in force.
    with (
        fake_mode,
        tracing(TracingContext(fake_mode)),
        inductor_globals.set_fake_mode(fake_mode),
        inductor_config.patch(patches),
        in_order_with_collectives(START_SUMS),
    ):
        module = inductor_joint_passes(module)
        (out,) = module.graph.find_nodes(op="output")
        visible = [i for i, v in enumerate(output_values(module)) if isinstance(v, torch.fx.Node)]
        out.meta["user_visible_output_idxs"] = visible
        with compile_once(module, inputs, patches) if shared else nullcontext():
            compiled: Compiled = compile_fx_inner(module, inputs)
    return compiled
