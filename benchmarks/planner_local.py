"""How well the planner predicts paceline's own plans on this machine.

Step time and peak memory, all predicted before any is measured.

    python benchmarks/planner_local.py [--json] [--only MODEL] [--quick] [--detail]
                                       [--out FILE.html]

Four models under plans for one worker, two, and two emulated hosts (needs root): dp, fsdp, tp and pp, microbatches,
remat, precision, transports. Each job is calibrated once, which takes some seconds; then all plans are predicted; then
each is measured: the ranks of a group's plans live side by side and take turns in blocks of steps, round by round.
`--save` keeps what was calibrated and measured, and `--load` predicts that again with the cost model as it is now, and
measures nothing: to work on the model, not to judge it.

Figures:
- `plans`: that were predicted and measured.
- `median_error`, `p90_error`: of the step time: |predicted / measured - 1|; measured: the median of all steps but the
  first of each block.
- `memory_median_error`: the same of the most memory that a rank's process had at once.
- `regret`: measured step time of the plan with the least predicted one / the least measured one - 1, in the mean over
  the groups of plans of one model at one place; `worst_regret` is the largest.
- `calibration_s`: of the slowest calibration. `bias`: median of predicted / measured - 1.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from measure import environment_line, parser_of, print_figures
from paceline.cluster.discover import discover
from paceline.cluster.emulate import EmulatedHost, Emulation
from paceline.elastic.forkserver import ALLOCATOR
from paceline.errors import ClusterError, PacelineError
from paceline.planning.calibrate import Calibration
from paceline.planning.cost.layout import Prediction
from paceline.planning.plan import Plan
from paceline.planning.prediction import modelled
from paceline.run.record.run import Run
from paceline.run.tuning.calibrate import calibrate
from planner_local_cases import GIGABIT, JOBS, Case, cases, cluster_at, job_of, precisions_of
from served import Ranks

WARM_UP, BLOCK_S, BLOCK_STEPS = 6, 0.6, (3, 40)
ROUNDS, QUICK_ROUNDS = 5, 2
_RANKS = str(Path(__file__).with_name("planner_local_ranks.py"))
_MEASURED_PARTS = {
    "compute": ("compute_s",),
    "bubble": ("bubble_s",),
    "comm": ("comm_s", "imbalance_s"),
    "optimizer": ("optimizer_s",),
    "data": ("data_s",),
}
_PREDICTED_PARTS = {
    "compute": ("compute", "recompute", "launch", "tp", "fsdp"),
    "bubble": ("bubble", "pp"),
    "comm": ("dp",),
    "optimizer": ("optimizer",),
    "data": ("other",),
}


@dataclass
class Row:
    """One plan."""

    case: Case
    predicted: Prediction
    steps: list[dict[str, float]] = field(default_factory=list)
    peak_bytes: int = 0
    problem: str | None = None

    @property
    def measured_s(self) -> float:
        """Median of the steps."""
        return statistics.median(step["step_s"] for step in self.steps)

    @property
    def error(self) -> float:
        """Signed: more than 0 where the prediction is too long."""
        return self.predicted.step_time_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        """Signed."""
        return self.predicted.memory_bytes / self.peak_bytes - 1

    def part_s(self, name: str) -> tuple[float, float]:
        """Predicted and measured seconds of a part."""
        measured = statistics.median(sum(step[key] for key in _MEASURED_PARTS[name]) for step in self.steps)
        return sum(self.predicted.breakdown[part] for part in _PREDICTED_PARTS[name]), measured


def main() -> None:
    """Predict, measure, print the tables, and with --json a last line for machines."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", metavar="MODEL", choices=list(JOBS), help=f"one of {', '.join(JOBS)}")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--detail", action="store_true", help="predicted and measured parts of each step")
    parser.add_argument("--out", metavar="FILE.html", type=Path, help="write a picture of predicted against measured")
    parser.add_argument("--save", metavar="FILE.json", type=Path, help="keep what was calibrated and measured")
    parser.add_argument("--load", metavar="FILE.json", type=Path, help="predict what was measured then")
    arguments = parser.parse_args()
    models = [arguments.only] if arguments.only else list(JOBS)
    if arguments.load:
        calibrations, rows = loaded(arguments.load, models)
    else:
        with tempfile.TemporaryDirectory(prefix="paceline-planner-") as folder:
            os.environ["XDG_CACHE_HOME"] = folder  # nothing that was measured before counts
            calibrations = {model: calibrated(model) for model in models}
            rows = [Row(case, prediction(case, calibrations)) for model in models for case in cases(model)]
            measure_all(rows, Path(folder), QUICK_ROUNDS if arguments.quick else ROUNDS)
    if arguments.save:
        save(arguments.save, calibrations, rows)
    calibration_s = max(calibration.seconds for calibration in calibrations.values())
    print("\n".join(table(rows, detail=arguments.detail)))
    done = [row for row in rows if row.steps]
    found = figures(done) | {"calibration_s": calibration_s}
    print("\n".join(f"{name:22} {value:.4g}" for name, value in found.items()))
    print(environment_line())
    if arguments.out:
        plot(done, arguments.out)
    if arguments.json:
        print_figures({name: round(value, 5) for name, value in found.items()})


