"""Recovery of runs whose ranks fail or lag: membership, states in memory, balance.

Read `run.py` first, then `member.py`, `step_boundary.py` and `handover.py`, then `mirror.py`; of balance,
`balance.py` and `recut.py`, which decide, and then `balancing.py` and `recutting.py`, which act.
"""
