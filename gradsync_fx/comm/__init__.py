"""What ranks say and send to each other: whether all are there, agree and stay equal, and the sums of their buckets.

Where ranks stand (rendezvous.py), that one compiles, waits or is gone (liveness.py, rank_failure.py), that copies are
the same at first and later (replica_check.py, drift.py), and buckets: one object each (flat_bucket.py) over one flat
tensor (flat_buffers.py), reduced in place over the network or in memory that the ranks of a machine share
(shm_all_reduce.py), by two ops in the programs (inplace_all_reduce.py). Where updates are shared out each rank has its
pieces of a bucket (cuts.py, scattered_bucket.py, shm_pieces.py), by two more (inplace_pieces.py).

May import: ir.
"""
