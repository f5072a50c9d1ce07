"""Recovery of runs: training through generations, states in memory, and load balance.

Read `run.py` first, then `kept.py` and `mirror.py`; for balance, `balance.py` and `recutting.py`.
`elastic/membership.py` decides which ranks take part.
"""
