"""Schedules of faults, which are drawn from a seed and stored in files.

The times of faults are fractions of the run's steps, so a schedule works on fast and slow machines alike.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar, get_args

import msgspec

from paceline.errors import JobError
from paceline.files import read_text, write_whole

Kind = Literal["kill", "stop", "oom", "partition", "cut", "slow", "disk-full", "corrupt", "clock", "store"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Phase = Literal["any", "start", "evaluate", "checkpoint", "recovery"]
Target = Literal["rank", "others", "ranks", "host", "command", "weights", "checkpoint", "disk"]

OF_HOSTS = ("partition", "cut")  # kinds of faults that need emulated hosts
_LONGEST_S = {"stop": 8.0, "slow": 8.0, "cut": 12.0, "partition": 12.0, "disk-full": 5.0, "oom": 5.0, "store": 6.0}
_SHORTEST_S = 0.5
_AT_ONCE, _IN_RECOVERY, _IN_START, _IN_PHASE = 0.12, 0.12, 0.08, 0.25  # probabilities
_WHOLE_HOST, _COMMAND = 0.3, 0.1  # fractions of the kills
_OTHERS, _ALL = 0.08, 0.04  # fractions of the faults on ranks that hit all ranks but one, or all ranks
_MANY = ("kill", "stop", "oom")  # kinds of faults that sometimes hit several ranks
_LAST = 0.9  # fraction of the steps; the recovery from a later fault might not be observed
_FILE_LIMIT = 2**20


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault in a schedule.

    Attributes:
        at: fraction of the run's steps after which the fault is due.
        during: phase of the run in which the fault should be injected. The fault waits for this phase for a limited
            time.
        target: what the fault hits; `others` means all ranks but one.
        number: index of the rank or host that is hit. For `others`, it is the rank that is spared. For a partition, it
            is the number of hosts that are cut off together.
        for_s: seconds after which the fault is reverted; 0 if the fault is not reverted.
    """

    kind: Kind
    at: Annotated[float, msgspec.Meta(ge=0, le=1)]
    target: Target
    number: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 0
    during: Phase = "any"
    for_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0

    def __str__(self) -> str:
        lasts = f" for {self.for_s:g} s" if self.for_s else ""
        where = {
            "rank": f"rank {self.number}",
            "others": f"all ranks but {self.number}",
            "ranks": "all ranks",
            "host": f"host {self.number}",
            "weights": f"weights of rank {self.number}",
        }
        hit = where.get(self.target, f"the {self.target}")
        if self.kind == "partition":
            hit = f"{self.number} of the hosts"
        return f"{self.kind} {hit}{lasts}" + (f", during {self.during}" if self.during != "any" else "")


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Faults in the order in which they are due, with the settings of their run.

    Attributes:
        steps: number of steps of the run.
        hosts: number of emulated hosts; 0 runs the ranks directly on this machine.
    """

    seed: int
    plan: Annotated[str, msgspec.Meta(max_length=1000)]
    steps: Annotated[int, msgspec.Meta(ge=1, le=10**9)]
    hosts: Annotated[int, msgspec.Meta(ge=0, le=250)]
    faults: Annotated[tuple[Fault, ...], msgspec.Meta(max_length=10_000)]

    def with_only(self, faults: Sequence[Fault]) -> Schedule:
        """Return a schedule for the same run with other faults."""
        return msgspec.structs.replace(self, faults=tuple(faults))

    def write(self, path: Path) -> None:
        """Write the schedule as JSON."""
        write_whole(path, msgspec.json.format(msgspec.json.encode(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> Schedule:
        """Read a schedule from a file.

        Raises:
            JobError: the file cannot be read, or does not contain a schedule.
        """
        try:
            schedule = msgspec.json.decode(read_text(path, _FILE_LIMIT), type=cls)
        except OSError as error:
            raise JobError(
                "file.unreadable", "{file} cannot be read: {reason}", file=path, reason=error.strerror or error
            ) from error
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            text = f"{path} is not a schedule of faults: {error}. Use a file that `paceline chaos` has written."
            raise JobError("chaos.schedule_invalid", "{reason}", reason=text) from error
        return schedule


def draw(kinds: Sequence[Kind], seed: int, *, count: int, plan: str, ranks: int, hosts: int, steps: int) -> Schedule:
    """Draw a schedule of random faults.

    If `count` is large enough, every kind of fault occurs at least once. Some faults coincide. Other faults occur while
    the run starts, evaluates, saves a checkpoint, or recovers from the previous fault.
    """
    chance = random.Random(seed)
    rounds = [chance.sample(kinds, len(kinds)) for _ in range(-(-count // len(kinds)))]
    wanted = list(itertools.chain.from_iterable(rounds))[:count]
    chance.shuffle(wanted)
    moments = sorted(chance.uniform(0.02, _LAST) for _ in wanted)
    faults: list[Fault] = []
    for number, (kind, at) in enumerate(zip(wanted, moments, strict=True)):
        during: Phase = "any"
        lot = chance.random()
        if number == 0 and lot < _IN_START * len(wanted):
            at, during = 0.0, "start"
        elif number and lot < _AT_ONCE:
            at = faults[-1].at
        elif number and lot < _AT_ONCE + _IN_RECOVERY:
            at, during = faults[-1].at, "recovery"
        elif lot < _AT_ONCE + _IN_RECOVERY + _IN_PHASE:
            during = chance.choice(("evaluate", "checkpoint"))
        faults.append(_drawn(chance, kind, at, during, ranks, hosts))
    return Schedule(seed, plan, steps, hosts, tuple(sorted(faults, key=lambda fault: fault.at)))


def _drawn(chance: random.Random, kind: Kind, at: float, during: Phase, ranks: int, hosts: int) -> Fault:
    target: Target = "rank"
    number = chance.randrange(ranks)
    if kind == "cut":
        target, number = "host", chance.randrange(hosts)
    elif kind == "partition":
        target, number = "host", chance.randint(1, hosts // 2)
    elif kind == "kill" and hosts > 1 and chance.random() < _WHOLE_HOST:
        target, number = "host", chance.randrange(1, hosts)  # host 0 is spared, because it runs the command
    elif kind == "store" or (kind == "kill" and chance.random() < _COMMAND):
        target, number = "command", 0
    elif kind == "disk-full":
        target, number = "disk", 0
    elif kind == "corrupt":
        target = chance.choice(("weights", "checkpoint"))
    elif kind in _MANY and ranks > 2 and (lot := chance.random()) < _OTHERS + _ALL:
        target = "others" if lot < _OTHERS else "ranks"
    longest = _LONGEST_S.get(kind, 0.0)
    for_s = round(chance.uniform(_SHORTEST_S, longest), 2) if longest else 0.0
    return Fault(kind, round(at, 4), target, number, during, for_s)


T = TypeVar("T")


def shrink(items: Sequence[T], fails: Callable[[Sequence[T]], bool], most_tries: int = 32) -> list[T]:
    """Find a minimal sublist of `items` that still fails.

    The sublist is minimal because it passes without any single one of its items.

    Args:
        items: list that fails as a whole.
        fails: function that returns True if a sublist fails. It is called at most once for each sublist.
        most_tries: maximum number of calls of `fails`. After these, the shortest failing sublist so far is returned.
    """
    failing = list(range(len(items)))
    seen: dict[tuple[int, ...], bool] = {}

    def still_fails(part: list[int]) -> bool:
        key = tuple(part)
        if not part or (key not in seen and len(seen) >= most_tries):
            return False
        if key not in seen:
            seen[key] = fails([items[i] for i in part])
        return seen[key]

    pieces = 2
    while len(failing) > 1:
        size = -(-len(failing) // pieces)
        parts = [failing[i : i + size] for i in range(0, len(failing), size)]
        rests = [[i for i in failing if i not in part] for part in parts]
        found = next((part for part in (*parts, *rests) if len(part) < len(failing) and still_fails(part)), None)
        if found is not None:
            failing, pieces = found, 2 if found in parts else max(pieces - 1, 2)
        elif size == 1:
            break
        else:
            pieces = min(2 * pieces, len(failing))
    return [items[i] for i in failing]
