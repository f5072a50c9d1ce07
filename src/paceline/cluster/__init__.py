"""Where a job runs: hosts, their devices, and the links between them."""

from paceline.cluster.cluster import Cluster, Device, Emulate, Host, Link
from paceline.cluster.discover import discover, environment

__all__ = ["Cluster", "Device", "Emulate", "Host", "Link", "discover", "environment"]
