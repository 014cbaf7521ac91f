"""`diagnose`: records what an eager training loop does, and finds mistakes of gradient accumulation in it.

May import: the ground alone.
"""
