"""The engine for a training loop of the user's own: what `paceline.setup` returns.

Read `setup.py` first, then `loop.py`.
"""
