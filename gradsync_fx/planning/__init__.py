"""From a capture to a `Plan`: who reduces what over which group, in which buckets, divided by what.

A plan is all that passes are given: the arithmetic of one window, and the tensors that it binds.

May import: ir, comm, optim, capture.
"""
