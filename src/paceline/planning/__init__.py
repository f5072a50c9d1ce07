"""Planner: checks of plans, predictions, the search over all plans, and explanations of a choice.

Read `search/search.py` first (the verb `plan`), then `predict.py`, then the folders `check`, `cost` and `explain`;
`foreign` has the configurations of other systems.
"""
