"""Reading data: each rank's samples, their order, and their batches.

Read `loader.py` first, then `deal.py` (a user's own DataLoader, dealt to the ranks).
"""
