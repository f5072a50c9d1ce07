"""Tensor parallelism of a recorded model: what can be divided, found and verified before anything is changed.

Read `rules.py` first (what divides together), then `regions.py` and `proof.py`. `split/tensor` carries it out; the planner counts it.
"""
