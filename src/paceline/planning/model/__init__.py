"""Traces of a model's forward pass on tensors without data.

Read `graph.py` first, which defines the trace that the planner uses. `model_info.py` creates this trace from a model,
and `transformer.py` creates it from dimensions alone. `record.py` records the graph that the splits read, and `tensor/`
divides this graph.
"""
