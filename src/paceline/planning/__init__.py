"""Planner: plans, their checks and predictions, the search over them, and explanations.

Read `plan.py` first, then `search/search.py` (`paceline.plan`), `prediction.py`, and the folders `check`, `cost` and
`explain`. `model` traces one forward pass of a model.
"""
