"""A whole run: choice of a plan, epochs, evaluations, checkpoints, records, recovery; users' own loops.

Read `loop.py` first, then `own_loop/setup.py`, then `checkpoint/writer.py`.
"""
