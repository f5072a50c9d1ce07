"""Trace of a model's forward pass without memory: operations, blocks, shapes, and saved tensors.

Read `graph.py` first (the trace that the planner uses), then `model_info.py` (its construction), then `transformer.py`
(the same from dimensions alone). `record.py` records the graph that the splits read; `tensor/` divides it.
"""
