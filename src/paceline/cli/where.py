"""The option --cluster of commands that start ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.cluster.cluster import Cluster


def to_run_on(text: str | None) -> Cluster | None:
    """The cluster of a file; None, this machine, where no file is named.

    Raises:
        ClusterError: the file cannot be read, or what is named is from the catalogue of hardware, where nothing can
            run.
    """
    from paceline.cluster.discover import to_run_on as checked
    from paceline.cluster.named import cluster_from

    return checked(cluster_from(text)) if text is not None else None
