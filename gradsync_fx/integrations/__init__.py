"""Adapters of other libraries' modules and trainers to `optimize`; each library is imported by its own file alone.

May import: doors.
"""
