"""A sweep and its directory: check all jobs, then run one after another."""

from __future__ import annotations

import io
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console

from paceline.cluster.cluster import Cluster
from paceline.cluster.discover import environment
from paceline.cluster.launch_engines import is_rank, own_engine
from paceline.console import Console as SafeConsole
from paceline.elastic.failure import StopSignals, below, cause_and_traceback
from paceline.elastic.leadership import RunLock
from paceline.errors import JobError, LaunchError, PacelineError, Problem, RunError
from paceline.files import private_folder, read_text, write_whole
from paceline.job.job import Job
from paceline.job.loss import build_metrics
from paceline.planning.arguments import cluster_to_run_on
from paceline.planning.check.plan_errors import auto_plan, plan_errors
from paceline.planning.model.model_info import model_info
from paceline.run.record.run import Run, differences
from paceline.run.sweep.results import Combination, SweepRun, Verdict, combinations_of, verdict
from paceline.run.sweep.space import combinations, titled, values_of
from paceline.run.trackers.follow import check_trackers
from paceline.run.train import train
from paceline.text import nearest
from paceline.units import clock, count

SWEEPS = Path("sweeps")  # default folder of sweeps, in the current directory
FILE = "sweep.json"
FINAL_STEPS = 10  # number of last steps in the final training loss; a single batch is too noisy
_SIGNALS = {130: "SIGINT", 143: "SIGTERM"}  # by exit code: signal that ended a run
_MOST_ERRORS = 10  # maximum number of errors listed before the first run
Mode = Literal["min", "max"]


@dataclass(frozen=True)
class SweepRequest:
    """Parameters of a sweep, and how to compare its runs.

    Attributes:
        job: YAML file of the job, or its URL.
        grid: values of job keys, as `KEY=V1,V2` or `KEY=loguniform(LOW,HIGH)`.
        set: changes that apply to every run, as `KEY=VALUE`.
        draws: number of random combinations; None runs the whole grid.
        seed: seed of the draws.
        repeat: number of runs per combination; their seeds count up from the job's seed.
        metric: name of the metric to compare; None takes the job's first metric, or the loss if there is none.
        mode: whether lower (`min`) or higher (`max`) values are better; None takes the metric's own direction.
        plan: plan of every run.
        command: command line to show on the sweep's page.
    """

    job: str
    grid: Sequence[str]
    set: Sequence[str] = ()
    draws: int | None = None
    seed: int = 0
    repeat: int = 1
    metric: str | None = None
    mode: Mode | None = None
    plan: str = "auto"
    command: str = "paceline sweep"


