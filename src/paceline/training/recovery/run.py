"""Training by one process of a run that recovers, in epoch after epoch."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch
from torch import nn

from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.comm.c10d.process_group import abort_all
from paceline.comm.link_speed import GroupLinks
from paceline.epoch import ends_epoch, watch_epoch
from paceline.training.build import build_engine, built, check_device, seed_all
from paceline.training.loop import Loop
from paceline.training.record.run import Run
from paceline.training.recovery.handover import Border, agree_on_start, hand_over
from paceline.training.recovery.member import Member
from paceline.training.recovery.undo import StepUndo
from paceline.training.stop_signals import stop_signals


def run_rank(arguments: list[str]) -> None:
    """Train the run in the directory `arguments[0]`, in all epochs with this process."""
    run = Run(arguments[0])
    member = Member.of_this_rank()
    trainee = Trainee(run, member)
    with watch_epoch(member.is_over), stop_signals(trainee.note_signal):
        ended = False
        while not ended:
            epoch = member.next_epoch()
            try:
                with joined(deadline_s=run.job.deadline_s, transport=run.plan.transport, epoch=epoch) as group:
                    ended = trainee.train(group)
            except Exception as error:
                if not ends_epoch(error):
                    raise


class Trainee:
    """Model, optimizer, data and position, which a process keeps from epoch to epoch.

    Only whole models: each process is a replica.
    """

    def __init__(self, run: Run, member: Member) -> None:
        self.run, self.member = run, member
        seed_all(run.job.seed)
        model = built(run.job, run.plan)
        assert isinstance(model, nn.Module), "recovery in place is for whole models"
        self.model, self.undo = model, StepUndo(model)
        self.data = run.job.data.build(input_shape=run.job.model.input_shape(), seed=run.job.seed)
        self.optimizer: torch.optim.Optimizer | None = None
        self.border = Border()
        self.links: GroupLinks | None = None
        self.signal: str | None = None

    def train(self, group: Group) -> bool:
        """Train as one rank of an epoch's group; True if the run has ended."""
        run = self.run
        check_device(run, group)
        group.links = self.links
        start = agree_on_start(group, self.border)
        # as many microbatches as before, or batch norms would see other parts of the global batch
        plan, begins = replace(run.plan, dp=group.size), start.border.step < 0
        if not begins and self.optimizer is None:
            self.optimizer = run.job.optimizer.build(self.model.parameters(), fused=plan.fused)
        engine = build_engine(run.job, plan, self.model, self.data, group, None if begins else self.optimizer)
        self.optimizer, self.links = engine.optimizer, group.links
        engine.replica_state.corruption.members = self.member.epoch.members
        loop = None
        try:
            if begins:
                seed_all(run.job.seed * 1_000_003 + 1 + engine.data_group.rank)
            elif start.behind:
                hand_over(engine, group, start.source, start.behind)
                self.border = start.border
            loop = Loop(run, engine, self.data, group)
            loop.signal, loop.at_border = self.signal, lambda: self.undo.remember(engine.step_count)
            loop.another_is_wanted = self.member.another_is_wanted
            for rank in () if begins else start.new:
                loop.events("healed", {"rank": self.member.epoch.members[rank], "step": start.border.step})
            ended = loop.run(None if begins else start.border)
        except Exception as error:
            if not ends_epoch(error):
                raise
            # at once: groups that are closed wait for what peers have not acknowledged
            abort_all(0.0)
            if loop is not None:
                self.undo.undo(engine.step_count)
                loop.checkpoints.writer.abandon()
            ended = False
        if loop is not None and loop.begun:
            self.border, self.signal = loop.border(), loop.signal
        with suppress(Exception):  # its ranks may be gone
            engine.close()
        return ended

    def note_signal(self, name: str) -> None:
        """Have a signal between two epochs stop the run in the next."""
        self.signal = name
