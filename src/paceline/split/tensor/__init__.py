"""Tensor parallelism: regions of any model whose matrices are sharded, found and verified automatically.

Read `division.py` first, then `paceline/planning/model/tensor` (how regions are found and verified), `layers.py` and
`sequence.py`.
"""
