"""Planner: checks of plans, predictions, the search over all plans, and explanations of a choice.

Read `choose.py` first (the verb `plan`), then `predict.py`, then the folders `check`, `cost`, `search` and `explain`.
"""
