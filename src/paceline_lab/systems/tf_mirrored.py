"""TensorFlow's MirroredStrategy: replicas in one process."""

from __future__ import annotations

from paceline.cluster.cluster import Cluster
from paceline.job.job import Job
from paceline_lab.systems.tensorflow_system import DOCUMENTATION, TensorFlowSystem


class _Mirrored(TensorFlowSystem):
    def refuses(self, job: Job, cluster: Cluster) -> str | None:
        """It is for the devices of one host."""
        return "MirroredStrategy is for one host" if cluster.emulate else super().refuses(job, cluster)


SYSTEM = _Mirrored(
    name="tf-mirrored",
    title="TF Mirrored",
    documentation=f"{DOCUMENTATION}#mirroredstrategy",
    program="mirrored.py",
)
