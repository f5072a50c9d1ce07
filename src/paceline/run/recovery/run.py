"""Training in one process of a run, through one or several generations."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace

import torch

from paceline.cluster.probe import telemetry_of
from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.comm.links import GroupLinks
from paceline.comm.process_group import abort_all
from paceline.device import is_accelerator, use, warm_up
from paceline.elastic.membership import Member, Start, StepBoundary
from paceline.elastic.place import is_mirrored
from paceline.engine.engine import RankEngine
from paceline.errors import CheckpointError, device_fault, note_xids
from paceline.rank_environment import LOCAL_RANK
from paceline.run.build import check_device, seed_all
from paceline.run.loop import Loop
from paceline.run.out_of_memory import shortage_explained
from paceline.run.process import stop_signals
from paceline.run.record.recorder import Board
from paceline.run.record.run import Run
from paceline.run.recovery.kept import Kept, KeptModel, KeptPart, common_start
from paceline.run.recovery.mirror import Mirror
from paceline.run.recovery.recutting import follows_times
from paceline.state.manifest import checkpoints
from paceline.wire.status import GenerationOver, StatusBoard, ends_generation, watch_generation


def run_rank_once(arguments: list[str]) -> None:
    """Train the run in directory `arguments[0]` as this process's rank, without recovery."""
    run = Run(arguments[0])
    with joined(deadline_s=run.job.deadline_s, transport=run.plan.transport) as group:
        train_in(run, group)


def train_in(run: Run, group: Group) -> None:
    """Train a run as one rank of `group`; every rank of the group calls this."""
    trainee = Trainee(run, None)
    with stop_signals(trainee.note_signal), closing(trainee.board):
        trainee.train(group)


def run_rank(arguments: list[str]) -> None:
    """Train the run in directory `arguments[0]`, through all generations of this process."""
    run = Run(arguments[0])
    member = Member.of_this_rank()
    trainee = Trainee(run, member)
    gc.freeze()  # modules, model and data live as long as the process, so the garbage collector need not scan them
    with watch_generation(member.is_over), stop_signals(trainee.note_signal), closing(trainee.board):
        ended = was_frozen = False
        while not ended:
            generation = member.next_generation()
            try:
                with joined(
                    deadline_s=run.job.deadline_s, transport=run.plan.transport, generation=generation
                ) as group:
                    ended = trainee.train(group)
            except Exception as error:
                if not ends_generation(error):
                    raise
            gc.collect()  # free the ended generation's engine, which has reference cycles
            if not was_frozen:
                was_frozen = True
                gc.freeze()  # also freeze modules that were imported during the first generation


