"""Which samples each rank reads, in which order, and how they become batches.

Read `loader.py` first, then `deal.py` (a user's own DataLoader, dealt to the ranks).
"""
