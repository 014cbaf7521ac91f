"""The runtime of windows: which program a call runs, what it accumulates, when ranks meet, and what is saved.

executor.py counts (window.py) and lets the ranks meet; what it asks of a step is told in protocol.py. The calls of a
`CapturedStep` are made in captured_window.py; a step that is not captured has its own in the folder eager.

May import: ir, comm, optim, capture, planning, passes, lowering.
"""
