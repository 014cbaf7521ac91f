"""A program becomes a callable: rewritten for the compiler, compiled once on each host, and shown to torch's tools.

May import: ir, comm, passes.
"""
