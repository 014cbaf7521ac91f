"""The user's optimizers: their updates as graphs, their state as inputs and outputs, or their own step as it is.

An update is traced apart from the step (trace.py), shared by parameters that are treated alike (grouping.py,
subgraphs.py), and bound to the user's optimizer (binding.py). Whether the trace may stand for the code is found ahead
of it (reached.py, footprint.py) and tried (rehearsal.py); else the optimizer's own `step()` runs (opaque.py).

May import: ir.
"""
