"""Records in a run's directory, and what is computed from them.

Read `run.py` first, then `recorder.py`.
"""
