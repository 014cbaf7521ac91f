"""`gradsync-fx convert`: rewrites loops that accumulate gradients so that `optimize` does, where it knows the shape.

May import: the ground alone.
"""
