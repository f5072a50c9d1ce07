"""How often the advice of `paceline why` helps, on small jobs whose plans are not the best.

    python benchmarks/advice.py [--json]

Each job is trained with a plan, and its run is diagnosed. There are two kinds of advice: changes whose predicted gain
is larger than the error of predictions, and the change that `--try` measures as the fastest. Each advised plan is then
compared with the plan of the run by whole trainings in turn. Neither kind of advice uses these trainings.

Figures:
- `advised`: number of advised changes; `jobs`: number of diagnosed runs.
- `helped`: share of the advised changes that made the training's steps faster (mark: at least 0.9).
- `worst_gain`: smallest gain of an advised change in samples a second (mark: no loss above 0.05).
- `median_gain`: median gain of an advised change.

Advice that changes the training (rules that change losses, another batch) is left out, as it concerns more than speed.
"""

from __future__ import annotations

import io
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from measure import environment_line, parser_of, print_figures
from paceline.job.job import Job
from paceline.planning.plan import Plan
from paceline.report.diagnosis import diagnosis_of, try_suggestions
from paceline.run.record.run import Run
from paceline.run.train import train
from paceline.stats import Interval, median_interval

ROUNDS, TRIES, STEPS = 5, 4, 120
GPT = {"zoo": "gpt", "args": {"vocab": 64, "layers": 2, "heads": 2, "hidden": 64, "context": 32}}
TOKENS = {"kind": "synthetic", "samples": 2000, "vocab": 64, "shape": [32]}
SMALL, WIDE = ({"zoo": "mlp", "args": {"hidden": hidden}} for hidden in (64, 1024))
# name, model, data, plan of the run
CASES: list[tuple[str, Any, Any, str]] = [
    ("small mlp", SMALL, "digits", "dp=2"),
    ("small mlp", SMALL, "digits", "fsdp=2"),
    ("wide mlp", WIDE, "digits", "dp=2"),
    ("wide mlp", WIDE, "digits", "dp=1"),
    ("cnn", "cifar_cnn", "digits", "dp=2"),
    ("cnn", "cifar_cnn", "digits", "fsdp=2"),
    ("gpt", GPT, TOKENS, "dp=2"),
    ("gpt", GPT, TOKENS, "dp=2 microbatches=8"),
]


def main() -> None:
    """Diagnose, try, compare, print the table, and with --json a last line for machines."""
    parser = parser_of(__doc__)
    arguments = parser.parse_args()
    print(
        f"  {'job':<10} {'plan of the run':<22} {'kind':<10} {'advised':<34} measured gain (95 % interval)", flush=True
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"  # no results of earlier runs, and none kept
        found = [row for number, case in enumerate(CASES) for row in advised(*case, Path(folder) / str(number))]
    gains = [row.gain.middle for row in found]
    figures: dict[str, float] = {"jobs": len(CASES), "advised": len(found)}
    if gains:
        helped = sum(gain > 0 for gain in gains) / len(gains)
        figures |= {"helped": helped, "worst_gain": min(gains), "median_gain": statistics.median(gains)}
    print("\n" + ", ".join(f"{name} {value:.3g}" for name, value in figures.items()))
    print(environment_line())
    if arguments.json:
        rounded = {name: round(value, 4) for name, value in figures.items()}
        print_figures(rounded)


@dataclass(frozen=True)
class Advised:
    """One advised plan, and its gain in whole trainings."""

    plan: Plan
    gain: Interval


def advised(name: str, model: Any, data: Any, plan: str, folder: Path) -> Iterator[Advised]:
    """Compare each advised plan of one run; print a line for each, or one line if there is none."""
    values = {"name": name.replace(" ", "-"), "model": model, "data": data, "loss": "cross_entropy"}
    job = Job.model_validate(
        values | {"optimizer": {"name": "adamw", "lr": 0.001}, "global_batch": 64, "stop": {"steps": STEPS}}
    )
    folder.mkdir()
    diagnosis = diagnosis_of(trained(job, plan, folder / "run"))
    predicted = [one.plan for one in diagnosis.advice if one.plan is not None and not one.plan.inexact]
    tried = try_suggestions(diagnosis, TRIES, lambda line: print(f"    {line}", file=sys.stderr, flush=True)).advice
    kinds: dict[Plan, str] = dict.fromkeys(predicted, "predicted")
    if tried is not None and tried.plan is not None and not tried.plan.inexact:
        kinds[tried.plan] = "both" if tried.plan in kinds else "tried"
    if not kinds:
        print(f"  {name:<10} {plan:<22} {'':<10} none", flush=True)
    for number, (other, kind) in enumerate(kinds.items()):
        gain = compared(job, Plan.parse(plan), other, folder / f"compared-{number}")
        interval = f"{gain.middle:+.1%} ({gain.low:+.1%} to {gain.high:+.1%})"
        print(f"  {name:<10} {plan:<22} {kind:<10} {other!s:<34} {interval}", flush=True)
        yield Advised(other, gain)


def compared(job: Job, own: Plan, other: Plan, folder: Path) -> Interval:
    """Measure the gain of another plan in samples per second, by whole trainings in turn."""
    ratios = []
    for number in range(ROUNDS):
        order = (own, other) if number % 2 else (other, own)
        times = {plan: trained(job, plan, folder / f"{number}-{i}").throughput for i, plan in enumerate(order)}
        ratios.append(times[other] / times[own])
    ratio = median_interval(ratios)
    return Interval(ratio.low - 1, ratio.middle - 1, ratio.high - 1)


def trained(job: Job, plan: Plan | str, folder: Path) -> Run:
    """Train a job without output on the screen."""
    return train(job, plan, run=folder, console=Console(file=io.StringIO()))


if __name__ == "__main__":
    main()
