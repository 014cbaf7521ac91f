"""Inspection: the report on a step and on what the rewrite changed in it, as data, text, page and graph.

May import: ir, optim, capture, planning, passes, lowering, runtime, eager.
"""
