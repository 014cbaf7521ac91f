"""Steps that cannot be captured run eagerly: the same windows and checkpoints, without the graph rewrite.

May import: ir, comm, optim, capture, planning, runtime, checking, diagnosis.
"""
