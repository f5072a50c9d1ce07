"""Checks of a plan against a job and a cluster, before any process starts.

Read `check_plan.py` first, then `plan_context.py` (the argument of every check) and `rules.py` (the checks).
"""
