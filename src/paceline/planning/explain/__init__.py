"""Explanations of a plan: where its time goes, what would change it, how it scales.

Read `explain.py` first, then `advice.py`: the best plan with one thing changed.
"""