class Trainee:
    """State, data and position that a process keeps through all generations.

    Args:
        member: membership of this process; None without recovery, when the run has only one generation.
    """

    def __init__(self, run: Run, member: Member | None) -> None:
        self.run, self.member = run, member
        self.kept: Kept
        self.engine: RankEngine | None = None
        if member is not None and is_mirrored(run.plan):
            self.kept = Mirror(run.job.checkpoint.memory_every_steps)
        else:
            self.kept = KeptPart() if run.plan.splits else KeptModel()
        if member is not None and not member.is_awaited():
            warm_up(use(int(os.environ.get(LOCAL_RANK, 0))))
            self.kept.prepare(run.job, run.plan)
        self.data = run.job.data.build(input_shape=run.job.model.input_shape(), seed=run.job.seed)
        self.boundary = StepBoundary()
        self.links: GroupLinks | None = None
        self.signal: str | None = None
        self.board = Board(run.path)

    def train(self, group: Group) -> bool:
        """Train as one rank of a generation's group; return True if the run has ended."""
        with shortage_explained(group.device, lambda: self.engine), _xids_noted(group.device):
            return self._train_generation(group)

    def _train_generation(self, group: Group) -> bool:
        check_device(self.run, group)
        group.links = self.links
        start = common_start(group, self.boundary, self.run.plan.ranks // self.run.plan.dp)
        saved = max((step for step, _ in checkpoints(self.run.checkpoints)), default=-1)
        start = self.kept.start(group, saved) or start
        ended, recut = self._train(group, start)
        while recut:
            StatusBoard.of_this_rank().mark("starting", self.boundary.step)
            gc.collect()  # free the weights of the previous cut's stages
            again = replace(start, boundary=replace(self.boundary, cut=recut), ready=[], behind=[], new=[], holders={})
            ended, recut = self._train(group, again, saved=True)
        return ended

    def _train(self, group: Group, start: Start, *, saved: bool = False) -> tuple[bool, str]:
        """Train with one pipeline cut; if `saved`, resume from a checkpoint.

        Returns:
            Whether the run has ended, and the cut with which it continues in this generation; "" if it does not.
        """
        run, begun = self.run, time.monotonic()
        # keep the number of microbatches: otherwise batch norm would see other parts of the global batch
        plan = replace(run.plan, dp=group.size // start.replica_size, cut=start.boundary.cut or run.plan.cut)
        engine = self.engine = self.kept.engine(run.job, plan, self.data, group, begins=start.begins)
        self.links = group.links
        if self.member is not None:
            engine.replica_state.corruption.members = self.member.generation.members
        ended, loop, has_state, broken = False, None, False, False
        try:
            if start.begins:
                seed_all(run.job.seed * 1_000_003 + 1 + engine.data_group.rank)
            elif not saved:
                self.kept.restore(engine, group, start)
                self.boundary, has_state = start.boundary, True
            loop = self._loop(engine, group, start)
            loop.recutting.built_s = time.monotonic() - begun
            resumed = not saved or loop.resumed(start.boundary)
            if not resumed and engine.step_count == 0:
                raise CheckpointError(
                    "checkpoint.gone",
                    "the checkpoint of step {step} was removed before it was read",
                    step=start.boundary.step,
                )
            boundary = None if start.begins or not resumed else start.boundary
            # from here on, the ranks cannot return to the previous cut
            self.boundary, has_state = boundary or StepBoundary(), boundary is not None
            self.kept.begin(engine, group, loop.events)
            ended = loop.run(boundary, recut=saved, has_position=bool(start.holders))
        except Exception as error:
            if not ends_generation(error):
                raise
            broken = True
            if group.interruption is not None:
                group.interruption.abort()
            self.kept.broken_off(engine)
            # abort at once, because closing a group would wait for data that peers have not acknowledged
            abort_all(0.0)
            if loop is not None:
                loop.checkpoints.writer.abandon()
        if loop is not None and loop.begun:
            self.boundary, self.signal, has_state = self._boundary(loop, start), loop.signal, True
        if has_state and not ended and self.member is not None:
            self.kept.keep(engine)
        if broken and self.kept.needs_all:
            self.boundary = StepBoundary()
        with suppress(Exception):  # other ranks of the group may be gone
            self.kept.end()
        with suppress(Exception):
            engine.close()
        self.engine = None
        return ended, loop.recutting.cut if loop is not None and not broken and not ended else ""

    def _loop(self, engine: RankEngine, group: Group, start: Start) -> Loop:
        loop = Loop(self.run, engine, self.data, group, board=self.board)
        loop.signal, loop.recutting.on = self.signal, follows_times(self.run.plan)
        if self.member is None:
            return loop
        loop.at_boundary, loop.another_is_wanted = lambda: self._at_boundary(loop), self.member.another_is_wanted
        if start.holders:
            loop.events("went_back", {"step": start.boundary.step, "lost_steps": start.lost_steps})
        for rank in () if start.begins else start.new:
            loop.events("healed", {"rank": self.member.generation.members[rank], "step": start.boundary.step})
        return loop

    def _at_boundary(self, loop: Loop) -> None:
        if loop.engine.sync_interrupted:
            raise GenerationOver(
                "recovery.generation_over", "the generation ended in step {step}", step=loop.engine.step_count
            )
        self.kept.at_boundary(loop.engine, loop.boundary)

    def _boundary(self, loop: Loop, start: Start) -> StepBoundary:
        generation = 0 if self.member is None else self.member.generation.number
        boundary = replace(loop.boundary(), generation=generation)
        if boundary.step == start.boundary.step:
            boundary = replace(boundary, generation=start.boundary.generation, outcome=start.boundary.outcome)
        return replace(boundary, ready=generation if self.kept.ready else -1)

    def note_signal(self, name: str) -> None:
        """Record a signal, so that it stops the run in the next generation."""
        self.signal = name


@contextmanager
def _xids_noted(device: torch.device) -> Iterator[None]:
    """Add the driver's XIDs to an error of the device.

    CUDA's own text often does not name the cause.
    """
    telemetry = telemetry_of(device) if is_accelerator(device) else None
    if telemetry is not None:
        telemetry.watch_xids()
    try:
        yield
    except Exception as error:
        if telemetry is not None and device_fault(error):
            note_xids(error, telemetry.xids())
        raise
