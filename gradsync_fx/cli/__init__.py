"""What stands behind the command line: each file one job; main.py alone reads arguments and exits.

May import: inspection, doors.
"""
