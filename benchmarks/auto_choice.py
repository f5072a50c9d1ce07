"""The plan that `--plan auto` chooses, beside all legal plans of up to two ranks.

All are measured by hand, for the digits and a small GPT.

    python benchmarks/auto_choice.py [--json]

Figures, for `digits` and `gpt`, each as its example has it (a run of seconds, in which little or nothing is measured)
and as a `long` run:
- `digits_regret`, `gpt_regret`, `digits_long_regret`, `gpt_long_regret`: step time of the chosen plan without its
  settings / that of the best plan measured by hand − 1, in neighbouring blocks; 0 where it is that plan.
- `digits_gain`, …: step time of the chosen plan with its settings / that of the plain default.
- `digits_seconds`, …: what the choice took, on a machine that knows nothing of the job.

By hand, every plan has ranks of its own, as in a run, started anew in each of some rounds over all plans; a block's
time is that of its slowest rank. `remat` is left out of what is measured by hand: it only saves memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from measure import environment_line, parser_of, print_figures
from paceline.cluster.cluster import Cluster
from paceline.cluster.discover import discover
from paceline.comm.backend import joined
from paceline.errors import PacelineError
from paceline.job.job import Job
from paceline.job.stop import StopSpec
from paceline.planning.check.plan_errors import auto_plan
from paceline.planning.plan import Plan, cores_of
from paceline.planning.search.space import legal_plans
from paceline.planning.shortlist import SETTINGS
from paceline.run.tuning.auto import AutoChoice, choose
from paceline.run.tuning.trial import TrialCandidate, part_of
from paceline.stats import Interval, median_interval
from served import Ranks

RANKS, ROUNDS, BLOCK_S, LONG_STEPS = 2, 3, 1.2, 20_000
JOBS = {"digits": "digits.yaml", "gpt": "gpt_text.yaml"}
EXAMPLES = Path(__file__).parent.parent / "examples"


def main() -> None:
    """Choose, measure, print the tables, and with --json a last line for machines."""
    parser = parser_of(__doc__)
    parser.add_argument("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(Path(arguments.serve))
        return
    figures: dict[str, float] = {}
    cluster = discover()
    for name, file in JOBS.items():
        job = Job.load(EXAMPLES / file)
        long = job.model_copy(update={"stop": StopSpec(steps=LONG_STEPS)})
        choices = {name: chosen(job, cluster), f"{name}_long": chosen(long, cluster)}
        found = by_hand(job, cluster, [choice.plan for choice in choices.values()])
        print_table(found, choices)
        for case, choice in choices.items():
            figures |= figures_of(case, choice, found, auto_plan(job, cluster))
    print(f"\n{environment_line()}")
    if arguments.json:
        print_figures({name: round(value, 4) for name, value in figures.items()})


@dataclass
class Timed:
    """A choice of auto and the seconds that it took."""

    choice: AutoChoice
    seconds: float

    @property
    def plan(self) -> Plan:
        """The one chosen."""
        return self.choice.plan


def chosen(job: Job, cluster: Cluster) -> Timed:
    """As a first start of the job chooses."""
    print(f"\n{job.name}, {job.stop.model_dump(exclude_defaults=True)}", flush=True)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # nothing is known from earlier starts, and nothing is kept
        started = time.monotonic()
        choice = choose(job, cluster, lambda line: print(line, flush=True))
        return Timed(choice, time.monotonic() - started)


def by_hand(job: Job, cluster: Cluster, chosen: list[Plan]) -> dict[Plan, list[float]]:
    """Seconds a step of every plan, round by round; the i-th blocks are neighbours in time.

    Plans that fail are left out, and told.
    """
    plans = dict.fromkeys([*legal_plans(job, cluster, range(1, RANKS + 1)), *chosen, *map(without_settings, chosen)])
    times: dict[Plan, list[float]] = {plan: [] for plan in plans}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job.yaml").write_text(job.to_yaml())
        for _ in range(ROUNDS):
            for plan in list(times):
                with Ranks([__file__, "--serve", folder], ranks=plan.ranks, deadline_s=120) as group:
                    problems = [problem for problem in group.ask({"begin": str(plan)}) if problem]
                    if problems:
                        print(f"{plan} cannot run: {problems[0]}")
                        del times[plan]
                        continue
                    first_s = max(group.ask({"steps": 3}))
                    times[plan].append(max(group.ask({"steps": max(3, round(BLOCK_S / first_s))})))
    return times


def without_settings(plan: Plan) -> Plan:
    """The plan with its settings as they are by default."""
    defaults: dict[str, Any] = {key: getattr(Plan(), key) for key in SETTINGS}
    return replace(plan, **defaults)


def print_table(found: dict[Plan, list[float]], choices: dict[str, Timed]) -> None:
    """Every plan that was measured, the fastest first."""
    best = best_of(found)
    print(f"\n  {'plan':<60} {'step':<30} ratio to the best")
    for plan in sorted(found, key=lambda p: statistics.median(found[p])):
        marks = [case for case, timed in choices.items() if plan == timed.plan]
        step, against = median_interval(found[plan]).times(1e3), ratio(found[plan], found[best])
        shown = f"{step.middle:.4g} ms ({step.low:.4g} to {step.high:.4g})"
        mark = f"  chosen: {', '.join(marks)}" if marks else ""
        print(f"  {plan!s:<60} {shown:<30} {against.middle:.3f} ({against.low:.3f} to {against.high:.3f}){mark}")


def figures_of(case: str, timed: Timed, found: dict[Plan, list[float]], default: Plan) -> dict[str, float]:
    """Regret, gain and seconds of a choice."""
    plain, best = without_settings(timed.plan), best_of(found)
    figures = {f"{case}_seconds": timed.seconds}
    if plain in found:
        figures[f"{case}_regret"] = ratio(found[plain], found[best]).middle - 1
    if timed.plan in found and default in found:
        figures[f"{case}_gain"] = ratio(found[timed.plan], found[default]).middle
    return figures


def best_of(found: dict[Plan, list[float]]) -> Plan:
    """The fastest plan without settings."""
    return min((plan for plan in found if plan == without_settings(plan)), key=lambda p: statistics.median(found[p]))


def ratio(one: list[float], other: list[float]) -> Interval:
    """Of neighbouring blocks."""
    return median_interval([a / b for a, b in zip(one, other, strict=True)])


# On the ranks


def serve(folder: Path) -> None:
    """Answer questions as a rank: begin a plan, or take some steps of it."""
    job, host = Job.load(folder / "job.yaml"), discover().hosts[0]
    data = job.data.build(input_shape=job.model.input_shape(), seed=job.seed)
    with joined(deadline_s=120) as group:
        for line in sys.stdin:
            question = json.loads(line)
            if text := question.get("begin"):
                plan = Plan.parse(text)
                cores = set(cores_of(group.rank, plan.ranks, host)) if plan.pin else os.sched_getaffinity(0)
                try:
                    candidate = TrialCandidate(
                        job, plan, data, part_of(group, plan), threads=plan.threads_for(host, plan.ranks), cores=cores
                    )
                    candidate.warm_up()
                    print(json.dumps(None), flush=True)
                except PacelineError as error:
                    print(json.dumps(str(error)), flush=True)
                continue
            candidate.settles, candidate.steps_a_turn = True, question["steps"]
            group.barrier()
            print(json.dumps(candidate.turn()), flush=True)


if __name__ == "__main__":
    main()
