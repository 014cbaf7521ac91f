"""Capture: traces the user's step into one graph, with handlers at the calls that make a training step.

tracer.py turns a function into a `Step`. While it traces, Dynamo is patched (patches.py) to call the handlers
(handlers.py). Calls that no program can hold run after it (deferred_calls.py), or are refused with their line.
effects.py is the table of all effects that a step can have.

May import: ir, comm, optim.
"""
