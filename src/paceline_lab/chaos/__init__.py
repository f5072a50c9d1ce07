"""Seeded fault injection into a real run, with checks of paceline's guarantees (`paceline chaos`).

Read `schedule.py` first, then `play.py`, which runs a schedule, and `invariants.py`.
"""
