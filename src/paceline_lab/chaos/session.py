"""One chaos command: draw and play a schedule, check the run, and shrink failing schedules."""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import RunError
from paceline.files import private_folder, write_whole
from paceline.job.job import Job
from paceline.planning.arguments import cluster_to_run_on
from paceline.planning.check.plan_errors import PlanProblems, plan_errors
from paceline.planning.plan import Plan
from paceline.run.record.run import read_lines
from paceline_lab.chaos.faults import Injected, keep_mounts_private, refuse_impossible, small_disk
from paceline_lab.chaos.invariants import (
    Invariant,
    Reference,
    as_trained,
    check,
    difference,
    losses_of,
    reference,
    steps_that_take,
)
from paceline_lab.chaos.play import Played, Setting, play
from paceline_lab.chaos.schedule import Fault, Kind, Schedule, draw, shrink

EVERY_S = 10.0  # average interval between faults in seconds
_QUIET_S = 90.0  # seconds in addition to twice the deadline, for starts on a busy machine
_LEAST_FAULTS = 1


@dataclass(frozen=True)
class Found:
    """Results of a schedule that was played: the run and the checked invariants."""

    played: Played
    reference: Reference
    invariants: Sequence[Invariant]
    rows: Sequence[Row]

    @property
    def schedule(self) -> Schedule:
        """The schedule of the run."""
        return self.played.schedule

    @property
    def held(self) -> bool:
        """True if no invariant was violated."""
        return all(invariant.held for invariant in self.invariants)

    @property
    def details(self) -> dict[str, Any]:
        """All details of the run, as JSON values."""
        return {
            "schedule": msgspec.to_builtins(self.schedule),
            "held": self.held,
            "invariants": [asdict(invariant) for invariant in self.invariants],
            "losses": self.reference.why,
            "faults": [asdict(row) for row in self.rows],
            "not_made": [str(fault) for fault in self.played.not_made],
            "sizes": [asdict(course) for course in self.played.grown],
            "commands": [{"code": end.code, "time": end.time} for end in self.played.ends],
        }


