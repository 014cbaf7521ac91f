"""The command line `gradsync-fx`; main.py alone reads arguments and exits.

May import: lowering, inspection, doors, conversion.
"""
