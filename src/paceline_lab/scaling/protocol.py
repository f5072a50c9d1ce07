"""`paceline_lab.bench`: run one job under several settings in interleaved rounds.

Since every round runs all settings, a slow change of the machine's speed affects all settings alike.
"""

from __future__ import annotations

import io
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from paceline.cluster.discover import environment
from paceline.cluster.launch_engines import is_rank
from paceline.console import Console as SafeConsole
from paceline.elastic.failure import StopSignals, below, cause_and_traceback
from paceline.errors import LaunchError, PacelineError, RunError
from paceline.files import write_whole
from paceline.planning.arguments import AnyCluster, AnyJob, AnyPlan, cluster_to_run_on, job_of
from paceline.planning.check.plan_errors import auto_plan, warnings_about
from paceline.planning.plan import Plan, spelled_out
from paceline.planning.shortlist import Trial
from paceline.run.record.run import WARM_UP_STEPS, read_lines
from paceline.run.train import train
from paceline.run.tuning.auto import choose
from paceline.text import on_cores
from paceline.units import clock, count
from paceline_lab.scaling.result import ONE, Report, Setting, settings_for, target_of
from paceline_lab.scaling.summary import REPORT, BenchmarkDirectory, FinishedRun, OtherLoad, finished, kept_at, measured
from paceline_lab.scaling.table import caveats, limits_of

T = TypeVar("T")
BENCHES = Path("bench")  # default parent of benchmark directories, relative to the current directory


def bench(
    job: AnyJob,
    plans: Sequence[AnyPlan] | AnyPlan = (),
    *,
    cluster: AnyCluster | None = None,
    devices: Sequence[int] | None = None,
    repeat: int = 5,
    steps: int | None = None,
    weak: bool = True,
    out: str | Path | None = None,
    console: Console | None = None,
) -> Report:
    """Measure how a job scales, in interleaved runs on one device and on several devices.

    The result is saved in the directory `out`.

    Args:
        job: a `Job`, or the path or URL of its YAML file.
        plans: one or more additional plans to measure, each a `Plan` or a string. The plan that `auto` chooses is
            always measured.
        cluster: a `Cluster`, or the path of its YAML file. None uses this machine.
        devices: device counts to compare. None compares one device with all devices. One device is always measured,
            since every speedup is relative to one device.
        repeat: number of runs of each setting.
        steps: number of steps of each run. None trains to the target in the job's stop rule, or for 60 steps if the job
            has no target.
        weak: whether to also measure weak scaling, which trains N devices with N times the global batch.
        out: directory of the benchmark, or a URL in an object store. If the directory contains a benchmark with the
            same arguments, that benchmark is continued. None creates `bench/<job>-<time>`.
        console: console that shows progress; None uses stderr.

    Raises:
        PacelineError: the job, a plan or the directory is invalid, or every run failed.
        KeyboardInterrupt: SIGINT or SIGTERM was received. All finished runs are kept, with a report.
    """
    console = console or SafeConsole(stderr=True, soft_wrap=True)
    with kept_at(out, partial(console.print, highlight=False, markup=False)) as where:
        benchmark = Benchmark(
            job,
            plans,
            cluster=cluster,
            devices=devices,
            repeat=repeat,
            steps=steps,
            weak=weak,
            out=where,
            console=console,
        )
        report = benchmark.run()
    if benchmark.stopped_by:
        raise KeyboardInterrupt(
            f"{benchmark.stopped_by} stopped the benchmark; {benchmark.path} keeps what was measured"
        )
    if report is None:
        raise RunError(
            "bench.no_run_succeeded", "no run succeeded:\n{failures}", failures="\n".join(benchmark.failures.values())
        )
    return report


