"""Diagnosis of a run: one device beside it, what holds it back, what to try.

Read `diagnosis.py` first, then `predicted.py`, then `suggestions.py`.
"""