def calibrated(model: str) -> Calibration:
    """What is measured of a job before anything is predicted."""
    job, say = job_of(model), partial(print, f"{model}:", flush=True)
    try:
        return calibrate(job, cluster_at(GIGABIT), say, precisions=precisions_of(model))
    except ClusterError as error:
        say(f"without emulated hosts: {error}")
        return calibrate(job, None, say, precisions=precisions_of(model))


def prediction(case: Case, calibrations: Mapping[str, Calibration]) -> Prediction:
    """Of one plan."""
    return modelled(job_of(case.model), cluster_at(case.place), case.plan, calibrations[case.model])


def save(file: Path, calibrations: Mapping[str, Calibration], rows: Sequence[Row]) -> None:
    """Keep all but the predictions."""
    measured = [[row.case.model, row.case.place, str(row.case.plan), row.steps, row.peak_bytes] for row in rows]
    file.write_text(
        json.dumps(
            {"calibrations": {model: found.to_json() for model, found in calibrations.items()}, "measured": measured}
        )
    )


def loaded(file: Path, models: Sequence[str]) -> tuple[dict[str, Calibration], list[Row]]:
    """What `save` kept, predicted anew."""
    values = json.loads(file.read_text())
    calibrations = {
        model: Calibration.from_json(text) for model, text in values["calibrations"].items() if model in models
    }
    rows = []
    for model, place, plan, steps, peak in values["measured"]:
        if model in calibrations:
            case = Case(model, place, Plan.parse(plan))
            rows.append(Row(case, prediction(case, calibrations), steps, peak, None if steps else "not measured then"))
    return calibrations, rows


# Measuring


def measure_all(rows: Sequence[Row], folder: Path, rounds: int) -> None:
    """Measure every group of plans in turn; those of hosts that cannot be emulated here are left out."""
    for place, group in groupby(rows, key=lambda row: row.case.group):
        together = list(group)
        try:
            measure(together, folder, rounds)
        except ClusterError as error:
            for row in together:
                row.problem = str(error)
        print(f"measured: {', '.join(place)}", file=sys.stderr, flush=True)


def measure(rows: Sequence[Row], folder: Path, rounds: int) -> None:
    """Measure the plans of a group, whose ranks live side by side and take turns."""
    place = rows[0].case.place
    with ExitStack() as stack, _hosts(place) as hosts:
        running: list[tuple[Row, Ranks, int]] = []
        for row in rows:
            try:
                ranks = stack.enter_context(_started(row.case, folder, hosts))
                ranks.ask({"steps": WARM_UP})
                step_s = statistics.median(step["step_s"] for step in ranks.ask({"steps": 3})[0]["steps"])
            except (SystemExit, PacelineError) as error:
                row.problem = str(error)
                continue
            running.append((row, ranks, min(max(BLOCK_STEPS[0], round(BLOCK_S / step_s)), BLOCK_STEPS[1])))
        for number in range(rounds):
            turn = number % max(1, len(running))
            for row, ranks, count in running[turn:] + running[:turn]:
                answers = ranks.ask({"steps": 1 + count})
                row.peak_bytes = max(row.peak_bytes, *(answer["peak"] for answer in answers))
                row.steps += slowest(answers)


