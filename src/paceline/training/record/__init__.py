"""The directory of a run: what is written there as it happens, and who may write.

Read `run.py` first, then `recorder.py`.
"""
