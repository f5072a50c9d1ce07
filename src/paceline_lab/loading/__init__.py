"""Speed of a job's loader alone, against the limits of the disk and of decoding (`paceline bench data`).

Read `loader_speed.py` first, then `limits.py`, and `result.py` for the conclusion.
"""
