"""The directory of a run: its records, and the lock that guards it.

Read `run.py` first, then `recorder.py`.
"""
