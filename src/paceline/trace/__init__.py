"""Trace of a model's forward pass without memory: operations, blocks, shapes, and saved tensors.

Read `graph.py` first (the result), then `build.py` (its construction), then `dimensions.py` (the same from dimensions alone).
"""
