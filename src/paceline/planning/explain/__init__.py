"""Explanations of a plan: its time, what would make it faster, and how it scales.

Read `explain.py` first, then `advice.py`, which finds the best plan after one change.
"""
