"""What a step is and what the rewrite changed, as data and as text.

May import: ir, optim, capture, planning, runtime, eager.
"""
