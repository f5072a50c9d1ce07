"""A whole run: epochs, evaluations, checkpoints, records, and loops of users' own.

Read `loop.py` first, then `own_loop/setup.py`, then `checkpoint/writer.py`.
"""
