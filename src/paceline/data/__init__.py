"""Data loading: which samples each rank reads, in which order, and in which batches.

Read `loader.py` first, then `deal.py` (which divides a user's own DataLoader over the ranks).
"""
