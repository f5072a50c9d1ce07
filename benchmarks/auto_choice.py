"""Compare the choice of `--plan auto` for a run of ten minutes with all combinations of plans and settings.

    python benchmarks/auto_choice.py [--json] [--works cnn,gpt] [--block-s 0.25]

Figures for each work of `systems_works.py`, for example `cnn`:
- `cnn_regret`: step time of the chosen plan / step time of the fastest combination − 1, the median over neighbouring
  blocks. The fastest combination is the one with the shortest median block. Because of noise, the median of the ratios
  may still be below 1, and the regret negative.
- `cnn_gain`: step time of the chosen plan / step time of the plan that `auto` begins with.
- `cnn_seconds`: duration of the choice in seconds, without cached results.
- `worst_regret`, `worst_share`: the largest regret, and the longest choice as a share of ten minutes.

First, all valid plans of up to two ranks are measured. Plans that take less than 1.4 times as long as the fastest are
combined with every subset of the settings that `auto` may change. Each combination has one block of steps, on the same
two ranks, and the fastest twelve have two more. Finally, the fastest three, the chosen plan and the first plan take
turns. Each of them has processes of its own, as in a run. `--block-s` is the length of a block in seconds. The time for
all combinations grows with it.

Some settings are left out: `remat` only saves memory, `compile` takes longer to start than the choice may take, and
loader processes are not needed, because the data of all works is in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from measure import environment_line, parser_of, print_figures
from paceline.cluster.cluster import Cluster
from paceline.cluster.discover import discover
from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.errors import PacelineError
from paceline.job.job import Job
from paceline.job.samples import DataSets
from paceline.planning.check.plan_errors import auto_plan
from paceline.planning.halving import combined
from paceline.planning.model.model_info import model_info
from paceline.planning.plan import Plan, cores_of
from paceline.planning.search.space import legal_plans
from paceline.run.tuning.auto import AutoChoice, choose
from paceline.run.tuning.trial import TrialCandidate, part_of
from paceline.stats import Interval, median_interval
from served import Ranks
from systems_works import works

RUN_S = 600.0
WORKS = ("cnn", "gpt", "bert", "recommendation", "averaged", "resnet50")
RANKS, SLOWER, FASTEST, FINALISTS, FINAL_ROUNDS = 2, 1.4, 12, 3, 10
LEFT_OUT = {"num_workers"}
Times = dict[Plan, list[float]]  # step time of each block, in seconds


def main() -> None:
    """Choose, measure, print the tables, and with --json a last line for machines."""
    parser = parser_of(__doc__)
    parser.add_argument("--works", default=",".join(WORKS), help="comma-separated names of the works to measure")
    parser.add_argument("--block-s", type=float, default=0.25, help="length of a block in seconds")
    parser.add_argument("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(Path(arguments.serve))
        return
    figures: dict[str, float] = {}
    cluster = discover()
    for name in arguments.works.split(","):
        job = Job.model_validate(works()[name] | {"stop": {"seconds": RUN_S}})
        choice, seconds = chosen(job, cluster)
        first = auto_plan(job, cluster)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "job.yaml").write_text(job.to_yaml())
            found = all_combinations(job, cluster, Path(folder), arguments.block_s)
            finals = [*fastest(found, FINALISTS), choice.plan, first]
            times = in_turn(list(dict.fromkeys(finals)), Path(folder), arguments.block_s)
        print_table(found, times, choice.plan)
        best = fastest(times, 1)[0]
        figures |= {
            f"{name}_regret": ratio(times, choice.plan, best).middle - 1,
            f"{name}_gain": ratio(times, choice.plan, first).middle,
            f"{name}_seconds": seconds,
        }
    figures["worst_regret"] = max(value for name, value in figures.items() if name.endswith("_regret"))
    figures["worst_share"] = max(value for name, value in figures.items() if name.endswith("_seconds")) / RUN_S
    print(f"\n{environment_line()}")
    if arguments.json:
        print_figures({name: round(value, 4) for name, value in figures.items()})


def chosen(job: Job, cluster: Cluster) -> tuple[AutoChoice, float]:
    """Choose as on the first start of the job; return the choice and its duration in seconds."""
    print(f"\n{job.name}", flush=True)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # nothing is known from earlier starts, and nothing is kept
        started = time.monotonic()
        choice = choose(job, cluster, lambda line: print(line, flush=True))
        return choice, time.monotonic() - started


def all_combinations(job: Job, cluster: Cluster, folder: Path, block_s: float) -> Times:
    """Measure the plans, then combinations of the faster plans, then the fastest combinations again."""
    alone = [*legal_plans(job, cluster, range(1, RANKS + 1)), Plan(threads=1).for_job(job)]
    with Ranks([__file__, "--serve", str(folder)], ranks=RANKS, deadline_s=120) as ranks:
        found: Times = {}
        measure(ranks, alone, block_s, found)
        near = [plan for plan in found if min(found[plan]) < SLOWER * min(found[fastest(found, 1)[0]])]
        norm = bool(model_info(job.model).batch_norms)
        every = [one.plan for one in combined(job, cluster, near, batch_norm=norm) if one.names - LEFT_OUT == one.names]
        every = [plan for plan in every if plan not in found]
        random.Random(1).shuffle(every)
        print(f"  {len(alone)} plans, {len(near)} of them with settings: {len(every)} combinations", flush=True)
        measure(ranks, every, block_s, found)
        for _ in range(2):
            measure(ranks, fastest(found, FASTEST), block_s, found)
    return found


def measure(ranks: Ranks, plans: Iterable[Plan], block_s: float, found: Times) -> None:
    """Add a block of each plan; report plans that fail, and leave them out."""
    for plan in plans:
        answers = ranks.ask({"begin": str(plan)})
        if problems := [answer for answer in answers if isinstance(answer, str)]:
            print(f"{plan} cannot run: {problems[0]}")
        else:
            steps = max(1, round(block_s / max(answers)))
            found.setdefault(plan, []).append(max(ranks.ask({"steps": steps})))


def in_turn(plans: list[Plan], folder: Path, block_s: float) -> Times:
    """Measure blocks of the plans in turn, each plan with ranks of its own.

    The i-th blocks of all plans are neighbours in time.
    """
    times: Times = {plan: [] for plan in plans}
    with ExitStack() as held:
        of_plan, steps = {}, {}
        for plan in plans:
            ranks = held.enter_context(Ranks([__file__, "--serve", str(folder)], ranks=plan.ranks, deadline_s=120))
            first_s = max(ranks.ask({"begin": str(plan)}))
            of_plan[plan], steps[plan] = ranks, max(2, round(2 * block_s / first_s))
        for number in range(FINAL_ROUNDS):
            for plan in plans if number % 2 == 0 else reversed(plans):
                times[plan].append(max(of_plan[plan].ask({"steps": steps[plan]})))
    return times


def print_table(found: Times, times: Times, chosen: Plan) -> None:
    """Print the plans of the final comparison, the fastest first."""
    best = fastest(times, 1)[0]
    print(f"\n  {'plan':<70} {'step':<30} ratio to the best of {len(found)}")
    for plan in fastest(times, len(times)):
        step, against = median_interval(times[plan]).times(1e3), ratio(times, plan, best)
        shown = f"{step.middle:.4g} ms ({step.low:.4g} to {step.high:.4g})"
        mark = "  chosen" if plan == chosen else ""
        print(f"  {plan!s:<70} {shown:<30} {against.middle:.3f} ({against.low:.3f} to {against.high:.3f}){mark}")


def fastest(found: Times, count: int) -> list[Plan]:
    """Return the plans with the shortest median blocks, the fastest first."""
    return sorted(found, key=lambda plan: statistics.median(found[plan]))[:count]


def ratio(times: Times, one: Plan, other: Plan) -> Interval:
    """Return the median ratio of neighbouring blocks, with its interval."""
    return median_interval([a / b for a, b in zip(times[one], times[other], strict=True)])


# On the ranks


def serve(folder: Path) -> None:
    """Answer requests as a rank: begin a plan instead of the previous one, or take steps."""
    job, candidate = Job.load(folder / "job.yaml"), None
    data = job.data.build(input_shape=job.model.input_shape(), seed=job.seed)
    with joined(deadline_s=120) as group:
        for line in sys.stdin:
            question = json.loads(line)
            if text := question.get("begin"):
                if candidate is not None:
                    candidate.close()
                try:
                    candidate = begun(job, Plan.parse(text), data, group)
                    print(json.dumps(candidate.warm_up()), flush=True)
                except PacelineError as error:
                    print(json.dumps(str(error)), flush=True)
                continue
            assert candidate is not None
            candidate.settles, candidate.steps_a_turn = True, question["steps"]
            print(json.dumps(candidate.turn()), flush=True)


def begun(job: Job, plan: Plan, data: DataSets, group: Group) -> TrialCandidate:
    """Return the plan's candidate on this rank; it has no engine if the plan has fewer ranks."""
    host = discover().hosts[0]
    cores = set(cores_of(group.rank, plan.ranks, host)) if plan.pin else os.sched_getaffinity(0)
    threads = plan.threads_for(host, plan.ranks)
    return TrialCandidate(job, plan, data, part_of(group, plan), threads=threads, cores=cores)


if __name__ == "__main__":
    main()
