"""A program becomes a callable: Inductor, or the graph itself for tests and debugging."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
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
from gradsync_fx.ir.journal import Journal
from gradsync_fx.ir.program import Program, output_values
from gradsync_fx.lowering.compile_lock import compile_once
from gradsync_fx.lowering.number_vector import with_vector
from gradsync_fx.options import Options
from gradsync_fx.passes import FOR_INDUCTOR, FOR_OTHERS, rewrite
from gradsync_fx.passes.pointwise_updates import run_calls
from gradsync_fx.passes.rewritten import Rewritten, copy_module
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


def lower(program: Program, fake_mode: Any, options: Options, journal: Journal) -> Compiled:
    """Compiles a program. The callable takes the list of its inputs, which it may empty, and returns its outputs."""
    if options.backend == "inductor" and not _is_complex(program):
        rewritten = rewrite(program, fake_mode, journal, FOR_INDUCTOR, options.without)
        return _inductor(rewritten, options)
    if as_it_is(options) or options.backend == "inductor":
        return lambda args: program.module(*args)
    backend = (
        lookup_backend(options.backend) if isinstance(options.backend, str) else options.backend
    )
    rewritten = rewrite(program, fake_mode, journal, FOR_OTHERS)
    compiled = backend(rewritten.main, program.inputs())
    return lambda args: compiled(*args)


def _is_complex(program: Program) -> bool:
    """Whether it has complex inputs: Inductor has no kernels for them, and knows no product with a symbolic number."""
    return any(v.is_complex() for v in program.inputs() if isinstance(v, torch.Tensor))


def _inductor(rewritten: Rewritten, options: Options) -> Compiled:
    program, cut = rewritten.program, rewritten.cut
    patches = {**rewritten.settings, **_patches(options)}
    if all(v.device.type == "cpu" for v in program.inputs() if isinstance(v, torch.Tensor)):
        # Turning convolutions to channels last is for GPUs: on a CPU it costs more than they do.
        patches.setdefault("layout_optimization", False)

    def compiled(module: GraphModule, inputs: list[Any], fake_mode: Any) -> Compiled:
        module.recompile()  # Inductor's cache knows a module by its code
        shared = "shared_compile" not in options.without
        spare = copy_module(module)  # Inductor changes what it compiles
        try:
            return _compiled(module, inputs, fake_mode, patches, shared)
        except Exception as failure:
            return _compiled_anew(spare, inputs, fake_mode, patches, failure)

    values = [n.meta["val"] for n in rewritten.main.graph.find_nodes(op="placeholder")]
    main = compiled(rewritten.main, values, rewritten.fake_mode)
    if rewritten.numbers:
        main = with_vector(main, rewritten.numbers, values[-1].device)
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
