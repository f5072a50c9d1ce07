"""All-reduce algorithms over point-to-point messages: ring, hierarchical.

Read `algorithms.py` first (which one is taken), then `ring.py`.
"""
