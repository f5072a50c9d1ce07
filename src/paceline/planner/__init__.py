"""Which plan to run: checks, predictions, the search over all plans, and the words that explain a choice.

Read `choose.py` first (the verb `plan`), then `predict.py`, then the folders `check`, `cost`, `search` and `explain`.
"""
