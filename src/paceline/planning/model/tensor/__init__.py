"""Tensor parallelism of a recorded model: divisible regions are found and verified in advance.

Read `rules.py` first (dimensions that are divided together), then `regions.py` and `degrees.py`. `split/tensor` carries
out the division; the planner counts its cost.
"""
