"""Eager loops watched at work: what happened in them, and which easy mistakes of accumulation that shows.

May import: the ground alone.
"""
