"""Planner: plans, their checks, predictions of cost, the search for a plan, and explanations.

Read `plan.py` first, then `search/search.py` (`paceline.plan`), `prediction.py`, and the folders `check`, `cost` and
`explain`. The folder `model` traces one forward pass of a model.
"""
