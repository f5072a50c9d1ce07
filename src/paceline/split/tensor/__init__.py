"""Tensor parallelism: regions of any model whose matrices can be divided over ranks, found and proven, not annotated.

Read `division.py` first, then `trace.py` (what a region is found in), `regions.py` and `proof.py`.
"""
