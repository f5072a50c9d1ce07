"""Synchronisation rules, which keep the replicas of a model in agreement: one file each.

All have the methods of `SyncRule`.
"""

from paceline.sync.allreduce import AllReduce
from paceline.sync.registry import attach, build_rule
from paceline.sync.rule import Replica, SyncRule
from paceline.sync.start import start_alike

__all__ = ["AllReduce", "Replica", "SyncRule", "attach", "build_rule", "start_alike"]
