"""What a graph is: marker ops and predicates, a step and the programs sliced from it, and how both are read and built.

A captured step is one ATen graph (program.py); marker ops (ops.py) stand where gradients and updates are. By dataflow
(dataflow.py) each node belongs to the micro-step or to the update (regions.py). Passes write programs with the builder,
and the journal keeps what each pass did.

May import: the ground alone.
"""
