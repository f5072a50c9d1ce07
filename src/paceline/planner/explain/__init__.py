"""What a person is told about a plan: where its time goes, what would change it, how it scales.

Read `explain.py` first; `changes.py` and `scaling.py` ask what other hardware or choices would bring.
"""
