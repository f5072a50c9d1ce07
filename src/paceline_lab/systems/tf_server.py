"""TensorFlow's ParameterServerStrategy: asynchronous workers and one parameter server."""

from __future__ import annotations

from collections.abc import Sequence

from paceline_lab.systems.system import Command, Start
from paceline_lab.systems.tensorflow_system import DOCUMENTATION, TensorFlowSystem, addresses, lay_out


class _Server(TensorFlowSystem):
    def commands(self, start: Start) -> Sequence[Command]:
        """Workers, a server and the coordinator; the last two are on the first host."""
        lay_out(start)
        ranks = start.task.ranks
        server, chief = (address for address in addresses(start, ranks + 2)[ranks:])
        host = addresses(start, 1)[0].partition(":")[0]
        server, chief = (f"{host}:{address.partition(':')[2]}" for address in (server, chief))
        cluster = {"worker": addresses(start, ranks), "ps": [server], "chief": [chief]}

        def task(kind: str, number: int, place: int) -> Command:
            config = {"cluster": cluster, "task": {"type": kind, "index": number}}
            return self.command(start, place, config, serves=kind != "chief")

        workers = [task("worker", rank, rank // start.ranks_per_host) for rank in range(ranks)]
        return [*workers, task("ps", 0, 0), task("chief", 0, 0)]


SYSTEM = _Server(
    name="tf-server",
    title="TF ParameterServer",
    documentation=f"{DOCUMENTATION}#parameterserverstrategy",
    program="server.py",
)