class Sweep:
    """A sweep and its directory.

    The directory contains `sweep.json`, which is rewritten after every run, and the run directories. If the directory
    belongs to the same request, or to a request with fewer repeats, only the missing runs start.

    Args:
        cluster: cluster to train on; None means this machine.
        out: directory of the sweep; None makes `sweeps/<job>-<time>`.
        console: console that shows progress; None means stderr.

    Attributes:
        job: job of the first combination.
        runs: all runs, in order.
        stopped_by: signal that stopped the sweep, or None.

    Raises:
        PacelineError: a combination cannot run, two combinations are equal, or the directory has another sweep.
    """

    def __init__(
        self,
        request: SweepRequest,
        cluster: Cluster | None = None,
        *,
        out: Path | None = None,
        console: Console | None = None,
    ) -> None:
        if is_rank() or own_engine().hosts() is not None:
            raise LaunchError(
                "sweep.already_launched",
                "a sweep starts its runs itself, on this machine: call it once, without torchrun, srun or mpirun",
            )
        self.request = request
        self.console = console or SafeConsole(stderr=True, soft_wrap=True)
        self.cluster = cluster_to_run_on(cluster)
        self.stopped_by: str | None = None
        self.parameters = combinations(values_of(request.grid), request.draws, request.seed)
        self.jobs = self._checked_jobs()
        self.job = self.jobs[0]
        self.path = out if out is not None else SWEEPS / f"{self.job.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.metric, self.higher_is_better = compared(self.job, request.metric, request.mode)
        self.runs = self._planned()
        self._continue()

    # Before the first run

    def _checked_jobs(self) -> list[Job]:
        """Create the job of each combination; one error lists all problems."""
        if self.request.repeat > 1 and any("seed" in each for each in self.parameters):
            raise JobError(
                "sweep.seed_and_repeat",
                "--repeat gives each run of a combination a different seed: leave seed out of --grid",
            )
        found: dict[str, dict[str, Any]] = {}
        jobs: list[Job] = []
        errors: list[PacelineError] = []
        wrong: list[Problem] = []
        for parameters in self.parameters:
            try:
                job = Job.load(self.request.job, set=[*self.request.set, *parameters.items()])
                if (same := found.setdefault(job.to_yaml(), parameters)) is not parameters:
                    raise JobError(
                        "sweep.same_job", "this job is the same as {same}: leave one of them out", same=titled(same)
                    )
                self._check(job)
                jobs.append(job)
            except PacelineError as error:
                errors.append(error)
                wrong += (problem.at(titled(parameters)) for problem in error.problems)
        if len(errors) == len(self.parameters) and len({str(error) for error in errors}) == 1:
            raise errors[0]  # the error does not come from the grid's values
        if errors:
            refused = Problem(
                "sweep.refused",
                "{wrong} of {count} combinations cannot run, so no run was started",
                wrong=len(errors),
                count=len(self.parameters),
            )
            raise JobError.of_problems([refused, *wrong[:_MOST_ERRORS]])
        return jobs

    def _check(self, job: Job) -> None:
        job.model.must_be_at_hand()
        check_trackers(job)
        job.fetch()
        model_info(job.model)  # builds the model, on the meta device if the model's code allows it
        job.loss.build()
        build_metrics(job.metrics)
        if self.request.plan == "auto":
            auto_plan(job, self.cluster)
        elif reasons := plan_errors(job, self.request.plan, cluster=self.cluster):
            raise JobError.of_problems(reasons)

    def _planned(self) -> list[SweepRun]:
        digits = len(str(len(self.parameters)))
        return [
            SweepRun(
                number,
                parameters,
                job.seed + repeat,
                f"runs/{number:0{digits}}" + (f"-seed{job.seed + repeat}" if self.request.repeat > 1 else ""),
            )
            # all combinations with the first seed come first, so that an interrupted sweep can compare them
            for repeat in range(self.request.repeat)
            for number, (parameters, job) in enumerate(zip(self.parameters, self.jobs, strict=True), 1)
        ]

    def _description(self) -> dict[str, Any]:
        """Return the facts that must stay the same for a sweep to continue."""
        described = {
            "job": self.job.model_dump(mode="json"),
            "combinations": self.parameters,
            "repeat": self.request.repeat,
            "plan": self.request.plan,
            "metric": self.metric,
            "higher_is_better": self.higher_is_better,
        }
        found: dict[str, Any] = json.loads(json.dumps(described))
        return found

    def _continue(self) -> None:
        file = self.path / FILE
        if not file.is_file():
            if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
                raise RunError(
                    "sweep.not_a_sweep",
                    "{path} is not a sweep's directory: it has no {file}. Name a new directory with --out.",
                    path=self.path,
                    file=FILE,
                )
            return
        try:
            kept = json.loads(read_text(file))
            before = msgspec.convert(kept["runs"], list[SweepRun])
            earlier, now = kept["sweep"], self._description()
            changed = _changed_combinations(earlier.pop("combinations"), now.pop("combinations"))
            if earlier["repeat"] < now["repeat"]:  # more repeats only add runs with new seeds
                earlier["repeat"] = now["repeat"]
            if found := [*changed, *differences(earlier, now)]:
                raise RunError(
                    "sweep.another_sweep",
                    "{path} belongs to another sweep: {differences}. Name another directory with --out.",
                    path=self.path,
                    differences="; ".join(found),
                )
        # includes msgspec's errors, which are ValueErrors
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise RunError(
                "sweep.unreadable",
                "{file} cannot be read: {error}. Name another directory with --out.",
                file=file,
                error=repr(error),
            ) from error
        known = {(run.number, run.seed): run for run in before}
        self.runs = [known.get((run.number, run.seed), run) for run in self.runs]

    # Runs

    @property
    def missing(self) -> list[SweepRun]:
        """Runs that are not over yet, in order."""
        return [run for run in self.runs if not run.is_over]

    @property
    def combinations(self) -> list[Combination]:
        """Runs grouped by combination."""
        return combinations_of(self.runs)

    @property
    def verdict(self) -> Verdict:
        """The best combination so far."""
        return verdict(self.combinations, self.metric, higher_is_better=self.higher_is_better)

    def run(self) -> None:
        """Run the missing runs, one after another.

        If a run fails, its error is recorded, and the sweep continues with the next run. A signal ends the sweep. The
        same request continues the sweep, and an interrupted run resumes from its checkpoint.
        """
        with self.held() as lock, StopSignals() as signals:
            for position, run in enumerate(missing := self.missing):
                lock.check()
                if signals.first:
                    break
                started = time.monotonic()
                self._make(run)
                self.save()
                if self.stopped_by:
                    break
                left_s = (time.monotonic() - started) * (len(missing) - position - 1)
                self.tell(run, f" · {clock(left_s)} left" if left_s else "")
            self.stopped_by = self.stopped_by or (signals.first if self.missing else None)

    @contextmanager
    def held(self) -> Iterator[RunLock]:
        """Lock the sweep's directory within this context, and write `sweep.json`."""
        try:
            private_folder(self.path)
            (self.path / "runs").mkdir(exist_ok=True)
        except OSError as error:
            raise RunError(
                "sweep.cannot_keep",
                "the sweep cannot be kept in {path}: {reason}. Name another directory with --out.",
                path=self.path,
                reason=error.strerror,
            ) from error
        with RunLock(self.path, self.say) as lock:
            missing, due = len(self.missing), len(self.runs)
            there = f"; {due - missing} are there already" if missing < due else ""
            self.say(f"sweep {self.job.name} · {count(due, 'run')}{there} · {self.path}")
            self.save()
            yield lock

    def job_of(self, run: SweepRun) -> Job:
        """Return a run's job, with the run's seed."""
        return self.jobs[run.number - 1].replace({"seed": run.seed})

    def _make(self, run: SweepRun) -> None:
        path = self.path / run.run
        try:
            train(
                self.job_of(run),
                self.request.plan,
                cluster=self.cluster,
                run=path,
                resume=(path / "job.yaml").is_file(),
                console=Console(file=io.StringIO(), quiet=True),
            )
            self.take(run)
        except SystemExit as stopped:  # a signal came before the first step, or a second signal killed the ranks
            self.stopped_by = _SIGNALS.get(int(str(stopped.code)) if str(stopped.code).isdecimal() else 0, "SIGINT")
        except Exception as error:  # noqa: BLE001 - also one of the user's code must not end the sweep
            if getattr(error, "exit_code", 1) in _SIGNALS:
                self.stopped_by = _SIGNALS[error.exit_code]  # type: ignore[attr-defined]
            else:
                cause, frames = cause_and_traceback(error)
                run.state, run.error = "failed", cause
                if frames:
                    self.say(below(frames, f"failed-{run.number}", self.path), style="red")
        if self.stopped_by:
            run.state = "interrupted"

    def take(self, run: SweepRun) -> None:
        """Update a run's state and result from its directory."""
        record = Run(self.path / run.run)
        end: dict[str, Any] = next(
            (e for e in reversed(record.events()) if e["event"] in ("start", "resume", "end")), {}
        )
        metrics, losses = record.metrics, record.losses
        training_loss = statistics.fmean(losses[-FINAL_STEPS:]) if losses else math.nan
        loss = metrics.get("loss", training_loss)
        run.plan, run.steps, run.time_s = str(record.plan), len(losses), record.training_time_s
        run.loss = loss if math.isfinite(loss) else None
        value = loss if self.metric == "loss" else metrics.get(self.metric, math.nan)
        run.metric = value if math.isfinite(value) else None
        run.reason, run.error, run.state = end.get("reason"), None, "finished"
        if end.get("event") != "end" or end.get("interrupted"):
            run.state = "interrupted"
            self.stopped_by = self.stopped_by or end.get("reason")

    def content(self) -> dict[str, Any]:
        """Return the content of `sweep.json`."""
        found = self.verdict
        return {
            "sweep": self._description(),
            "command": self.request.command,
            "updated": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "cluster": self.cluster.describe(),
            "verdict": {"best": found.best, "is_clear": found.is_clear, "text": found.text},
            "runs": [asdict(run) for run in self.runs],
            "environment": environment(),
        }

    def save(self) -> None:
        """Write `sweep.json`.

        Raises:
            RunError: the file cannot be written.
        """
        try:
            write_whole(self.path / FILE, json.dumps(self.content(), indent=1))
        except OSError as error:
            raise RunError(
                "sweep.cannot_write",
                "{file} cannot be written: {reason}",
                file=self.path / FILE,
                reason=error.strerror or error,
            ) from error

    # Output

    def tell(self, run: SweepRun, more: str = "") -> None:
        """Show a line about a run that has ended."""
        over = sum(r.state not in ("waiting", "interrupted") for r in self.runs)
        seed = f", seed={run.seed}" if self.request.repeat > 1 else ""
        text = f"run {over} of {len(self.runs)} · {titled(run.parameters)}{seed}"
        if run.state == "failed":
            first = str(run.error).partition("\n")[0]
            self.say(f"{text} · failed: {first}{more}", style="red")
            return
        value = "not measured" if run.metric is None else f"{run.metric:.4g}"
        self.say(f"{text} · {self.metric} {value} · {run.time_s or 0:.1f} s{more}")

    def say(self, text: str, style: str | None = None) -> None:
        """Show a line."""
        self.console.print(text, style=style, highlight=False, markup=False)


