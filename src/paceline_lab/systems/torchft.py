"""torchft: every rank a replica group, which may come and go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.cluster.cluster import Cluster
from paceline.job.job import Job
from paceline_lab.systems.system import Command, Start
from paceline_lab.systems.torch_system import RUN, TorchSystem
from paceline_lab.systems.work import Work

LIGHTHOUSE_PORT = 1  # above the first port of a run


def train(work: Work) -> None:
    """Train as torchft's example of DDP does."""
    import os
    from datetime import timedelta

    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    number = int(os.environ["REPLICA_GROUP_ID"])
    model = work.model()
    inner = work.optimizer(model.parameters())

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def load(held: dict[str, Any]) -> None:
        model.load_state_dict(held["model"])
        inner.load_state_dict(held["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=work.task.ranks,
        replica_id=f"replica_{number}_",
        init_sync=False,  # all begin with the same weights
        hostname=os.environ["REPLICA_HOST"],
    )
    wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    schedule = work.schedule(inner)
    for batch in work.batches(number, work.task.ranks):
        optimizer.zero_grad()
        loss = work.loss(wrapped, batch)
        loss.backward()
        work.clip(model)
        optimizer.step()
        schedule.step()
        work.took(loss)
    manager.shutdown()


class _Torchft(TorchSystem):
    """A lighthouse, and torchrun for every replica group."""

    def refuses(self, job: Job, cluster: Cluster) -> str | None:
        """Emulated hosts share this machine's name, by which its ranks look for each other's stores."""
        return "its ranks find each other by the host's name, which emulated hosts share" if cluster.emulate else None

    def commands(self, start: Start) -> Sequence[Command]:
        """The lighthouse on the first host, and one group for each rank."""
        port, bind = start.port + LIGHTHOUSE_PORT, start.address if start.hosts else "127.0.0.1"
        binary = str(start.python.with_name("torchft_lighthouse"))
        options = ["--min_replicas", str(start.task.ranks), "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
        serves = Command([binary, "--bind", f"{bind}:{port}", *options], start.places[0], serves=True)
        return [serves, *(self._group(start, rank, f"http://{bind}:{port}") for rank in range(start.task.ranks))]

    def _group(self, start: Start, rank: int, lighthouse: str) -> Command:
        host = start.places[rank // start.ranks_per_host]
        port = start.port + LIGHTHOUSE_PORT + 1 + rank
        address = host.address if host else "127.0.0.1"
        words = [str(start.python), "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1"]
        words += [f"--master-addr={address}", f"--master-port={port}", "-m", RUN, self.train, str(start.folder)]
        variables = {"TORCHFT_LIGHTHOUSE": lighthouse, "REPLICA_GROUP_ID": str(rank), "REPLICA_HOST": address}
        return Command(words, host, variables)


SYSTEM = _Torchft(
    name="torchft",
    title="torchft",
    documentation="https://github.com/meta-pytorch/torchft",
    train=f"{__name__}:train",
    is_killed=False,  # see benchmarks/faults.py
    requirements=["torchft.txt"],
)
