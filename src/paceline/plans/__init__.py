"""Plans: every parallel choice of a run, explicit, in one line of text.

They are plain data that imports nothing heavy. Read `plan.py` first.
"""
