"""The recovery protocol in virtual time: processes, their launcher and their collectives, played.

`Membership` and the two decisions of a process (which generation to enter next, from which boundary to go on) are the
real ones. A collective ends on each rank by itself, once all members of its generation have come, so a rank may have
taken a step that others break off. Where a replica is divided over several processes each has a part of the model, and
can take over only the same one.

A model is a number: that of the model before its newest step, and of the generation in which that was taken, under
which it is listed. So two models are the same exactly if all their steps are, and what could be wrong with one is
asserted where it changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from paceline.elastic.membership import WITHIN_S, Membership, Start, StepBoundary, newest_of
from paceline.wire.status import Generation, next_number

NOWHERE = Generation(-1, ())
MOMENTS_S = 0.0, 0.1, WITHIN_S / 3, WITHIN_S  # from one loss to the next
ROUNDS, STEPS = 80, 6  # after the last loss all have taken so many steps in so many rounds


@dataclass(slots=True)
class Process:
    """One played process; `taken` and `ready` are those of its `StepBoundary`, and it is not in generation `out_of`."""

    doing: str = "starting"  # joining, meeting, computing, summing, agreeing, leaving, dead
    generation: Generation = NOWHERE
    step: int = -1
    taken: int = -1
    ready: int = -1
    model: int = 0
    out_of: int = -1


@dataclass(slots=True)
class Sum:
    """One all-reduce: how many have sent their gradients, and how many have those of all."""

    model: int
    posted: int = 0
    agreed: int = 0
    wants: bool = False
    same: bool = True


@dataclass(slots=True)
class Models:
    """Every model that came to be; number 0 is the one that a run begins with."""

    numbers: dict[tuple[int, int], int] = field(default_factory=dict)
    before: list[int] = field(default_factory=lambda: [0])
    steps: list[int] = field(default_factory=lambda: [0])

    def after_step(self, model: int, generation: int) -> int:
        """The model after one more step, by gradients of the ranks of a generation."""
        number = self.numbers.setdefault((model, generation), len(self.before))
        if number == len(self.before):
            self.before.append(model)
            self.steps.append(self.steps[model] + 1)
        return number

    def at(self, step: int, model: int) -> int:
        """What a model was at a step before."""
        while self.steps[model] > step:
            model = self.before[model]
        return model


class World:
    """Processes, their launcher, and what is shared between them."""

    def __init__(self, replicas: int, replica_size: int = 1) -> None:
        count = replicas * replica_size
        self.processes = [Process() for _ in range(count)]
        self.membership, self.replica_size = Membership(count, replica_size=replica_size), replica_size
        self.generations = {0: self.membership.current}
        self.board = 0, 0
        self.entered = dict.fromkeys(range(count), -1)  # of those that live
        self.joining: set[int] = set()
        self.news = True  # the launcher has not seen all of the board
        self.unseen: set[int] = set()  # dead, and the launcher has not looked
        self.going: set[int] = set()  # those of them whose host is lost
        self.away: set[int] = set()  # not started before their host is back
        self.met: dict[int, dict[int, StepBoundary]] = {}
        self.starts: dict[int, Start] = {}
        self.sums: dict[tuple[int, int], Sum] = {}
        self.models = Models()
        self.made: dict[tuple[int, int], int] = {}  # the model of each step and the generation it was taken in
        self.committed = self.takes = 0
        self.clock_s = 0.0

    def advance(self, number: int) -> None:
        """Have one process do its next thing, if it can."""
        process = self.processes[number]
        doing = process.doing
        if doing == "summing":
            self.sum(process)
        elif doing == "agreeing":
            self.agree(process, number)
        elif doing == "computing":
            self.post(process)
        elif doing == "meeting":
            self.meet(process, number)
        elif doing != "dead":
            self.enter(process, number)

    def enter(self, process: Process, number: int) -> None:
        """Go to the next generation, or say that the process waits to join."""
        to = next_number(*self.board, process.generation.number)
        if to is None or to <= process.out_of:
            return
        self.news = True
        self.joining.discard(number)
        if number in self.generations[to].members:
            process.generation, process.doing = self.generations[to], "meeting"
            boundary = StepBoundary(
                step=process.step, generation=process.taken, ready=process.ready, acted=process.step
            )
            self.met.setdefault(to, {})[number] = boundary
        else:
            process.generation, process.doing, process.out_of = NOWHERE, "joining", to
            self.joining.add(number)
        self.entered[number] = process.generation.number

    def meet(self, process: Process, number: int) -> None:
        """Agree with the others of a generation on where it goes on from, and take over what is missing."""
        generation = process.generation
        here, members = self.met[generation.number], generation.members
        if len(here) < len(members):
            self.leave_if_over(process)
            return
        start = self.starts.get(generation.number)
        if start is None:
            start = newest_of([here[member] for member in members], self.replica_size)
            self.starts[generation.number] = start
        rank = members.index(number)
        if start.boundary.step < 0:
            process.step, process.taken, process.model = 0, generation.number, 0
        elif rank in start.ready:
            self.take(process, start.boundary.generation)
        elif rank in start.behind:
            holder = start.holders_of_part(rank, len(members))[0]
            giver = self.processes[members[holder * self.replica_size + rank % self.replica_size]]
            # what is handed over is what the giver had at the boundary: it must live, and still be there
            if giver.doing in ("dead", "meeting") or giver.generation is not generation:
                self.leave_if_over(process)
                return
            assert giver.step >= start.boundary.step, "the boundary is ahead of who has it"
            process.step, process.taken = start.boundary.step, start.boundary.generation
            process.model = self.models.at(process.step, giver.model)
        process.ready = -1
        process.doing = "computing"
        self.check(process)

    def post(self, process: Process) -> None:
        """Send gradients, and whether another generation is wanted."""
        key = process.generation.number, process.step + 1
        one = self.sums.get(key)
        if one is None:
            one = self.sums[key] = Sum(process.model)
        one.posted += 1
        one.wants |= self.board[1] > process.generation.number
        one.same &= one.model == process.model
        process.doing = "summing"

    def sum(self, process: Process) -> None:
        """Have the gradients of all."""
        one = self.sums[process.generation.number, process.step + 1]
        if one.posted < len(process.generation.members):
            self.leave_if_over(process)
            return
        assert one.same, "gradients of different weights are summed"
        one.agreed += 1
        process.doing = "agreeing"

    def agree(self, process: Process, number: int) -> None:
        """Take the step once all have the gradients of all."""
        one, over = self.sums[process.generation.number, process.step + 1], self.is_over(process)
        # what a dead rank sent last may be lost on the way to some
        if one.agreed < len(process.generation.members) or (over and number % 2):
            if over:
                process.doing = "leaving"
                process.ready = process.generation.number if self.replica_size > 1 else -1
            return
        self.take(process, process.generation.number)
        self.committed = max(self.committed, process.step)
        self.takes += 1
        process.doing = "leaving" if one.wants else "computing"

    def take(self, process: Process, generation: int) -> None:
        """Take the next step, by gradients of the ranks of a generation."""
        process.model = self.models.after_step(process.model, generation)
        process.step, process.taken, process.ready = process.step + 1, generation, -1
        self.check(process)

    def check(self, process: Process) -> None:
        """All that have one step have the same model, made of every step once."""
        assert self.models.steps[process.model] == process.step, "a step is missing, or was taken twice"
        made = self.made.setdefault((process.taken, process.step), process.model)
        assert made == process.model, "two ranks of one step have different models"

    def check_spared(self, spared: int) -> None:
        """No step is lost that the first so many processes took, which were never ended."""
        for number in range(spared):
            assert self.processes[number].step >= self.committed - 1, "a step is lost"

    def leave_if_over(self, process: Process) -> None:
        if self.is_over(process):
            process.doing = "leaving"

    def is_over(self, process: Process) -> bool:
        return self.board[0] > process.generation.number

    def kill(self, number: int, *, host: bool) -> None:
        """End one process, if it lives; `host`: with its host."""
        process = self.processes[number]
        if process.doing != "dead":
            process.doing, self.news = "dead", True
            self.unseen.add(number)
            self.joining.discard(number)
            del self.entered[number]
            if host:
                self.going.add(number)

    def come_back(self, number: int) -> None:
        """Have the host of one process come back, if it is away."""
        if number in self.away:
            self.away.discard(number)
            self.membership.left_out.discard(number)
            self.start(number)

    def notice(self, number: int, *, pauses: bool) -> None:
        """Have the host of one process leave after a step, or stay after all; `pauses`: have all wait after a step."""
        self.news = True
        if pauses:
            self.membership.pausing = not self.membership.pausing
        else:
            self.membership.departing ^= {number}

    def start(self, number: int) -> None:
        self.processes[number], self.entered[number], self.news = Process(), -1, True

    def look(self, numbers: set[int]) -> None:
        """Have the launcher see ends of these processes, if it has not, and look at the board."""
        if ended := numbers & self.unseen:
            self.unseen -= ended
            again = self.membership.lost_together(ended, self.clock_s)
            self.announce()
            self.away |= again & self.going
            self.membership.left_out |= ended & self.going
            for number in again - self.going:
                self.start(number)
            self.going -= ended
            self.news = True
        if self.news:
            membership = self.membership
            current, wanted = membership.current, membership.wanted
            membership.note(self.entered, self.joining)
            self.news = membership.current is not current or membership.wanted is not wanted
            if self.news:
                self.announce()

    def announce(self) -> None:
        current, newest = self.membership.current, self.membership.newest
        for generation in (current, newest):
            assert self.generations.setdefault(generation.number, generation) == generation, "a generation has changed"
        self.board = current.number, newest.number


def played(
    seed: int, replicas: int, replica_size: int, events: int, kills: float, spared: int = 0, notices: float = 0.0
) -> World:
    """A world after so many random events, in which nothing was wrong, and after all have settled.

    Args:
        kills: share of the events that end a process, every fourth with its host.
        spared: processes, from 0 on, that are never ended and never leave: no step is lost that they took.
        notices: share of the events in which a host gets a notice, every fourth that of the coordinator.
    """
    world, random = World(replicas, replica_size), Random(seed).random
    count = replicas * replica_size
    everybody = set(range(count))
    for _ in range(events):
        place = random() * count
        number = int(place)
        chance = place - number
        if chance < kills:
            if number >= spared:
                drawn = int(random() * 16)
                world.clock_s += MOMENTS_S[drawn % 4]
                world.kill(number, host=drawn >= 12)
        elif chance < kills + 0.01:
            world.come_back(number)
        elif chance < kills + 0.01 + notices:
            if (pauses := random() < 0.25) or number >= spared:
                world.notice(number, pauses=pauses)
        elif chance < 0.4:
            # the ends of several processes, as of one host, may be seen together
            world.look(everybody if chance < 0.2 else {number})
        else:
            world.advance(number)
        if spared:
            world.check_spared(spared)
    settle(world, everybody)
    world.check_spared(spared)
    return world


def settle(world: World, everybody: set[int]) -> None:
    """Let all go on in turn, without further losses, until all that can train do."""
    membership, processes = world.membership, world.processes
    membership.departing.clear()
    membership.pausing, world.news = False, True
    world.look(everybody)
    alive = {number for number, process in enumerate(processes) if process.doing != "dead"}
    whole = {number for number in alive if membership.replica_of(number) <= alive}
    assert membership.hopeless is not bool(whole), "a run without a whole replica goes on, or one with one does not"
    if not whole:
        return
    until = world.takes + STEPS * len(whole)
    for _ in range(ROUNDS):
        for number in everybody:
            world.advance(number)
            world.look({number})
        if world.takes >= until and set(membership.current.members) == whole and membership.wanted is None:
            break
    assert world.takes >= until, "the run stands still"
    assert set(membership.current.members) == whole, "some are left out"
    found = {processes[number].generation.number for number in whole}
    assert found == {membership.current.number}, "some are left behind"
