"""From the user's step to a graph: what Dynamo is told at the calls that make a step, and what may not stand in one.

tracer.py is the way from a function to a `Step`. While it traces, the handlers are in Dynamo's place (patches.py,
handlers.py). What no program could hold waits until after it (deferred_calls.py) or is refused with its line.
effects.py is the table of all effects that a step can have.

May import: ir, comm, optim.
"""
