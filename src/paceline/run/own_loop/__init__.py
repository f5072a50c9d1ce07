"""The engine of users' own training loops, which `paceline.setup` returns.

Read `setup.py` first, then `engine.py`.
"""
