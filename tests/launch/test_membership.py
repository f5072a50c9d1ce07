"""The recovery protocol in virtual time: any order of losses, messages and steps keeps the run exact and going.

`Membership` and the two decisions of a process (which epoch to enter next, from which border to go on) are the real
ones. Processes, status board and collectives are played: a collective ends on each rank by itself, once all members of
its epoch have come, so a rank may have taken a step that others break off. Where a replica is divided over several
processes each has a part of the model, and can take over only the same one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
    """One played process: what it does, and the model that it has, as the steps and epochs that made it.

    `taken` and `ready` are those of its `Border`.
    """

    doing: str = "starting"  # joining, meeting, computing, summing, agreeing, leaving, dead
    epoch: Epoch = field(default_factory=lambda: Epoch(-1, ()))
    step: int = -1
    taken: int = -1
    ready: int = -1
    model: tuple[tuple[int, int], ...] = ()

    @property
    def border(self) -> Border:
        return Border(step=self.step, epoch=self.taken, ready=self.ready, acted=self.step)

    def take(self, epoch: int) -> None:
        """Take the next step, by gradients of the ranks of an epoch."""
        self.step, self.taken, self.ready = self.step + 1, epoch, -1
        self.model += ((self.step, epoch),)


class World:
    """Processes, their launcher, and what is shared between them."""

    def __init__(self, processes: int, replica_size: int = 1) -> None:
        self.processes = [Process() for _ in range(processes)]
        self.membership, self.replica_size = Membership(processes, replica_size=replica_size), replica_size
        self.epochs = {0: self.membership.current}
        self.board = 0, 0
        self.unseen: set[int] = set()  # dead, and the launcher has not looked
        self.met: dict[int, dict[int, Border]] = {}
        self.sums: dict[tuple[int, int], dict[int, tuple[bool, tuple[tuple[int, int], ...]]]] = {}
        self.agreed: dict[tuple[int, int], set[int]] = {}
        self.committed = self.takes = 0
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
            case "agreeing":
                self.agree(number)

    def enter(self, number: int) -> None:
        process = self.processes[number]
        to = next_number(*self.board, process.epoch.number)
        if to is not None and number in self.epochs[to].members:
            process.epoch, process.doing = self.epochs[to], "meeting"
            self.met.setdefault(to, {})[number] = process.border
        elif to is not None:
            process.epoch, process.doing = Epoch(-1, ()), "joining"

    def meet(self, number: int) -> None:
        process = self.processes[number]
        here, members = self.met[process.epoch.number], process.epoch.members
        if set(here) != set(members):
            self.leave_if_over(process)
            return
        start, rank = newest_of([here[member] for member in members], self.replica_size), process.epoch.rank_of(number)
        if start.border.step < 0:
            process.step, process.taken, process.ready, process.model = 0, process.epoch.number, -1, ()
        elif rank in start.ready:
            process.take(start.border.epoch)
        elif rank in start.behind:
            holder = start.holders_of_part(rank, len(members))[0]
            giver = self.processes[members[holder * self.replica_size + rank % self.replica_size]]
            # what is handed over is what the giver had at the border: it must live, and still be there
            if giver.doing in ("dead", "meeting") or giver.epoch != process.epoch:
                self.leave_if_over(process)
                return
            assert giver.step >= start.border.step
            process.model = tuple(entry for entry in giver.model if entry[0] <= start.border.step)
            process.step, process.taken = start.border.step, start.border.epoch
        process.ready = -1
        process.doing = "computing"

    def sum(self, number: int) -> None:
        process = self.processes[number]
        key = process.epoch.number, process.step + 1
        posted = self.sums[key]
        if set(posted) != set(process.epoch.members):
            self.leave_if_over(process)
            return
        models = {model for _, model in posted.values()}
        assert len(models) == 1, "gradients of different weights are summed"
        self.agreed.setdefault(key, set()).add(number)
        process.doing = "agreeing"

    def agree(self, number: int) -> None:
        process = self.processes[number]
        key = process.epoch.number, process.step + 1
        # what a dead rank sent last may be lost on the way to some
        if self.agreed[key] != set(process.epoch.members) or (self.is_over(process) and number % 2):
            if self.is_over(process):
                process.doing = "leaving"
                process.ready = process.epoch.number if self.replica_size > 1 else -1
            return
        process.take(process.epoch.number)
        self.committed = max(self.committed, process.step)
        self.takes += 1
        process.doing = "leaving" if any(wants for wants, _ in self.sums[key].values()) else "computing"

    def leave_if_over(self, process: Process) -> None:
        if self.is_over(process):
            process.doing = "leaving"

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
        found = {((p.taken, p.step), p.model) for p in self.processes if p.step >= 0 and p.doing != "dead"}
        assert len({step for step, _ in found}) == len(found), "two ranks of one step have different models"


def play(processes: int, seed: int, events: int, kills: float, replica_size: int) -> World:
    """A world after so many random events, checked after each."""
    world, random = World(processes, replica_size), Random(seed)
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
    """Let all go on in turn, without further losses; returns the steps taken meanwhile, of each rank."""
    for number in range(len(world.processes)):
        world.launch(number)
    before = world.takes
    for _ in range(80):
        for number in range(len(world.processes)):
            world.advance(number)
            world.launch(number)
            world.check()
    return world.takes - before


@given(
    st.integers(1, 4),
    st.sampled_from([1, 1, 2, 3]),
    st.integers(0, 2**32),
    st.integers(0, 400),
    st.sampled_from([0.0, 0.01, 0.05, 0.15]),
)
@settings(max_examples=200, deadline=None)
def test_whatever_is_lost_when_the_others_go_on_with_the_same_model(
    replicas: int, replica_size: int, seed: int, events: int, kills: float
) -> None:
    world = play(replicas * replica_size, seed, events, kills, replica_size)
    taken = settle(world)
    alive = {n for n, p in enumerate(world.processes) if p.doing != "dead"}
    whole = {n for n in alive if world.membership.replica_of(n) <= alive}
    assert world.membership.hopeless is not bool(whole)
    if whole:
        assert taken > 5 * len(whole), "the run stands still"
        assert {world.processes[n].epoch.number for n in whole} == {world.membership.current.number}, "left behind"
        assert set(world.membership.current.members) == whole


@given(st.integers(2, 4), st.sampled_from([1, 2, 3]), st.integers(0, 2**32), st.integers(0, 300))
@settings(max_examples=120, deadline=None)
def test_no_step_is_lost_while_one_replica_that_took_it_lives(
    replicas: int, replica_size: int, seed: int, events: int
) -> None:
    world = World(replicas * replica_size, replica_size)
    random, spared = Random(seed), range(replica_size)
    for _ in range(events):
        number = random.randrange(len(world.processes))
        chance = random.random()
        if chance < 0.05 and number not in spared:
            world.kill(number)
        elif chance < 0.4:
            world.launch(number)
        else:
            world.advance(number)
        world.check()
        assert all(world.processes[n].step >= world.committed - 1 for n in spared)
    settle(world)
    assert min(world.processes[n].step for n in spared) >= world.committed - 1


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


def test_a_replica_that_lost_a_rank_is_left_out_and_joins_when_it_is_whole() -> None:
    membership = Membership(6, replica_size=2)
    membership.lost(3, 0.0)
    assert membership.current.members == (0, 1, 4, 5)
    entered = dict.fromkeys(range(6), 1)
    membership.note(entered, {2})
    assert membership.wanted is None
    membership.note(entered, {2, 3})
    assert membership.newest.members == (0, 1, 2, 3, 4, 5)


def test_parts_of_broken_replicas_go_on_together_from_the_newest_step_that_they_have_of_every_part() -> None:
    membership = Membership(4, replica_size=2)
    membership.lost(0, 0.0)
    membership.lost(3, 0.0)
    found = []
    for waiting in ({0, 1}, {0, 1, 2, 3}):
        membership.note({}, waiting)
        found.append(membership.current.members)
    assert found == [(), (0, 1, 2, 3)], "rank 2 has the part that rank 1 has not"
    kept = Border(step=7, epoch=0)
    start = newest_of([Border(), kept, kept, Border()], replica_size=2)
    assert (start.border, start.behind) == (kept, [0, 3])
    assert [start.holders_of_part(rank, 4) for rank in range(4)] == [[1], [0], [1], [0]]
    assert newest_of([Border(), kept, Border(), Border()], replica_size=2).border.step == -1, "from the disk"


def test_a_rank_takes_a_step_by_itself_only_if_another_one_took_it_with_the_same_gradients() -> None:
    took, broken_off = Border(step=7, epoch=2), Border(step=6, epoch=2, ready=2)
    assert newest_of([took, broken_off], replica_size=2).ready == [1]
    assert newest_of([took, took, replace(broken_off, ready=1), took], replica_size=2).behind == [2]


@pytest.mark.parametrize(
    ("current", "wanted", "own", "to"), [(0, 0, -1, 0), (3, 4, 3, 4), (3, 3, 3, None), (5, 5, 3, 5), (3, 4, -1, 3)]
)
def test_the_newest_epoch_is_entered_next(current: int, wanted: int, own: int, to: int | None) -> None:
    assert next_number(current, wanted, own) == to
