"""Typical step of a run: its parts on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median

from paceline.engine.meter import PARTS
from paceline.errors import RunError
from paceline.planning.plan import Plan
from paceline.planning.sync_info import sync_info
from paceline.report.parts import typical_parts
from paceline.report.run_record import RunRecord
from paceline.run.record.run import WARM_UP_STEPS, Run, Speed, differences, timed, work_of_run

Parts = Mapping[str, float]


@dataclass(frozen=True)
class Measured:
    """Typical step of a run.

    Attributes:
        ranks: seconds of each part of the median step, by rank.
        samples: of a step, over all ranks.
        local_samples: of each rank in a step.
        speed: speed of the run, as on its other pages.
    """

    run: Run
    ranks: Mapping[int, Parts]
    samples: float
    local_samples: Mapping[int, float]
    speed: Speed

    @property
    def plan(self) -> Plan:
        """The plan that was run."""
        return self.run.plan

    @cached_property
    def served(self) -> bool:
        """True if servers own the parameters: one worker records for all, and no parts."""
        return sync_info(self.plan.sync).served

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds of each part in the mean over the ranks."""
        return {part: fmean(parts[part] for parts in self.ranks.values()) for part in PARTS}

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())

    @property
    def devices(self) -> int:
        """Devices that it used: accelerators, or on CPUs the cores of the ranks' threads."""
        plan, cluster = self.plan, self.run.cluster
        if cluster.has_accelerators:
            return plan.ranks
        host = cluster.hosts_in_use[0]
        threads = plan.threads_for(host, max(cluster.ranks_per_host(plan.ranks)))
        return min(plan.ranks * threads, sum(host.cores for host in cluster.hosts_in_use))

    @cached_property
    def compute_s(self) -> float:
        """Compute of a typical rank, without what only a slow one takes.

        That of data-parallel ranks is by the pace of the fastest.
        """
        if not self._alike:
            return self.parts["compute"]
        return self._pace_s * fmean(self.local_samples.values())

    @cached_property
    def even_parts(self) -> dict[str, float]:
        """Parts of a rank that is as fast as the fastest.

        All that slower ones take longer is waiting for them.
        """
        lag_s = self.parts["compute"] - self.compute_s
        return self.parts | {"compute": self.compute_s, "imbalance": self.parts["imbalance"] + lag_s}

    @property
    def one_compute_s(self) -> float:
        """Compute of a whole step at the pace of these ranks, one after another.

        It is at most that of one device.
        """
        each = max(len(self.ranks), 1)
        if not self._alike:
            return sum(parts["compute"] for parts in self.ranks.values()) * self.plan.ranks / each
        return self._pace_s * self.samples

    @property
    def _alike(self) -> bool:
        """True if ranks differ in their samples only."""
        return self.plan.ranks == self.plan.data_ranks and all(self.local_samples.values())

    @property
    def _pace_s(self) -> float:
        return min(parts["compute"] / self.local_samples[rank] for rank, parts in self.ranks.items())


def measured(run: Run) -> Measured:
    """Typical step of a run.

    Raises:
        RunError: the run is federated, or has too few steps.
    """
    record = RunRecord.read(run)
    if record.noun != "step":
        raise RunError(f"{run.path} is a federated run: its rounds are not steps on devices of one cluster")
    found = {rank: (lines, typical_parts(lines)) for rank, lines in record.ranks.items()}
    ranks = {rank: parts for rank, (_, parts) in found.items() if parts is not None}
    if 0 not in ranks:
        raise RunError(
            f"{run.path} has no step with times after the first {WARM_UP_STEPS}, which are warm-up: there is nothing "
            "to compare yet"
        )
    lines = {rank: timed(found[rank][0]) for rank in ranks}
    local = {rank: median(float(line.get("local_samples", 0)) for line in of) for rank, of in lines.items()}
    speed = Speed.of(record.ranks[0], run.training_time_s)
    assert speed is not None, "rank 0 has steps that count"
    return Measured(run, ranks, speed.samples, local, speed)


def same_work(one: Run, many: Run) -> None:
    """Refuse a run of one device that did other work.

    Raises:
        RunError: with every key of the job that differs, or since it has several ranks.
    """
    if one.plan.ranks > 1:
        raise RunError(f"{one.path} has plan {one.plan}: name a run of one rank to compare with one device")
    if differing := list(differences(work_of_run(many), work_of_run(one))):
        raise RunError(f"{one.path} did other work: {'; '.join(differing)}")
