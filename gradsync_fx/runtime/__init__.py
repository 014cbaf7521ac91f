"""Windows at work: which program a call runs, what it adds up, when ranks meet, and what is saved.

executor.py chooses a program by the counter of the window (window.py); a capture with its programs is a `CapturedStep`.
A step that runs eagerly stands in its place here (eager_step.py) with the same names.

May import: ir, comm, optim, capture, planning, passes, lowering.
"""
