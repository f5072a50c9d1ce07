"""Timeline: the steps of all ranks on one clock, and their critical path.

Read `timeline.py` first, then `critical_path.py`, then `chrome_trace.py`.
"""
