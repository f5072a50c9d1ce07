"""Recovery from failures within a run: states in memory, healing, membership.

Read `memory_state.py` first.
"""
