"""One training step of one rank: forward, backward, reduction over the replicas, update.

Read `engine.py` first, then `reduction.py`, then `split_model.py` (for models that are divided over ranks).
"""
