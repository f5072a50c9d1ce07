"""The cluster that a job runs on: hosts, their devices, and the links between them."""

from paceline.cluster.cluster import Cluster, Device, Emulate, Host, Link
from paceline.cluster.discover import discover, environment
from paceline.cluster.named import cluster_from, named_cluster

__all__ = ["Cluster", "Device", "Emulate", "Host", "Link", "cluster_from", "discover", "environment", "named_cluster"]
