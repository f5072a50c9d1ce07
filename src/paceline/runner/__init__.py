"""The verb `train`: choose and check a plan, start its ranks, and watch them.

Read `train.py` first, then `preflight.py`.
"""
