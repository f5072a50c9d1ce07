"""TensorFlow's MultiWorkerMirroredStrategy: a worker for each rank."""

from __future__ import annotations

from collections.abc import Sequence

from paceline_lab.systems.system import Command, Start
from paceline_lab.systems.tensorflow_system import DOCUMENTATION, TensorFlowSystem, addresses, lay_out


class _MultiWorker(TensorFlowSystem):
    def commands(self, start: Start) -> Sequence[Command]:
        """The script once for each worker, each with its TF_CONFIG."""
        lay_out(start)
        cluster = {"worker": addresses(start, start.task.ranks)}
        configs = [{"cluster": cluster, "task": {"type": "worker", "index": rank}} for rank in range(start.task.ranks)]
        return [self.command(start, rank // start.ranks_per_host, config) for rank, config in enumerate(configs)]


SYSTEM = _MultiWorker(
    name="tf-multiworker",
    title="TF MultiWorker",
    documentation=f"{DOCUMENTATION}#multiworkermirroredstrategy",
    program="multiworker.py",
)
