"""One training step of one rank: forward, backward, reduction over the replicas, update.

Read `engine.py` first, then `reduction.py`, then `split_model.py` (where the model is divided over ranks).
"""
