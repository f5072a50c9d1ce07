"""The verb `train`: choose a plan, make sure that it can start, start its ranks, and watch them.

Read `train.py` first, then `preflight.py`.
"""
