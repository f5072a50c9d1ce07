"""Synchronisation rules, which keep the replicas of a model in agreement: one file each.

All have the methods of `SyncRule`.
"""

from paceline.sync.allreduce import AllReduce
from paceline.sync.registry import attach, build_rule
from paceline.sync.rule import Agreement, Replica, SyncRule
from paceline.sync.start import broadcast_state

__all__ = ["Agreement", "AllReduce", "Replica", "SyncRule", "attach", "broadcast_state", "build_rule"]
