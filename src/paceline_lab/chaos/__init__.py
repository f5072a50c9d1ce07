"""Faults on a real run by a seeded schedule, and its promises checked (`paceline chaos`).

Read `schedule.py` first, then `play.py`, which carries one out, and `invariants.py`.
"""
