"""Other libraries' modules and trainers over `optimize`: one file for each library, which alone imports it.

May import: doors.
"""
