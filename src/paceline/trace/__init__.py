"""What a model does in one forward pass, seen without memory: operations, blocks, shapes, and what the backward pass keeps.

Read `graph.py` first (what is found), then `build.py` (how), then `dimensions.py` (the same from dimensions alone).
"""
