"""Context parallelism: each rank holds a part of every sequence.

Read `division.py` first, then `ring.py` (attention over all tokens) and `rows.py` (models whose masks need whole rows).
"""
