"""Explanations of a plan: where its time goes, what would change it, how it scales.

Read `explain.py` first, then `what_if.py`, which all advice asks: the best plan with one thing changed.
"""
