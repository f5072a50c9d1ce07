"""One training step of one rank: forward, backward, agreement with the other replicas, update.

Read `engine.py` first, then `agreement.py`, then `split_model.py` (where the model is divided over ranks).
"""
