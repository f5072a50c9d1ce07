"""Parity of a plan with one process: `paceline check`.

Read `check.py` first (starts the ranks and compares), then `ranks.py` (what each rank does).
"""
