"""Successive halving over combinations of plans and settings.

A combination is a plan with a subset of the settings that may make it faster. The first plan is measured in every
round, so that each ratio compares step times of the same few seconds. A Gaussian process models the logarithm of each
combination's ratio to the first plan. The effects of the plan and of each setting add up, and pairs of settings have
small additional effects. Before anything is measured, the mean of the process comes from the predictions of the plans.

1. Each other plan is measured for one or two rounds. Then each setting is measured alone on the fastest plan so far.
2. The most promising combinations are measured in groups, until half of the time is spent.
3. The best combinations are measured for longer, in ever smaller groups.

The module does not need torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import log, sqrt

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.cluster import Cluster
from paceline.job.job import Job
from paceline.planning.check.rules import reasons_against
from paceline.planning.plan import Plan
from paceline.planning.shortlist import (
    DOUBT_UNCALIBRATED,
    LEAST_ROUNDS,
    Comparison,
    Forecast,
    PlanChange,
    Trial,
    plan_changes,
)

Floats = NDArray[np.float64]

# prior standard deviations of logarithms: effect of a setting, its difference between plans, additional effect of a
# pair of settings, and remainder of a single combination
SETTING, ON_PLAN, PAIR, OWN = 0.15, 0.1, 0.06, 0.02
# standard deviation of the logarithm of one round's ratio: assumed at first, and the minimum
NOISE, LEAST_NOISE = 0.08, 0.01
# number of combinations and of rounds: in a group of the search, and in the smaller groups that follow
WIDTH, ROUNDS = 8, 2
HALVES = ((4, 4), (2, 6))
# each additional setting must save more than this fraction of a step
LEAST_GAIN = 0.002
# a combination is faster than the first plan if its expected logarithm is this many standard deviations below 0
SURE = 2.0
# a combination is not measured if even its optimistic estimate exceeds the best expected logarithm by this number
_HOPELESS = 0.05


@dataclass(frozen=True)
class Combination:
    """A plan with changed settings.

    Attributes:
        base: the plan without the changed settings.
        names: plan keys of the changed settings.
    """

    plan: Plan
    base: Plan
    names: frozenset[str]


def settings_on(job: Job, cluster: Cluster, plan: Plan, *, batch_norm: bool) -> list[PlanChange]:
    """Return the settings of a plan that can be combined, also those that cannot help.

    Args:
        batch_norm: True if the model normalizes over microbatches, so that their number changes the result.
    """
    found = [c for c in plan_changes(job, cluster, plan) if not (c.cost_s or c.hint or c.of_ranks)]
    # activations of a smaller microbatch may fit a CPU's caches
    smaller = PlanChange({"microbatches": 2 * plan.microbatches})
    helps = not (batch_norm or plan.splits or cluster.has_accelerators)
    return [*found, smaller] if helps and not reasons_against(smaller.on(plan), job, cluster) else found


def combined(job: Job, cluster: Cluster, bases: Iterable[Plan], *, batch_norm: bool) -> list[Combination]:
    """Return every combination of these plans and their settings, the plans alone first."""
    found = {one.plan: one for one in plain(bases)}
    for base in list(found):
        changes = [c for c in settings_on(job, cluster, base, batch_norm=batch_norm) if c.untried is None]
        for size in range(1, len(changes) + 1):
            for some in combinations(changes, size):
                plan = base
                for change in some:
                    plan = change.on(plan)
                found.setdefault(plan, Combination(plan, base, frozenset(change.name for change in some)))
    return list(found.values())


def plain(bases: Iterable[Plan]) -> list[Combination]:
    """Return these plans without any settings."""
    return [Combination(base, base, frozenset()) for base in bases]


@dataclass
class Halving:
    """Search for the fastest combination.

    Attributes:
        first: plan with which all others are compared.
        all: combinations from which the search chooses; the first plan is among them.
        compared: maps the text of each measured plan to its rounds.
        failed: texts of plans that cannot run.
    """

    first: Plan
    all: list[Combination]
    forecasts: Sequence[Forecast] = ()
    compared: dict[str, Comparison] = field(default_factory=dict)
    failed: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        bad = [one for one in self.all if str(one.plan) in self.failed]
        alone = {name for one in bad if len(one.names) == 1 for name in one.names}
        without = {one.base for one in bad if not one.names}
        self.all = [one for one in self.all if one not in bad and one.base not in without and not one.names & alone]
        self._place = {one.plan: i for i, one in enumerate(self.all)}
        names = sorted({name for one in self.all for name in one.names})
        numbers = {base: i for i, base in enumerate(dict.fromkeys(one.base for one in self.all))}
        on = np.array([[name in one.names for name in names] for one in self.all], np.float64)
        on = on.reshape(len(self.all), len(names))
        base = np.array([numbers[one.base] for one in self.all])
        same, shared = np.asarray(base[:, None] == base, np.float64), on @ on.T
        predicted = {Plan.parse(f.plan): f for f in self.forecasts}
        doubt = max((f.doubt for f in self.forecasts), default=DOUBT_UNCALIBRATED)
        self._covariance = (
            doubt**2 * same
            + (SETTING**2 + ON_PLAN**2 * same) * shared
            + PAIR**2 * shared * (shared - 1) / 2
            + OWN**2 * np.eye(len(self.all))
        )
        own = predicted.get(self.first)
        means = [log(f.step_s / own.step_s) if own and (f := predicted.get(one.base)) else 0.0 for one in self.all]
        self._prior = np.array(means)

    @property
    def alone(self) -> list[Plan]:
        """The other plans without settings."""
        return [one.plan for one in self.all if not one.names and one.plan != self.first]

    @property
    def singles(self) -> list[Plan]:
        """Each setting alone, on the plan that is expected to be the fastest without settings."""
        means, _ = self.expected()
        best = min((self.first, *self.alone), key=lambda plan: means[self._place[plan]])
        return [one.plan for one in self.all if one.base == best and len(one.names) == 1]

    def expected(self) -> tuple[Floats, Floats]:
        """Return the expected logarithm of each combination's ratio, and its standard deviation.

        Ratios of the same round share the error of the first plan's time.
        """
        measured = [
            (i, self.compared[str(one.plan)]) for i, one in enumerate(self.all) if str(one.plan) in self.compared
        ]
        seen = [self._place[self.first], *(i for i, _ in measured)]
        errors = np.zeros((len(seen), len(seen)))
        errors[0, 0] = 1e-8
        # variance that each of a ratio's two times contributes; a median has about 1.5 times the variance of a mean
        noise = 1.5 * self._noise() ** 2 / 2
        for row, (_, one) in enumerate(measured, 1):
            errors[row, row] += noise / len(one.ratios)
            for column, (_, other) in enumerate(measured, 1):
                together = len(set(one.best) & set(other.best))
                errors[row, column] += noise * together / len(one.ratios) / len(other.ratios)
        values = np.array([0.0, *(log(one.ratio.middle) for _, one in measured)])
        shared = self._covariance[:, seen]
        gain = np.linalg.solve(shared[seen] + errors, shared.T).T
        means = self._prior + gain @ (values - self._prior[seen])
        variance = np.diag(self._covariance) - np.sum(gain * shared, axis=1)
        return np.asarray(means), np.sqrt(np.maximum(variance, 0.0))

    def _noise(self) -> float:
        """Return the standard deviation of the logarithm of one round's ratio, over all plans."""
        several = [np.log(one.ratios) for one in self.compared.values() if len(one.ratios) > 1]
        free = sum(len(logs) - 1 for logs in several)
        if free < LEAST_ROUNDS:
            return NOISE
        return max(LEAST_NOISE, sqrt(sum(float(np.sum((logs - logs.mean()) ** 2)) for logs in several) / free))

    def promising(self, count: int = WIDTH) -> list[Plan]:
        """Return unmeasured combinations that may be the fastest.

        Half of them have the shortest expected step times. The others have the shortest optimistic estimates, one
        standard deviation below the expected logarithm.
        """
        means, doubts = self.expected()
        hope = means - doubts
        new = [i for i, one in enumerate(self.all) if str(one.plan) not in self.compared and one.plan != self.first]
        likely = [i for i in new if hope[i] < np.min(means) + _HOPELESS]
        expected = sorted(likely, key=lambda i: float(self._values(means)[i]))[: count // 2]
        hoped = sorted(set(likely) - set(expected), key=lambda i: float(hope[i]))[: count - len(expected)]
        return [self.all[i].plan for i in (*expected, *hoped)]

    def best(self, count: int, least_rounds: int = 1) -> list[Plan]:
        """Return the measured plans with the shortest expected step times, the best first."""
        values = self._values(self.expected()[0])
        measured = [
            i
            for i, one in enumerate(self.all)
            if (comparison := self.compared.get(str(one.plan))) and len(comparison.ratios) >= least_rounds
        ]
        return [self.all[i].plan for i in sorted(measured, key=lambda i: float(values[i]))[:count]]

    def chosen(self) -> Plan:
        """Return the fastest combination, or the first plan if none is clearly faster."""
        means, doubts = self.expected()
        least = means + SURE * doubts
        sure = (plan for plan in self.best(len(self.all), LEAST_ROUNDS) if least[self._place[plan]] < 0)
        return next(sure, self.first)

    def _values(self, means: Floats) -> Floats:
        """Return the expected logarithms plus the minimum gain that each setting must bring."""
        return means + LEAST_GAIN * np.array([len(one.names) for one in self.all])

    def rows(self) -> Iterator[Trial]:
        """Yield the rows of the measured plans; the chosen plan is last.

        The first plan has no row, even if it is chosen.
        """
        predicted = {forecast.plan: forecast.step_s for forecast in self.forecasts}
        best = str(self.chosen())
        for text, one in sorted(self.compared.items(), key=lambda item: (item[0] == best, -item[1].ratio.middle)):
            yield one.tried(text, predicted.get(text), kept=text == best)
