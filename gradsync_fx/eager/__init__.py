"""A step that cannot be captured, run as it is: the same windows and checkpoints, without the graph rewrite.

May import: ir, comm, optim, capture, planning, runtime, checking, diagnosis.
"""
