"""Reading data: each rank's samples, their order, and their batches.

Read `loader.py` first, then `deal.py` (division of a user's own DataLoader over the ranks).
"""
