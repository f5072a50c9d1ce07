"""Explanations of a plan: where its time goes, what would change it, how it scales.

Read `explain.py` first; `changes.py` and `scaling.py` search again for other hardware or choices.
"""
