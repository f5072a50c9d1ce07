"""Synchronization rules, which keep the replicas of a model consistent.

Each file contains one rule. Every rule has the methods of `SyncRule`.
"""

from paceline.sync.allreduce import AllReduce
from paceline.sync.rule import Reduction, Replica, SyncRule, acts_after_step, attach, broadcast_state, build_rule

__all__ = [
    "AllReduce",
    "Reduction",
    "Replica",
    "SyncRule",
    "acts_after_step",
    "attach",
    "broadcast_state",
    "build_rule",
]
