"""Every parallel choice of a run, explicit, in one line of text: plain data that imports nothing heavy.

Read `plan.py` first.
"""