class Benchmark:
    """A benchmark and its directory. The arguments are those of `bench`.

    Attributes:
        path: directory of the benchmark.
        failures: error messages of the settings that could not be run, by title of the setting.
        stopped_by: name of the signal that stopped the benchmark, such as `SIGINT`; None without a signal.
    """

    def __init__(
        self,
        job: AnyJob,
        plans: Sequence[AnyPlan] | AnyPlan = (),
        *,
        cluster: AnyCluster | None = None,
        devices: Sequence[int] | None = None,
        repeat: int = 5,
        steps: int | None = None,
        weak: bool = True,
        out: Path | None = None,
        console: Console | None = None,
        command: str = "paceline_lab.bench",
    ) -> None:
        if is_rank():
            raise LaunchError(
                "bench.under_torchrun",
                "bench starts the ranks itself. Call it without torchrun, in a script under `if __name__ == "
                "'__main__':`.",
            )
        if repeat < 1:
            raise RunError(
                "bench.repeat_invalid",
                "repeat, the number of runs of each setting, must be at least 1, not {repeat}",
                repeat=repeat,
            )
        if steps is not None and steps <= WARM_UP_STEPS:
            raise RunError(
                "bench.too_few_steps",
                "steps must be at least {least}, not {steps}: the first {warm_up} steps of a run are its warm-up",
                least=WARM_UP_STEPS + 1,
                steps=steps,
                warm_up=WARM_UP_STEPS,
            )
        self.job = job_of(job)
        self.job.model.must_be_at_hand()
        self.job.fetch()
        self.cluster = cluster_to_run_on(cluster)
        self.repeat, self.steps, self.command = repeat, steps, command
        self.console = console or SafeConsole(stderr=True, soft_wrap=True)
        self.path = out if out is not None else BENCHES / f"{self.job.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.failures: dict[str, str] = {}
        self.stopped_by: str | None = None
        # duration of the latest run of each setting in seconds, including its start
        self._took_s: dict[str, float] = {}
        self.directory = BenchmarkDirectory(self.path)
        several = [plans] if isinstance(plans, Plan | str) else plans
        settings = partial(settings_for, self.job, self.cluster, plans=several, devices=devices, steps=steps, weak=weak)
        # raise errors about settings that cannot run before the first measurement
        settings(auto_plan(self.job, self.cluster))
        self._say(self.cluster.describe())
        self.auto, self.tried, self.reason = self._auto()
        self.settings = settings(self.auto)
        self.directory.begin(self._protocol())
        self.runs = self.directory.finished(self.settings)

    def run(self) -> Report | None:
        """Perform the missing runs and write `report.json`. Return None if no run has finished.

        If a run fails, its error is shown and its setting is skipped in later rounds. A signal ends the benchmark.
        """
        self._say(self._intention())
        with StopSignals() as signals:
            for round_, setting in self._missing():
                if signals.first or self.stopped_by:
                    self.stopped_by = self.stopped_by or signals.first
                    break
                if self._title(setting) not in self.failures:
                    self._measure(setting, round_)
            self.stopped_by = self.stopped_by or signals.first
        report = self.report()
        if report is not None:
            write_whole(self.path / REPORT, report.to_json())
        return report

    def report(self) -> Report | None:
        """Return the report of all finished runs; None if no run has finished."""
        runs = self.runs
        settings = [s for s in self.settings if runs[s.key]]
        if not settings:
            return None
        host = self.cluster.hosts[0]
        tokens = getattr(self.job.data, "context", None)
        results = [
            measured(s, runs[s.key], runs.get(ONE, []), cores=host.cores, tokens_per_sample=tokens) for s in settings
        ]
        every = [run for each in runs.values() for run in each]
        doubts = caveats(self.job, self.settings, runs, repeat=self.repeat, cores=host.cores)
        doubts += [f"{title} could not be measured: {error.splitlines()[0]}" for title, error in self.failures.items()]
        auto = str(spelled_out(self.auto, self.cluster))
        doubts += dict.fromkeys(note for s in settings for note in warnings_about(s.plan, self.job, self.cluster))
        return Report(
            job=self.job.name,
            command=self.command,
            cluster=self.cluster.describe(),
            created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            repeats=self.repeat,
            steps=self.settings[0].steps,
            target=target_of(self.job) if self.settings[0].steps is None else None,
            settings=results,
            limits=limits_of(results, auto, str(self.auto)),
            warnings=doubts,
            environment=environment(),
            tried=self.tried,
            reason=self.reason,
            complete=not self._missing(),
            synthetic=any(run.synthetic for run in every),
            kind=self.cluster.kind,
            auto=auto,
            auto_as_told=str(self.auto),
        )

    # Settings to measure

    def _auto(self) -> tuple[Plan, list[Trial], str]:
        """Return the plan that `auto` chooses, the plans that it tried, and its reason.

        If the benchmark is continued, its original plan is kept.
        """
        if before := self.directory.begun_with():
            return before
        choice = choose(self.job, self.cluster, self._say)
        return choice.plan, choice.tried, choice.lines[-1].removeprefix("plan auto: ") if choice.lines else ""

    def _protocol(self) -> dict[str, Any]:
        known = environment()
        return {
            "plan": str(self.auto),
            "tried": [asdict(row) for row in self.tried],
            "reason": self.reason,
            "job": self.job.model_dump(mode="json"),
            "settings": {
                s.key: {"plan": str(s.plan), "global_batch": s.global_batch, "steps": s.steps} for s in self.settings
            },
            "machine": {key: known[key] for key in ("host", "cpu", "cores", "gpus", "torch", "paceline")},
        }

    def _missing(self) -> list[tuple[int, Setting]]:
        """Return the round and the setting of each remaining run, in order."""
        done = {(run.round, key) for key, runs in self.runs.items() for run in runs}
        return [(round_, s) for round_, s in rounds(self.settings, self.repeat) if (round_, s.key) not in done]

    def _intention(self) -> str:
        first, missing, due = self.settings[0], len(self._missing()), self.repeat * len(self.settings)
        what = f"{first.steps} steps" if first.steps else f"training to {target_of(self.job)}"
        before = f"; {due - missing} already done" if missing < due else ""
        runs = f"{count(len(self.settings), 'setting')} × {count(self.repeat, 'repeat')} of {what}, interleaved"
        return f"bench {self.job.name} · {runs}{before} · {self.path}"

    # One run

    def _measure(self, setting: Setting, round_: int) -> None:
        if self.console.is_terminal:  # the line about the finished run replaces this line
            self.console.print(f"{self._place()} · {self._title(setting)} …", end="\r", highlight=False, markup=False)
        path = self.directory.new_run(setting, round_)
        started, load = time.monotonic(), OtherLoad(self.cluster.hosts[0])
        try:
            run = train(
                setting.job(self.job),
                setting.plan,
                cluster=self.cluster,
                run=path,
                console=Console(file=io.StringIO(), quiet=True),
            )
            if self._was_stopped(path):
                return
            result = finished(run, setting, round_, str(path.relative_to(self.path)), load.busy_cores())
        except SystemExit:  # raised after a second Ctrl-C has killed the ranks
            self.stopped_by = "SIGINT"
        except PacelineError as error:
            if not self._was_stopped(path):
                cause, frames = cause_and_traceback(error)
                self.failures[self._title(setting)] = cause
                if frames:
                    cause += f"\n{below(frames, f'failed-{len(self.failures)}', self.path)}"
                self._say(f"{self._title(setting)}: failed, and will be left out:\n{cause}", style="red")
        else:
            # benchmark runs are never resumed, so their checkpoints only use disk space
            shutil.rmtree(run.checkpoints)
            self.directory.add(result)
            self.runs[setting.key].append(result)
            self._tell(setting, result, time.monotonic() - started)

    def _was_stopped(self, run: Path) -> bool:
        """Return True if a run's events include a signal that stopped the run."""
        stops = [event["signal"] for event in read_lines(run / "events.jsonl") if event["event"] == "stop"]
        self.stopped_by = stops[0] if stops else None
        return bool(stops)

    def _tell(self, setting: Setting, run: FinishedRun, took_s: float) -> None:
        self._took_s[setting.key] = took_s
        missing = [s for _, s in self._missing() if self._title(s) not in self.failures]
        text = f"{self._place(-1)} · {self._title(setting)}"
        text += f" · {run.step_time_s * 1e3:.3g} ms a step · {run.samples / run.step_time_s:,.0f} samples/s"
        if setting.steps is None:
            text += f" · {run.training_time_s:.1f} s {'to the target' if run.reached else f'({run.reason})'}"
        left_s = sum(self._took_s.get(s.key, took_s) for s in missing)
        self._say(f"{text} · {clock(left_s)} left" if missing else text)

    def _place(self, before: int = 0) -> str:
        """Return text such as `run 3 of 15`."""
        due = self.repeat * len(self.settings)
        return f"run {due - len(self._missing()) + 1 + before} of {due}"

    def _title(self, setting: Setting) -> str:
        return setting.title if self.cluster.has_accelerators else on_cores(setting.title)

    def _say(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, highlight=False, markup=False)


def rounds(settings: Sequence[T], repeat: int) -> Iterator[tuple[int, T]]:
    """Return each setting once per round, with its round; the order rotates between rounds.

    The order of three settings is A B C, B C A, C A B, and so on.
    """
    for round_ in range(repeat if settings else 0):
        first = round_ % len(settings)
        yield from ((round_, setting) for setting in (*settings[first:], *settings[:first]))
