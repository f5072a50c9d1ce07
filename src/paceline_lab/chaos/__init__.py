"""Seeded faults on a real run, and a check of what paceline promises (`paceline chaos`).

Read `schedule.py` first, then `play.py`, which carries out a schedule, and `invariants.py`.
"""
