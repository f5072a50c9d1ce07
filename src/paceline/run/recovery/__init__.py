"""Recovery of runs whose ranks fail or lag: training through generations, states in memory, balance.

Read `run.py` first, then `kept.py` and `mirror.py`; of balance, `balance.py` and `recutting.py`. Who takes part is
decided in `elastic/membership.py`.
"""
