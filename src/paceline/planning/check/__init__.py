"""Checks of a plan against a job and a cluster, before any process starts.

Read `plan_errors.py` first, then `plan_context.py` (the argument of every check), `rules.py` and `split_rules.py` (the
checks).
"""
