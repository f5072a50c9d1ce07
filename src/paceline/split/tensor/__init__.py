"""Tensor parallelism: regions of any model whose matrices are sharded, found and verified automatically.

Read `division.py` first, then `trace.py` (the graph that regions are found in), `regions.py` and `proof.py`.
"""
