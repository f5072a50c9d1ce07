"""One chaos command: a schedule is drawn, played, judged, and shrunk where it fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.cluster.cluster import Cluster
from paceline.cluster.discover import to_run_on
from paceline.errors import PlanError, RunError
from paceline.files import private_folder, write_whole
from paceline.job.job import Job
from paceline.planning.check.check_plan import check_plan
from paceline.planning.plan import Plan
from paceline_lab.chaos.faults import keep_mounts_private, refuse_impossible, small_disk
from paceline_lab.chaos.growth import Course
from paceline_lab.chaos.invariants import Invariant, Reference, as_trained, check, reference, steps_that_take
from paceline_lab.chaos.play import Played, Setting, play
from paceline_lab.chaos.report import Row, as_json, rows
from paceline_lab.chaos.schedule import Fault, Kind, Schedule, draw, shrink

EVERY_S = 10.0  # a fault, on average
_QUIET_S = 90.0  # beyond twice the deadline: a start on a busy machine
_LEAST_FAULTS = 1


@dataclass(frozen=True)
class Wanted:
    """Wishes of a chaos command.

    Attributes:
        steps: of each run; None takes as many as fill `minutes` where nothing happens.
        count: of faults; None takes one for every 10 s.
    """

    job: Job
    kinds: Sequence[Kind]
    seed: int
    minutes: float
    plan: str
    hosts: int
    steps: int | None
    count: int | None
    folder: Path


@dataclass(frozen=True)
class Found:
    """A schedule that was played, and how its run was judged."""

    schedule: Schedule
    invariants: Sequence[Invariant]
    rows: Sequence[Row]
    why: str
    grown: Sequence[Course]
    details: dict[str, Any]

    @property
    def held(self) -> bool:
        """True if every invariant was."""
        return all(invariant.held for invariant in self.invariants)


class Session:
    """Runs of one job in one folder, which keeps undisturbed ones for next time.

    Args:
        say: shows a line of what goes on.
    """

    def __init__(self, job: Job, hosts: int, folder: Path, say: Callable[[str], None]) -> None:
        self.job, self.hosts, self.folder, self.say = job, hosts, folder, say
        private_folder(folder)
        self.cluster: Path | None = None
        if hosts:
            self.cluster = folder / f"hosts-{hosts}.yaml"
            write_whole(self.cluster, f"emulate: {{hosts: {hosts}}}\n")

    def drawn(self, wanted: Wanted) -> Schedule:
        """The schedule of a seed.

        Raises:
            PlanError: the plan cannot run the job here.
            ClusterError: a kind of fault cannot be made here.
        """
        refuse_impossible(wanted.kinds, self.hosts)
        self._refuse(wanted.plan)
        self.say("short undisturbed run, for the number of steps")
        plan, steps = self._steps(wanted.plan, wanted.minutes)
        steps = wanted.steps or steps
        count = wanted.count or max(_LEAST_FAULTS, len(wanted.kinds), round(wanted.minutes * 60 / EVERY_S))
        ranks = Plan.parse(plan).ranks
        return draw(wanted.kinds, wanted.seed, count=count, plan=plan, ranks=ranks, hosts=self.hosts, steps=steps)

    def _steps(self, plan: str, minutes: float) -> tuple[str, int]:
        """The plan, in float64 where possible, and the number of steps that take so long.

        Sums in another order then differ so little that a loss that differs tells of a fault, over thousands of steps.
        """
        parsed = Plan.parse(plan)
        wide = str(replace(parsed, precision="fp64"))
        if parsed.precision_for(self.job) == "fp32" and not self._reasons(wide):
            with suppress(RunError):  # the model itself asks for float32
                return wide, steps_that_take(self.job, wide, minutes, self.cluster, self.folder)
        return plan, steps_that_take(self.job, plan, minutes, self.cluster, self.folder)

    def tried(self, schedule: Schedule, name: str) -> Found:
        """Play a schedule in a folder of that name, and judge the run."""
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
            invariants = check(played, undisturbed)
            found = self._found(played, undisturbed, invariants)
        write_whole(place / "chaos.json", json.dumps(found.details, indent=1))
        return found

    def shrunk(self, found: Found, most_tries: int) -> Schedule:
        """The shortest schedule that still breaks an invariant that was broken."""
        broken = {invariant.name for invariant in found.invariants if not invariant.held}

        def fails(faults: Sequence[Fault]) -> bool:
            self.say(f"shrinking: {len(faults)} of {len(found.schedule.faults)} faults")
            again = self.tried(found.schedule.with_only(faults), "shrinking")
            return any(not invariant.held and invariant.name in broken for invariant in again.invariants)

        return found.schedule.with_only(shrink(found.schedule.faults, fails, most_tries))

    def _found(self, played: Played, undisturbed: Reference, invariants: Sequence[Invariant]) -> Found:
        faults = rows(played, undisturbed)
        details = as_json(played, undisturbed, invariants, faults)
        return Found(played.schedule, invariants, faults, undisturbed.why, played.grown, details)

    @contextmanager
    def _disk(self, place: Path, kinds: Sequence[Kind], undisturbed: Reference) -> Iterator[Path]:
        if "disk-full" not in kinds:
            yield place
            return
        keep_mounts_private()
        with small_disk(place, undisturbed.run) as disk:
            yield disk

    def _refuse(self, plan: str) -> None:
        if reasons := self._reasons(plan):
            raise PlanError("\n".join(reasons))

    def _reasons(self, plan: str) -> list[str]:
        cluster = to_run_on(Cluster.load(self.cluster) if self.cluster else None)
        return list(check_plan(Plan.parse(plan), self.job, cluster))
