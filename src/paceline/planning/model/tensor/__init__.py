"""Tensor parallelism of a recorded model: divisible regions, found and verified first.

Read `rules.py` first (what divides together), then `regions.py` and `proof.py`. `split/tensor` carries it out; the
planner counts it.
"""
