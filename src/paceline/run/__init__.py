"""A whole run: choice of a plan, epochs, evaluations, checkpoints, records, recovery; users' own loops.

Read `train.py` first, then `loop.py`, then `own_loop/setup.py`.
This package imports neither the report nor the commands.
"""
