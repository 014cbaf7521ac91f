"""The IR: a step's graph and the programs sliced from it, marker ops and predicates, analyses and the graph builder.

A captured step is one ATen graph (program.py); marker ops (ops.py) stand where gradients and updates are. By dataflow
(dataflow.py) each node belongs to the micro-step or to the update (regions.py). Passes write programs with the builder,
and the journal keeps what each pass did.

May import: the ground alone.
"""
