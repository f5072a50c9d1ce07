"""The recovery protocol in virtual time: any order of losses, messages and steps keeps the run exact and going.

`Membership` and the two decisions of a process (which epoch to enter next, from which border to go on) are the real
ones. Processes, status board and collectives are played: a collective ends on each rank by itself, once all members of
its epoch have come, so a rank may have taken a step that others break off.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.epoch import Epoch
from paceline.launch.membership import MOST_LOSSES, WITHIN_S, Membership
from paceline.training.recovery.handover import Border, newest_of
from paceline.training.recovery.member import next_number


@dataclass
class Process:
    """One played process: what it does, and the model that it has, as the steps and samples that made it."""

    doing: str = "starting"  # joining, meeting, computing, summing, dead
    epoch: Epoch = field(default_factory=lambda: Epoch(-1, ()))
    step: int = -1
    model: tuple[tuple[int, int], ...] = ()


class World:
    """Processes, their launcher, and what is shared between them."""

    def __init__(self, processes: int) -> None:
        self.processes = [Process() for _ in range(processes)]
        self.membership = Membership(processes)
        self.epochs = {0: self.membership.current}
        self.board = 0, 0
        self.unseen: set[int] = set()  # dead, and the launcher has not looked
        self.met: dict[int, dict[int, Border]] = {}
        self.sums: dict[tuple[int, int], dict[int, tuple[bool, tuple[tuple[int, int], ...]]]] = {}
        self.committed = 0
        self.clock_s = 0.0
        self.given_up = False

    def advance(self, number: int) -> None:
        """Have one process do its next thing, if it can."""
        process = self.processes[number]
        match process.doing:
            case "starting" | "joining" | "leaving":
                self.enter(number)
            case "meeting":
                self.meet(number)
            case "computing":
                wants = self.board[1] > process.epoch.number
                key = process.epoch.number, process.step + 1
                self.sums.setdefault(key, {})[number] = wants, process.model
                process.doing = "summing"
            case "summing":
                self.sum(number)

    def enter(self, number: int) -> None:
        process = self.processes[number]
        to = next_number(*self.board, process.epoch.number)
        if to is not None and number in self.epochs[to].members:
            process.epoch, process.doing = self.epochs[to], "meeting"
            self.met.setdefault(to, {})[number] = Border(step=process.step, acted=process.step)
        elif process.doing == "starting":
            process.doing = "joining"

    def meet(self, number: int) -> None:
        process = self.processes[number]
        here = self.met[process.epoch.number]
        if set(here) != set(process.epoch.members):
            if self.is_over(process):
                process.doing = "leaving"
            return
        start = newest_of([here[member] for member in process.epoch.members])
        giver = self.processes[process.epoch.members[start.source]]
        if process.epoch.rank_of(number) in start.behind:
            # what is handed over is what the giver had at the border: it must live, and still be there
            if giver.doing == "dead" or giver.epoch != process.epoch:
                process.doing = "leaving" if self.is_over(process) else process.doing
                return
            assert giver.step >= start.border.step
            process.model = tuple(entry for entry in giver.model if entry[0] <= start.border.step)
            process.step = start.border.step
        process.step = max(process.step, 0)
        process.doing = "computing"

    def sum(self, number: int) -> None:
        process = self.processes[number]
        key = process.epoch.number, process.step + 1
        posted = self.sums[key]
        if set(posted) != set(process.epoch.members):
            if self.is_over(process):
                process.doing = "leaving"
            return
        models = {model for _, model in posted.values()}
        assert len(models) == 1, "gradients of different weights are summed"
        process.model += ((process.step + 1, len(process.epoch.members)),)
        process.step += 1
        self.committed = max(self.committed, process.step)
        process.doing = "leaving" if any(wants for wants, _ in posted.values()) else "computing"

    def is_over(self, process: Process) -> bool:
        return self.board[0] > process.epoch.number

    def kill(self, number: int) -> None:
        if self.processes[number].doing != "dead":
            self.processes[number].doing = "dead"
            self.unseen.add(number)

    def launch(self, number: int) -> None:
        """Have the launcher see one end, if it has not, or look at the board."""
        if number in self.unseen:
            self.unseen.discard(number)
            again = self.membership.lost(number, self.clock_s)
            self.announce()
            if again:
                self.processes[number] = Process()
        alive = {n: p for n, p in enumerate(self.processes) if p.doing != "dead"}
        entered = {n: p.epoch.number for n, p in alive.items()}
        self.membership.note(entered, {n for n, p in alive.items() if p.doing == "joining"})
        self.announce()

    def announce(self) -> None:
        current, newest = self.membership.current, self.membership.newest
        for epoch in (current, newest):
            assert self.epochs.setdefault(epoch.number, epoch) == epoch, "an epoch has changed"
        self.board = current.number, newest.number

    def check(self) -> None:
        """Every rank of one step has the same model, made of every step once."""
        for process in self.processes:
            if process.step >= 0 and process.doing != "dead":
                assert [step for step, _ in process.model] == list(range(1, process.step + 1))
        by_step = {(p.step, p.model) for p in self.processes if p.step >= 0 and p.doing != "dead"}
        assert len({step for step, _ in by_step}) == len(by_step), "two ranks of one step have different models"


def play(processes: int, seed: int, events: int, kills: float) -> World:
    """A world after so many random events, checked after each."""
    world, random = World(processes), Random(seed)
    for _ in range(events):
        number = random.randrange(processes)
        chance = random.random()
        world.clock_s += random.choice((0.0, 0.1, WITHIN_S / 3))
        if chance < kills:
            world.kill(number)
        elif chance < 0.4:
            world.launch(number)
        else:
            world.advance(number)
        world.check()
    return world


def settle(world: World) -> int:
    """Let all go on in turn, without further losses; returns the steps taken meanwhile."""
    for number in range(len(world.processes)):
        world.launch(number)
    before = max((p.step for p in world.processes if p.doing != "dead"), default=0)
    for _ in range(60):
        for number in range(len(world.processes)):
            world.advance(number)
            world.launch(number)
            world.check()
    return max((p.step for p in world.processes if p.doing != "dead"), default=0) - before


@given(st.integers(1, 5), st.integers(0, 2**32), st.integers(0, 400), st.sampled_from([0.0, 0.01, 0.05, 0.15]))
@settings(max_examples=150, deadline=None)
def test_whatever_is_lost_when_the_others_go_on_with_the_same_model(
    processes: int, seed: int, events: int, kills: float
) -> None:
    world = play(processes, seed, events, kills)
    taken = settle(world)
    alive = [p for p in world.processes if p.doing != "dead"]
    if alive:
        assert taken > 5, "the run stands still"
        assert {p.epoch.number for p in alive} == {world.membership.current.number}, "some are left behind"
        assert len(world.membership.current.members) == len(alive)


@given(st.integers(2, 5), st.integers(0, 2**32), st.integers(0, 300))
@settings(max_examples=80, deadline=None)
def test_no_step_is_lost_while_one_rank_that_took_it_lives(processes: int, seed: int, events: int) -> None:
    world = World(processes)
    random, spared = Random(seed), 0
    for _ in range(events):
        number = random.randrange(processes)
        chance = random.random()
        if chance < 0.05 and number != spared:
            world.kill(number)
        elif chance < 0.4:
            world.launch(number)
        else:
            world.advance(number)
        assert world.processes[spared].step >= world.committed - 1
    settle(world)
    assert min(p.step for p in world.processes if p.doing != "dead") >= world.committed - 1


def test_a_process_that_is_lost_three_times_in_an_hour_is_left_out() -> None:
    membership = Membership(3)
    assert [membership.lost(1, at_s) for at_s in (0.0, 10.0)] == [True] * (MOST_LOSSES - 1)
    assert not membership.lost(1, 20.0)
    assert membership.current.members == (0, 2)
    assert membership.lost(2, WITHIN_S * 2), "one loss of another is no reason"


def test_processes_that_are_lost_together_are_left_out_in_one_epoch() -> None:
    membership = Membership(4)
    assert membership.lost_together({1, 3}, 0.0) == {1, 3}
    assert membership.current == Epoch(1, (0, 2))


def test_losses_of_long_ago_do_not_count() -> None:
    membership = Membership(2)
    assert all(membership.lost(1, day * 86_400.0) for day in range(20))


def test_the_first_that_comes_back_after_all_were_lost_goes_on_alone() -> None:
    membership = Membership(2)
    found = []
    for process in (0, 1):
        membership.lost(process, 0.0)
        found.append(membership.current.members)
    membership.note({}, {1})
    assert [*found, membership.current.members] == [(1,), (), (1,)]


@pytest.mark.parametrize(
    ("current", "wanted", "own", "to"), [(0, 0, -1, 0), (3, 4, 3, 4), (3, 3, 3, None), (5, 5, 3, 5), (3, 4, -1, 3)]
)
def test_the_newest_epoch_is_entered_next(current: int, wanted: int, own: int, to: int | None) -> None:
    assert next_number(current, wanted, own) == to