def _changed_combinations(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the differences of two lists of combinations as text."""
    for word, these, others in (("new", now, before), ("left out", before, now)):
        if found := [each for each in these if each not in others]:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            yield f"{titled(found[0])}{more} {'is' if len(found) == 1 else 'are'} {word}"
    if before != now and sorted(map(titled, before)) == sorted(map(titled, now)):
        yield "the combinations are in another order"


def compared(job: Job, metric: str | None, mode: Mode | None) -> tuple[str, bool]:
    """Return the name of the compared metric, and whether higher values are better.

    Raises:
        JobError: the job does not measure the metric, or it is unknown whether higher values are better.
    """
    metrics = (
        {found.name: found for found in build_metrics(job.metrics)} if not job.data.keeps_no_validation_set else {}
    )
    name = metric or next(iter(metrics), "loss")
    if name == "loss":
        return name, mode == "max"
    if name not in metrics:
        raise JobError(
            "sweep.metric_not_measured",
            "--metric {name}: the job does not measure this metric. {hint} Add the metric to metrics, and hold out "
            "samples to measure it on.",
            name=name,
            hint=nearest(name, [*metrics, "loss"]),
        )
    higher = getattr(metrics[name], "higher_is_better", None) if mode is None else mode == "max"
    if higher is None:
        raise JobError(
            "sweep.metric_direction",
            "--metric {name}: state whether a higher value is better (--mode max) or a lower one (--mode min)",
            name=name,
        )
    return name, bool(higher)