def slowest(answers: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """The steps but the first, in the mean over the ranks, which end them together."""
    by_step = list(zip(*(answer["steps"] for answer in answers), strict=True))[1:]
    return [{key: statistics.fmean(step[key] for step in ranks) for key in ranks[0]} for ranks in by_step]


@contextmanager
def _hosts(place: str) -> Iterator[Sequence[EmulatedHost]]:
    emulate = cluster_at(place).emulate
    with Emulation(emulate) if emulate else nullcontext() as emulation:
        yield emulation.hosts if emulation is not None else ()


def _started(case: Case, folder: Path, hosts: Sequence[EmulatedHost]) -> Ranks:
    """The ranks of a plan, as the launcher would start them."""
    machine = discover()
    run = Run.create(Path(tempfile.mkdtemp(dir=folder)) / "run", job_of(case.model), machine, case.plan)
    threads = 1 if hosts else case.plan.threads_for(machine.hosts[0], case.plan.ranks)
    variables = {
        **ALLOCATOR,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return Ranks([_RANKS, str(run.path)], ranks=case.plan.ranks, environment=variables, deadline_s=300, hosts=hosts)


# What was found


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """The figures that the head of this file defines."""
    errors = sorted(abs(row.error) for row in rows)
    groups = regrets(rows)
    return {
        "plans": len(rows),
        "median_error": statistics.median(errors),
        "p90_error": errors[min(len(errors) - 1, int(0.9 * len(errors)))],
        "bias": statistics.median(row.error for row in rows),
        "memory_median_error": statistics.median(abs(row.memory_error) for row in rows),
        "regret": statistics.fmean(groups.values()),
        "worst_regret": max(groups.values()),
    }


def regrets(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """By group of plans: what the plan that looks best costs more than the one that is."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.case.group].append(row)
    return {
        group: min(of, key=lambda row: row.predicted.step_time_s).measured_s / min(row.measured_s for row in of) - 1
        for group, of in groups.items()
    }


def table(rows: Sequence[Row], *, detail: bool) -> Iterator[str]:
    """For people."""
    yield (
        f"{'model':6}{'place':22}{'plan':42}{'predicted':>12}{'measured':>12}{'error':>8}{'MB pred.':>10}"
        f"{'measured':>9}{'error':>8}"
    )
    for row in rows:
        start = f"{row.case.model:6}{row.case.place:22}{row.case.plan!s:42}{row.predicted.step_time_s * 1e3:9.2f} ms"
        if not row.steps:
            yield f"{start}   not measured: {row.problem}"
            continue
        memory = f"{row.predicted.memory_bytes / 1e6:10.0f}{row.peak_bytes / 1e6:9.0f}{row.memory_error:8.1%}"
        yield f"{start}{row.measured_s * 1e3:9.2f} ms{row.error:8.1%}{memory}"
        if detail:
            parts = ((name, *row.part_s(name)) for name in _PREDICTED_PARTS)
            yield " " * 28 + ", ".join(f"{name} {p * 1e3:.2f} / {m * 1e3:.2f}" for name, p, m in parts if p or m)
    for (model, place), regret in regrets([row for row in rows if row.steps]).items():
        yield f"regret {model:6}{place:22}{regret:7.1%}"


def plot(rows: Sequence[Row], file: Path) -> None:
    """Write a page of predicted against measured times."""
    from predicted_page import Compared, write_predicted_page

    groups: dict[str, list[Compared]] = {}
    for row in rows:
        about = f"{row.case.place}: {row.case.plan} ({row.error:+.1%})"
        groups.setdefault(row.case.model, []).append(Compared(row.measured_s, row.predicted.step_time_s, about))
    heading = "Step time of paceline's plans on this machine: predicted before, measured after"
    write_predicted_page(file, heading, groups)
    print(f"picture: {file}")


if __name__ == "__main__":
    main()