class Session:
    """Runs of one job in one folder. Undisturbed runs are kept for reuse.

    Args:
        say: function that shows a line of progress.
    """

    def __init__(self, job: Job, hosts: int, folder: Path, say: Callable[[str], None]) -> None:
        self.job, self.hosts, self.folder, self.say = job, hosts, folder, say
        private_folder(folder)
        self.cluster: Path | None = None
        if hosts:
            self.cluster = folder / f"hosts-{hosts}.yaml"
            write_whole(self.cluster, f"emulate: {{hosts: {hosts}}}\n")

    def drawn(
        self, kinds: Sequence[Kind], seed: int, minutes: float, plan: str, steps: int | None, count: int | None
    ) -> Schedule:
        """Draw the schedule of a seed.

        Args:
            minutes: length of the run without faults. It is used if `steps` is None.
            count: number of faults; None draws one fault for every 10 s.

        Raises:
            PlanError: the plan cannot run the job on this machine.
            ClusterError: a kind of fault cannot be injected on this machine.
        """
        refuse_impossible(kinds, self.hosts)
        self._refuse(plan)
        self.say("short undisturbed run, for the number of steps")
        plan, in_time = self._steps(plan, minutes)
        count = count or max(_LEAST_FAULTS, len(kinds), round(minutes * 60 / EVERY_S))
        ranks = Plan.parse(plan).ranks
        return draw(kinds, seed, count=count, plan=plan, ranks=ranks, hosts=self.hosts, steps=steps or in_time)

    def _steps(self, plan: str, minutes: float) -> tuple[str, int]:
        """Return the plan, with float64 if possible, and the number of steps to train.

        In float64, a different order of summation barely changes the losses. A visible difference therefore indicates
        an error, even after thousands of steps.
        """
        parsed = Plan.parse(plan)
        wide = str(replace(parsed, precision="fp64"))
        if parsed.precision_for(self.job) == "fp32" and not self._problems(wide):
            with suppress(RunError):  # the model itself requires float32
                return wide, steps_that_take(self.job, wide, minutes, self.cluster, self.folder)
        return plan, steps_that_take(self.job, plan, minutes, self.cluster, self.folder)

    def tried(self, schedule: Schedule, name: str) -> Found:
        """Play a schedule in the folder `name`, and check the run."""
        kinds = tuple(dict.fromkeys(fault.kind for fault in schedule.faults))
        self._refuse(schedule.plan)
        refuse_impossible(kinds, self.hosts)
        job = as_trained(self.job, schedule.steps)
        undisturbed = reference(job, schedule.plan, self.cluster, self.folder, self.say)
        place = self.folder / name
        shutil.rmtree(place, ignore_errors=True)
        private_folder(place)
        write_whole(place / "job.yaml", job.to_yaml())
        schedule.write(place / "schedule.json")
        self.say(f"run under {len(schedule.faults)} faults in {place}")
        setting = Setting(place / "job.yaml", self.cluster, 2 * job.deadline_s + _QUIET_S, self.say)
        with self._disk(place, kinds, undisturbed) as disk:
            played = play(schedule, setting, place, disk)
            found = Found(played, undisturbed, check(played, undisturbed), rows(played, undisturbed))
        write_whole(place / "chaos.json", json.dumps(found.details, indent=1))
        return found

    def shrunk(self, found: Found, most_tries: int) -> Schedule:
        """Find a shorter schedule that violates one of the same invariants."""
        broken = {invariant.name for invariant in found.invariants if not invariant.held}

        def fails(faults: Sequence[Fault]) -> bool:
            self.say(f"shrinking: {len(faults)} of {len(found.schedule.faults)} faults")
            again = self.tried(found.schedule.with_only(faults), "shrinking")
            return any(not invariant.held and invariant.name in broken for invariant in again.invariants)

        return found.schedule.with_only(shrink(found.schedule.faults, fails, most_tries))

    @contextmanager
    def _disk(self, place: Path, kinds: Sequence[Kind], undisturbed: Reference) -> Iterator[Path]:
        if "disk-full" not in kinds:
            yield place
            return
        keep_mounts_private()
        with small_disk(place, undisturbed.run) as disk:
            yield disk

    def _refuse(self, plan: str) -> None:
        if problems := self._problems(plan):
            raise problems.error()

    def _problems(self, plan: str) -> PlanProblems:
        return plan_errors(self.job, plan, cluster=cluster_to_run_on(self.cluster))


_AGAIN = ("resume", "start")
_HEALED: Mapping[str, tuple[str, ...]] = {
    "slow": ("slow_rank_over",),
    "disk-full": ("checkpoint_saved", *_AGAIN),
    "corrupt": ("corruption", "checkpoint_saved", *_AGAIN),
}
_NAMED: Mapping[str, tuple[str, ...]] = {
    "slow": ("slow_rank", "balance"),
    "disk-full": ("checkpoint_failed", "lines_lost"),
    "corrupt": ("corruption", "checkpoint_damaged"),
}
_NAMED_LOSS = ("lost", "host_lost", "restart")
_WITHIN_S = 60.0  # seconds after a fault; later events do not count as a response


@dataclass(frozen=True)
class Row:
    """One fault and the reaction of the run.

    Times are in seconds after the fault. They are None if the event did not occur.
    """

    fault: str
    step: int
    hit: str
    named_s: float | None
    gap_s: float | None
    steps_lost: int
    healed_s: float | None
    losses_differ: float | None


def rows(played: Played, reference: Reference) -> list[Row]:
    """Return a row for each fault, in order."""
    lines = [line for file in played.run.glob("steps/rank-*.jsonl") for line in _numbered(file)]
    events = list(read_lines(played.run / "events.jsonl"))
    losses = losses_of(played.run)
    until = [*(injected.time for injected in played.made[1:]), float("inf")]
    limits = [named_until(injected, played.made[i:]) for i, injected in enumerate(played.made, 1)]
    made = zip(played.made, until, limits, strict=False)
    return [_row(*fault, lines, events, losses, played, reference) for fault in made]


