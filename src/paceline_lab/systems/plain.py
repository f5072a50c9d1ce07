"""A plain PyTorch script of one process: what every speedup is against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline_lab.systems.system import Command, Start
from paceline_lab.systems.task import Steps
from paceline_lab.systems.torch_system import RUN, TorchSystem
from paceline_lab.systems.work import Work


def train(work: Work) -> None:
    """Train as the tutorials of PyTorch do."""
    model = work.model()
    optimizer = work.optimizer(model.parameters())
    schedule = work.schedule(optimizer)
    for batch in work.batches():
        optimizer.zero_grad()
        loss = work.loss(model, batch)
        loss.backward()
        work.clip(model)
        optimizer.step()
        schedule.step()
        work.took(loss)


class _Plain(TorchSystem):
    """One process, whatever the number of ranks."""

    def commands(self, start: Start) -> Sequence[Command]:
        """Python alone."""
        return [Command([str(start.python), "-m", RUN, self.train, str(start.folder)], start.places[0])]

    def steps(self, start: Start) -> Steps:
        """Steps that the process left in the folder."""
        return Steps.of_ranks(start.folder, 1)


SYSTEM = _Plain(
    name="plain",
    title="PyTorch, one process",
    documentation="https://docs.pytorch.org/tutorials/beginner/basics/optimization_tutorial.html",
    train=f"{__name__}:train",
)
# Its losses are those that every system's are compared with.
REFERENCE = replace(SYSTEM, name="reference", train="paceline_lab.systems.reference:train")
