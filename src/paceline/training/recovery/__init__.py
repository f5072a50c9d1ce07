"""Recovery from failures within a run: states in memory, healing, membership; and balance between replicas.

Read `memory_state.py` first.
"""
