"""What stands behind the command line: each file one job, none of them reads arguments or exits."""
