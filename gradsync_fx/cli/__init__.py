"""The command line `gradsync-fx`; main.py alone reads arguments and exits.

May import: inspection, doors.
"""
