"""Horovod's DistributedOptimizer over gloo."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.cluster.cluster import Cluster
from paceline.job.job import Job
from paceline_lab.systems.system import Command, Start
from paceline_lab.systems.torch_system import RUN, TorchSystem
from paceline_lab.systems.work import Work


def train(work: Work) -> None:
    """Train as Horovod's page on PyTorch does."""
    import horovod.torch as hvd

    hvd.init()
    model = work.model()
    optimizer = work.optimizer(model.parameters())
    schedule = work.schedule(optimizer)
    parameters = model.named_parameters()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=parameters, **work.settings)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for batch in work.batches(hvd.rank(), hvd.size()):
        optimizer.zero_grad()
        loss = work.loss(model, batch)
        loss.backward()
        optimizer.synchronize()
        work.clip(model)
        with optimizer.skip_synchronize():
            optimizer.step()
        schedule.step()
        work.took(loss)


class _Horovod(TorchSystem):
    """Its own launcher starts the ranks."""

    def refuses(self, job: Job, cluster: Cluster) -> str | None:
        """Emulated hosts have no ssh server, by which its launcher starts ranks elsewhere."""
        return "its launcher starts ranks on other hosts by ssh, which emulated hosts lack" if cluster.emulate else None

    def commands(self, start: Start) -> Sequence[Command]:
        """Ranks by horovodrun."""
        ranks = str(start.task.ranks)
        program = [str(start.python), "-m", RUN, self.train, str(start.folder)]
        launcher = [
            str(start.python),
            "-m",
            "horovod.runner.launch",
            "--gloo",
            "-np",
            ranks,
            "-H",
            f"localhost:{ranks}",
        ]
        return [Command([*launcher, *program])]


SYSTEM = _Horovod(
    name="horovod",
    title="Horovod",
    documentation="https://horovod.readthedocs.io/en/stable/pytorch.html",
    train=f"{__name__}:train",
    is_killed=False,  # see benchmarks/faults.py
    requirements=["build.txt", "horovod.txt"],
    takes_channels_last=False,  # it refuses tensors that are not contiguous
    build_environment={
        "CXX": str(Path(__file__).with_name("cxx20")),
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        "MAKEFLAGS": "-j2",
    },
)
