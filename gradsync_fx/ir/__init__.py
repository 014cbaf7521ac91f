"""What a graph is: marker ops and predicates, a step and the programs sliced from it, and how both are read and built.

A captured step is one ATen graph (program.py) in which markers (ops.py) stand where gradients and updates are. What
depends on what is data flow (dataflow.py), and by it each node is part of the micro-step or of the update
(regions.py). Programs are written with the builder, and the journal keeps what was done to them.

May import: the ground alone.
"""
