"""Trace of a model's forward pass without memory: operations, blocks, shapes, and saved tensors.

Read `graph.py` first (the planner's result), then `build.py` (its construction), then `dimensions.py` (the same from
dimensions alone). `recording/` is the graph that the splits read, `tensor/` what tensor parallelism divides of it.
"""
