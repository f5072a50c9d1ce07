"""Simulation of federated training in one process: thousands of clients, many at once.

Read `run.py` first, then `batched.py`, which trains clients side by side, and `deal.py`, which divides the data.
"""
