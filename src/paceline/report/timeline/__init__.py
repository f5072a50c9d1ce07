"""Timeline: the steps of all ranks on one clock, drawn for Perfetto, and what their time depended on.

Read `timeline.py` first, then `critical_path.py`, then `chrome_trace.py`.
"""
