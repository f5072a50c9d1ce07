"""Tensor parallelism of a recorded model. Divisible regions are found and verified before a run.

Read `rules.py` first (dimensions that are divided together), then `regions.py` and `degrees.py`. `split/tensor` applies
the division. The planner predicts the cost of the division.
"""
