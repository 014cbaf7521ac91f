"""From Dynamo's graph to the functional ATen graph of the whole step: by AOTAutograd, or as a process before had it.

    Dynamo's graph, inputs -> kept on disk?  yes -> ATen graph -> receive -> callable over the inputs
                                             no  -> AOTAutograd -> kept -> receive -> callable, within its wrappers

A graph is kept where AOTAutograd's wrappers do nothing but call it with gradients off; so that is done here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from gradsync_fx._torch import aot_module_simplified, detect_fake_mode
from gradsync_fx.capture.checkpointing import torch_pass_off
from gradsync_fx.capture.kept_graph import KeptGraph
from gradsync_fx.capture.past_autograd import outputs_in_their_places


log = logging.getLogger(__name__)
Boxed = Callable[[list[Any]], Any]


def functional(
    module: GraphModule,
    inputs: list[Any],
    decompositions: Any,
    receive: Callable[[GraphModule], Boxed],
) -> Callable[..., Any]:
    """What Dynamo calls with the graph's inputs. receive: gets the ATen graph, which it may change."""
    mode: Any = detect_fake_mode(inputs)
    kept = KeptGraph(module, inputs, decompositions)
    found = kept.read(mode)
    if found is not None:
        log.debug("what AOTAutograd makes of the step was on disk")
        with mode:
            return _without_gradients(receive(found))

    def compile_graph(graph: GraphModule, _: Any) -> Boxed:
        return receive(kept.write(graph, mode))

    with torch_pass_off(), outputs_in_their_places():
        return aot_module_simplified(
            module,
            inputs,
            fw_compiler=compile_graph,  # type: ignore[arg-type]
            inference_compiler=compile_graph,  # type: ignore[arg-type]
            decompositions=decompositions,
            keep_inference_input_mutations=True,
        )


def _without_gradients(run: Boxed) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with torch.no_grad():
            return run(list(args))

    return call
