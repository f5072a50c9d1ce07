"""Trial of plans and knobs: the real model on real data, plans in turn.

The processes of a trial are discarded afterwards, so nothing is restored. Every rank sees the same times and decides by
itself, but equally. A failure ends the trial's processes: no rank is left waiting for one that raised. The launcher
then starts again without that plan or knob.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable

from paceline.cluster.cluster import Cluster
from paceline.comm import Group
from paceline.comm.agree import greatest
from paceline.job.job import Job
from paceline.planning.plan import Plan, cores_of
from paceline.planning.shortlist import (
    LEAST_ROUNDS,
    NOT_TRIED,
    Comparison,
    Knob,
    Trial,
    budget_s,
    idle_cores,
    knobs,
    longest_run_s,
    why_not_now,
)
from paceline.run.build import seed_all
from paceline.run.tuning.candidate import WARM_UP_STEPS, TrialCandidate, part_of
from paceline.run.tuning.result import BEGINNING, TuningResult
from paceline.stats import median_interval
from paceline.wire.status import StatusBoard

# least seconds for dividing the model in another way
_DIVIDING_S = 1.0


class RankTrial:
    """One rank of a trial. `report` gets the result so far whenever there is more; rank 0's is the one that counts."""

    def __init__(
        self, job: Job, cluster: Cluster, found: TuningResult, group: Group, report: Callable[[TuningResult], None]
    ) -> None:
        self.job, self.cluster, self.findings, self.group, self.report = job, cluster, found, group, report
        self.default = Plan.parse(found.default)
        self.board = StatusBoard.of_this_rank()
        self.cores = os.sched_getaffinity(0)
        # start of the time that counts against the budget
        self.since: float | None = None
        self.spent_before_s = found.spent_s
        seed_all(job.seed)
        self.data = job.data.build(input_shape=job.model.input_shape(), seed=job.seed)

    def run(self) -> TuningResult:
        """Compare each plan with the best so far, then each knob on it."""
        self._now_trying(BEGINNING)
        self.best = self._candidate(Plan.parse(self.findings.best))
        self._begin([self._turn(self.best) for _ in range(LEAST_ROUNDS)])
        others = [f for f in self.findings.forecasts if f.plan != self.findings.default]
        # predictions of one rank on one core and on several err by more than what the others save
        alone = idle_cores(self.cluster, self.best.plan) if self.findings.knobs else []
        self._try([*alone, *(Knob.of(Plan.parse(other.plan), other.step_s) for other in others)])
        if self.findings.knobs:
            self._try(knobs(self.job, self.cluster, self.best.plan))
        self._now_trying(None)
        self.best.close()
        return self.findings

    def _try(self, changes: list[Knob]) -> None:
        done = {row.knob for row in self.findings.tried}
        for knob in changes:
            if str(knob) not in done and knob.on(self.best.plan) != self.best.plan:
                self._note(self._untried(knob) or self._tried(knob))

    def _begin(self, step_s: list[float]) -> None:
        """Set the limits by the first plan's step time. Its measuring is not counted."""
        findings, own = self.findings, median_interval(step_s)
        self.best_s = own.middle
        if not findings.tried:
            findings.step_s, findings.steps_per_epoch = own.middle, int(self._greatest(self.best.steps_per_epoch))
        findings.run_s = longest_run_s(self.job, findings.step_s, findings.steps_per_epoch)
        alone = idle_cores(self.cluster, self.best.plan) if findings.knobs else []
        others = len(alone) + sum(forecast.plan != findings.default for forecast in findings.forecasts)
        found = knobs(self.job, self.cluster, self.best.plan) if findings.knobs else []
        compared = sum(knob.untried is None and not knob.cost_s for knob in found) - len(alone)
        findings.budget_s = budget_s(
            findings.step_s, findings.run_s, plans=others, knobs=compared, share=findings.share
        )
        self.since = time.monotonic()
        if not findings.tried:
            forecast = findings.forecast_of(findings.default)
            verdict = f"{BEGINNING}; the others get {findings.budget_s:.1f} s"
            self._note(Trial(findings.default, verdict, own, predicted_s=forecast.step_s if forecast else None))

    def _untried(self, knob: Knob) -> Trial | None:
        turn = self.best.steps_a_turn + self.best.settles
        comparison_s = (2 * LEAST_ROUNDS * turn + WARM_UP_STEPS) * self.best_s + (_DIVIDING_S if knob.whole else 0.0)
        why = why_not_now(
            knob, run_s=self.findings.run_s, left_s=self.findings.budget_s - self._spent_s(), comparison_s=comparison_s
        )
        if why is None:
            return None
        self.findings.complete &= knob.untried is not None
        return Trial(str(knob), f"{NOT_TRIED}{why}", predicted_s=knob.predicted_s)

    def _tried(self, knob: Knob) -> Trial:
        """Compare the best plan with a challenger, and keep the better one.

        The challenger is another plan, or the best one with the knob.
        """
        self._now_trying(str(knob))
        asked_s = self._spent_s()
        challenger = self._candidate(knob.on(self.best.plan))
        begun_s = self._spent_s()
        # the run is long enough for this cost, so it does not count against the comparisons' budget
        if knob.cost_s:
            self.findings.budget_s += begun_s - asked_s
        # of it, the remainder is for the comparisons to come
        left_s = self.findings.budget_s - begun_s
        comparison = Comparison()
        comparison.add(challenger.warm_s, self.best_s)
        comparison.add(self._turn(challenger), self._turn(self.best))
        # more rounds of a hopeless challenger would only take long
        if not comparison.hopeless:
            comparison = Comparison()
        while not comparison.decided and (
            len(comparison.ratios) < LEAST_ROUNDS or self._spent_s() - begun_s < comparison.share * left_s
        ):
            comparison.add(*self._round(challenger, of_update=knob.of_update))
        tried = comparison.tried(knob)
        if comparison.wins and not knob.hint and tried.ratio and tried.step_s:
            self.findings.gain *= tried.ratio.middle
            self.best_s = tried.step_s.middle
            self.best, challenger = challenger, self.best
            self.findings.best = str(self.best.plan)
        challenger.close()
        del challenger
        # a model and its optimizer refer to each other, and the next one needs the memory
        gc.collect()
        return tried

    def _candidate(self, plan: Plan) -> TrialCandidate:
        """A warmed-up engine under the plan."""
        group, host = part_of(self.group, plan), self.cluster.hosts[0]
        cores = set(cores_of(self.group.rank, plan.ranks, host)) if plan.pin and group is not None else self.cores
        candidate = TrialCandidate(
            self.job, plan, self.data, group, threads=plan.threads_for(host, plan.ranks), cores=cores
        )
        candidate.is_warm(self._greatest(candidate.warm_up()))
        return candidate

    def _round(self, challenger: TrialCandidate, *, of_update: bool) -> tuple[float, float]:
        """Seconds per step of the challenger and of the best.

        `of_update`: all but the update counts alike for both, as the mean of the two.
        """
        new_s, best_s = self._turn(challenger), self._turn(self.best)
        if not of_update:
            return new_s, best_s
        new_update_s, best_update_s = self._greatest(challenger.update_s), self._greatest(self.best.update_s)
        if not (new_update_s and best_update_s):  # a device that does not tell yet
            return new_s, best_s
        rest_s = (new_s - new_update_s + best_s - best_update_s) / 2
        return rest_s + new_update_s, rest_s + best_update_s

    def _turn(self, candidate: TrialCandidate) -> float:
        """Seconds per step of a few steps, on the slowest rank."""
        return self._greatest(candidate.turn())

    def _spent_s(self) -> float:
        """Spent seconds by the clock of rank 0, so that all ranks decide alike."""
        own_s = self.spent_before_s + (time.monotonic() - self.since if self.since else 0.0)
        return self._greatest(own_s if self.group.rank == 0 else 0.0)

    def _greatest(self, value: float) -> float:
        """Maximum over all ranks; ranks that a plan leaves idle wait here."""
        self.board.mark("sync", 0)
        return greatest(self.group, value)

    def _now_trying(self, what: str | None) -> None:
        self.findings.under_way = what
        self.findings.spent_s = self._spent_s()
        self.report(self.findings)

    def _note(self, tried: Trial) -> None:
        self.findings.tried.append(tried)
        self._now_trying(None)