def named_until(injected: Injected, later: Sequence[Injected]) -> float:
    """Return the time from which events may have been caused by a later fault.

    This holds for later faults with the same target that cause the same kinds of events.
    """
    fault, kinds = injected.fault, _NAMED.get(injected.fault.kind, _NAMED_LOSS)
    for other in later:
        of_ranks = fault.target == other.fault.target == "rank"
        alike = _NAMED.get(other.fault.kind, _NAMED_LOSS) == kinds
        if alike and not (of_ranks and fault.number != other.fault.number):
            return min(other.time, injected.time + _WITHIN_S)
    return injected.time + _WITHIN_S


def is_about(event: Mapping[str, Any], fault: Fault) -> bool:
    """Return False if an event is about a rank or host without the fault."""
    name, rank, host = str(event["event"]), event.get("rank", -1), event.get("number", -1)
    if fault.target in ("rank", "weights", "others"):
        if name in ("lost", "healed", "slow_rank", "corruption"):
            return bool(fault.number == rank) != (fault.target == "others")
        return name != "host_lost"
    if fault.target == "host" and fault.kind != "partition" and name == "host_lost":
        return bool(fault.number == host)
    return True


def _row(
    injected: Injected,
    until: float,
    limit: float,
    lines: Sequence[dict[str, Any]],
    events: Sequence[dict[str, Any]],
    losses: Mapping[int, float],
    played: Played,
    reference: Reference,
) -> Row:
    begin = injected.time
    ends = [end.time for end in played.ends if end.code]
    about = [event for event in events if is_about(event, injected.fault)]
    named = _first([*_times(about, _NAMED.get(injected.fault.kind, _NAMED_LOSS)), *ends], begin, limit)
    kinds = _HEALED.get(injected.fault.kind, ("healed", *_AGAIN))
    healed = _first(_times(about, kinds), begin + (named or 0.0), begin + _WITHIN_S) if named is not None else None
    healed = healed if healed is None or named is None else round(healed + named, 3)
    commits = sorted(line["time"] for line in lines)
    gaps = [(a, b) for a, b in itertools.pairwise(commits) if b > a]
    typical_s = statistics.median([line["step_s"] for line in lines]) if lines else 0.0
    window = min(until, begin + max((healed or named or 0.0), injected.fault.for_s) + 1.0)
    near = [b - a for a, b in gaps if a <= begin < b or (begin < a and b <= window)]
    again = [line["step"] for line in lines if line["again"] and begin < line["time"] < until]
    return Row(
        str(injected.fault),
        injected.step,
        injected.hit,
        named,
        round(max(max(near) - typical_s, 0.0), 3) if near else None,
        len(set(again)),
        healed,
        _differ(injected, until, lines, losses, reference),
    )


def _differ(
    injected: Injected, until: float, lines: Sequence[dict[str, Any]], losses: Mapping[int, float], reference: Reference
) -> float | None:
    """Return the largest relative difference of losses between a fault and the next fault."""
    steps = {line["step"] for line in lines if injected.time < line["time"] < until} & reference.losses.keys()
    first = reference.losses[min(reference.losses)]
    by = [difference(losses[step], reference.losses[step], first) for step in steps & losses.keys()]
    return float(f"{max(by):.3g}") if by else None


def _numbered(file: Path) -> list[dict[str, Any]]:
    """Return a rank's steps. The flag `again` is True for a repeated step."""
    seen: set[int] = set()
    found = []
    for line in read_lines(file):
        found.append(
            {"step": line["step"], "time": line["time"], "step_s": line["step_s"], "again": line["step"] in seen}
        )
        seen.add(line["step"])
    return found


def _times(events: Sequence[dict[str, Any]], kinds: Sequence[str]) -> list[float]:
    return [event["time"] for event in events if event["event"] in kinds]


def _first(times: Sequence[float], begin: float, limit: float) -> float | None:
    later = [time - begin for time in times if begin <= time < limit]
    return round(min(later), 3) if later else None
