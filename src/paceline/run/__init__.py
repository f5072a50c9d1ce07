"""Whole runs, from planning to recovery, and the engine of users' own loops.

Read `train.py` first, then `loop.py`, then `own_loop/setup.py`.
This package imports neither the report nor the commands.
"""
