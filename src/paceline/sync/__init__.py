"""How the replicas of a model are kept in agreement: one file per rule, all with the methods of `SyncRule`."""

from paceline.sync.allreduce import AllReduce
from paceline.sync.rule import Replica, SyncRule

__all__ = ["RULES", "AllReduce", "Replica", "SyncRule"]

RULES: dict[str, type[SyncRule]] = {"allreduce": AllReduce}
