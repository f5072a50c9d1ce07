"""Whether a plan computes what one process computes: `paceline check`.

Read `check.py` first (starts the ranks and compares), then `ranks.py` (what each rank does).
"""
