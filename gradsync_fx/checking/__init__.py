"""The judges: compare a window with one in plain eager PyTorch, on copies of the user's objects.

reference_window.py shares no code with what it judges: it reaches no pass, no lowering and nothing of the runtime.

May import: ir, optim, capture, planning, runtime.
"""
