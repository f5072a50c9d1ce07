"""The record of a run: a directory of plain files, append-only, readable without paceline."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import statistics
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from paceline.cluster.cluster import Cluster
from paceline.cluster.discover import environment
from paceline.errors import JobError, PacelineError, RunError
from paceline.files import open_to_append, private_folder, read_text, whole_lines, write_whole
from paceline.job.job import Job
from paceline.job.spec import load_object
from paceline.planning.plan import Plan
from paceline.storage.url import checked_url, is_url
from paceline.text import listed, printable

DESCRIPTION = ("job.yaml", "cluster.yaml", "plan.txt", "environment.json")  # files that ranks read before they start
FOLDERS = ("steps", "checkpoints")
# Keys that may differ between a run and the job that resumes it. Among these, only `stop` affects the result of a
# step, and only with a schedule that decays over the whole run.
FREE_KEYS = {"name", "metrics", "stop", "evaluate", "checkpoint", "deadline_s", "trackers"}
# what may be in a directory before a run begins there: hidden files and logs of launchers
_BESIDE_A_RUN = re.compile(r"\..*|(?:.*[-_.])?logs?(?:[-_.\d].*)?|.*\.(?:out|err|pid)")
_ALIKE = 0.1  # relative difference of two speeds that is not shown
WARM_UP_STEPS = 5  # excluded from throughput: the first steps allocate memory and fill caches


class Run:
    """The record of a run in its directory or at a URL.

    `job.yaml`, `cluster.yaml`, `plan.txt` and `environment.json` say what ran. `steps/rank-*.jsonl` (one line a step),
    `events.jsonl` and `checkpoints/` are written during the run. If a step was trained again after a crash, it has two
    lines, and the later one counts.

    Args:
        path: the directory; or a URL, whose record is fetched, without the checkpoints, into a temporary directory.

    Attributes:
        path: the directory.
        url: URL that the directory was uploaded to during training, or fetched from; None without.

    Raises:
        RunError: there is no run.
        StorageError: the store cannot be used.

    Example:
        >>> run = paceline.Run("runs/digits-20260101-120000")
        >>> run.losses[-1], run.metrics["accuracy"], run.throughput
    """

    def __init__(self, path: str | Path) -> None:
        self.url: str | None = None
        if is_url(path):
            from paceline.run.object_store import copy_of

            self.url = checked_url(path)
            with ExitStack() as held:
                path = held.enter_context(copy_of(self.url, lambda _: None, checkpoint=None))
                weakref.finalize(self, held.pop_all().close)
        self.path = Path(path)
        if not (self.path / "job.yaml").is_file():
            other = Path("runs", path)
            raise RunError(
                "run.not_a_run",
                "{path} is not a run directory: it has no job.yaml{hint}",
                path=self.path,
                hint=f". Did you mean {other}?" if (other / "job.yaml").is_file() else "",
            )

    def __repr__(self) -> str:
        """Return the directory, the newest step and loss, and how the run ended."""
        try:
            newest = self.steps()[-1:]
            at = "".join(f"step {line['step']}, loss {line['loss']:.6g}" for line in newest) or "before its first step"
            state = f"{at}, {self.reason or 'not ended'}"
        except (PacelineError, OSError, ValueError, LookupError, TypeError):  # a record that paceline did not write
            state = "its record cannot be read"
        return printable(f"<Run {self.url or self.path}: {state}>")

    def _repr_html_(self) -> str:
        """Return the curve of the loss and the main figures, for notebooks."""
        html: str = load_object("paceline.report.notebook:run_html")(self)
        return html

    @classmethod
    def create(cls, path: Path, job: Job, cluster: Cluster, plan: Plan) -> Run:
        """Create the directory and write the facts known before the first step.

        Raises:
            RunError: the directory already holds a run, or cannot be written.
        """
        cls.must_be_new(path)
        _describe(path, job, cluster, plan)
        return cls(path)

    @staticmethod
    def must_be_new(path: Path) -> None:
        """Raise RunError if the directory holds a run, or files that belong to no run.

        Hidden files, and logs that a launcher writes there before the start, are allowed. Files of a failed start are
        allowed, too.
        """
        if (path / "job.yaml").exists():
            raise RunError(
                "run.directory_in_use",
                "{path} holds a run already. Continue it with --resume, or name another directory.",
                path=path,
            )
        names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
        foreign = [name for name in names if not _BESIDE_A_RUN.fullmatch(name)]
        if foreign and not {*names} & {*DESCRIPTION, *FOLDERS, "lock", "events.jsonl"}:
            raise RunError(
                "run.directory_not_empty",
                "{path} holds files that belong to no run: {files}. Name an empty or a new directory with --run.",
                path=path,
                files=f"{listed(foreign[:3])}{', …' if len(foreign) > 3 else ''}",
            )

    @classmethod
    def newest(cls, root: Path, name: str) -> Run | None:
        """Return the newest run of job `name` under `root`; None if there is none.

        A run with saved state comes before a run without.
        """
        # not those of a job called name-something
        found = [cls(d) for d in root.glob(f"{name}-*") if _name(d / "job.yaml") == name]
        # A failed start leaves an empty directory. It must not hide the run that was active
        # before it.
        saved = [run for run in found if run.has_checkpoint]
        return max(saved or found, key=lambda run: (run.path / "environment.json").stat().st_mtime, default=None)

    def withdraw_unless_begun(self) -> None:
        """Free the directory of a run that failed before its first step.

        A corrected job can then be started in it.
        """
        if not any(event["event"] in ("start", "resume") for event in self.events()):
            (self.path / "job.yaml").unlink(missing_ok=True)

    def continue_with(self, job: Job, cluster: Cluster, plan: Plan) -> None:
        """Set a job to continue this run with.

        The stop rule, the intervals of evaluations and checkpoints, the cluster and the plan may differ; the work may
        not.

        Raises:
            JobError: the job would train something else. The message names every key that differs.
            RunError: the directory cannot be written.
        """
        differing = list(differences(_work(self.job), _work(job)))
        if differing:
            raise JobError(
                "run.other_job",
                "{path} belongs to another job: {differences}. Restore the values, or start a new run without "
                "--resume.",
                path=self.path,
                differences="; ".join(differing),
            )
        _describe(self.path, job, cluster, plan)
        for cached in ("job", "cluster", "plan"):
            self.__dict__.pop(cached, None)

    @cached_property
    def job(self) -> Job:
        """The job, from `job.yaml`."""
        return Job.load(self.path / "job.yaml")

    @cached_property
    def plan(self) -> Plan:
        """The plan, from `plan.txt`."""
        try:
            return Plan.parse(read_text(self.path / "plan.txt", 2**16).strip())
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(
                "file.unreadable",
                "{file} cannot be read: {reason}",
                file=self.path / "plan.txt",
                reason=getattr(error, "strerror", None) or error,
            ) from error

    @cached_property
    def cluster(self) -> Cluster:
        """The cluster, from `cluster.yaml`."""
        file = self.path / "cluster.yaml"
        try:
            text = read_text(file, 2**20)
            # With deep nesting, PyYAML takes minutes. A few lines of aliases can expand to gigabytes. paceline writes
            # neither.
            if (
                max(map(len, text.splitlines()), default=0) > 2**12
                or max(text.count(c) for c in "[{") > 2**14
                or _has_aliases(text)
            ):
                raise RunError(
                    "run.file_invalid",
                    "{file} does not have the form in which paceline writes it: its lines or lists are too long, "
                    "or it has YAML aliases",
                    file=file,
                )
            return Cluster.load(file)
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
            raise RunError(
                "file.unreadable",
                "{file} cannot be read: {reason}",
                file=file,
                reason=getattr(error, "strerror", None) or error,
            ) from error

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def has_checkpoint(self) -> bool:
        """True if there is a checkpoint, whole or not."""
        return any(self.checkpoints.glob("step-*"))

    def steps(self, rank: int = 0) -> list[dict[str, Any]]:
        """The records of a rank's steps, each step once, in order.

        A run that went back to an earlier step has discarded the steps after its newest one.
        """
        lines = list(read_lines(self.path / "steps" / f"rank-{rank}.jsonl"))
        newest = {line["step"]: line for line in lines}
        return [newest[step] for step in sorted(newest) if step <= lines[-1]["step"]]

    def events(self) -> list[dict[str, Any]]:
        """All events in order: start, resume, evaluation, checkpoint, damage, restart, end, …"""
        return list(read_lines(self.path / "events.jsonl"))

    @property
    def losses(self) -> list[float]:
        """The training loss of every step; NaN if it was not finite."""
        return [math.nan if line["loss"] is None else line["loss"] for line in self.steps()]

    @property
    def metrics(self) -> dict[str, float]:
        """The newest validation metrics; empty before the first evaluation."""
        return next((e["metrics"] for e in reversed(self.events()) if e["event"] == "evaluation"), {})

    @property
    def test_metrics(self) -> dict[str, float]:
        """The metrics of the test set; empty before the end, and without one."""
        return next((e["metrics"] for e in reversed(self.events()) if e["event"] == "test"), {})

    @property
    def reason(self) -> str | None:
        """Reason for the end of the run: its stop rule or the signal.

        None while the run is active or after a crash.
        """
        ends = [e for e in self.events() if e["event"] in ("start", "resume", "end")]
        return ends[-1].get("reason") if ends else None

    @property
    def training_time_s(self) -> float:
        """Seconds from the first step to the end; 0 while it runs.

        It includes all attempts, evaluations and checkpoints.
        """
        ends = [e for e in self.events() if e["event"] == "end"]
        return float(ends[-1]["elapsed_s"]) if ends else 0.0

    @property
    def speed(self) -> Speed | None:
        """The run's speed; None if too few steps were made."""
        return Speed.of(self.steps(), self.training_time_s)

    @property
    def throughput(self) -> float:
        """Samples per second, as `Speed` defines it; 0 if too few steps were made."""
        speed = self.speed
        return 0.0 if speed is None else speed.throughput


@dataclass(frozen=True)
class Speed:
    """Speed of a run, the same on every command and page.

    Attributes:
        step_s: median step time of rank 0 in seconds, warm-up excluded.
        samples: median number of samples of these steps.
        overall: samples per second of the whole training, with evaluations, checkpoints and pauses; None while the run
            is active.
    """

    step_s: float
    samples: float
    overall: float | None = None

    @classmethod
    def of(cls, steps: Sequence[dict[str, Any]], training_time_s: float = 0.0) -> Speed | None:
        """Compute the speed from the step lines of rank 0; None if no step counts."""
        counted = timed(steps)
        if not counted:
            return None
        samples, step_s = (float(statistics.median(s[key] for s in counted)) for key in ("samples", "step_s"))
        each = {s["step"]: s["samples"] for s in steps}  # a step may have been trained twice
        return cls(step_s, samples, sum(each.values()) / training_time_s if training_time_s else None)

    @property
    def throughput(self) -> float:
        """Samples per second of the median step."""
        return self.samples / self.step_s

    @property
    def overall_if_other(self) -> float | None:
        """The overall speed; None if it is within a tenth of the throughput."""
        overall = self.overall
        return None if overall is None or abs(overall / self.throughput - 1) <= _ALIKE else overall


def timed(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Select the steps that count for speeds: after the warm-up, and with a time.

    On accelerators the last step of an attempt has no time.
    """
    return [s for s in steps[WARM_UP_STEPS:] if s["step_s"] > 0]


class JsonLines:
    """An append-only file of JSON lines.

    Each line is one write, so a crash at any moment loses at most the last one.

    Args:
        lossy: whether lines that the disk rejects are counted and reported on stderr, instead of raising an error.

    Attributes:
        lost: number of lines rejected since the last successful write.
        missing: number of lines lost before the newest one, until the caller resets it.
    """

    def __init__(self, path: Path, *, lossy: bool = False) -> None:
        self.path, self.lossy, self.lost, self.missing = path, lossy, 0, 0
        self._writing = threading.Lock()  # the thread that writes a checkpoint also writes events here
        try:
            self._fd = open_to_append(path)
            size = os.fstat(self._fd).st_size
            self._cut = bool(size) and os.pread(self._fd, 1, size - 1) != b"\n"  # truncated by a crash
        except OSError as error:
            raise RunError(
                "file.unwritable", "{file} cannot be written: {reason}", file=path, reason=error.strerror
            ) from error

    def write(self, line: str) -> None:
        """Append one line of JSON text.

        Raises:
            RunError: the disk is full or gone, and the lines are not `lossy`. Earlier lines stay readable.
        """
        with self._writing:
            try:
                self._append(line)
            except OSError as error:
                if self._fd < 0 or not self.lossy:
                    raise RunError(
                        "run.record_unwritable",
                        "{file} cannot be written: {reason}. Free some space, then continue with --resume.",
                        file=self.path,
                        reason=error.strerror,
                    ) from error
                if not self.lost:
                    said = (
                        f"{self.path} cannot be written: {error.strerror}. Training goes on; its lines are lost "
                        "until there is room."
                    )
                    print(printable(said), file=sys.stderr, flush=True)
                self.lost += 1

    def event(self, event: str, details: dict[str, Any] | None = None) -> None:
        """Append an event with its wall-clock time (Unix seconds)."""
        self.write(json.dumps({"event": event, "time": round(time.time(), 3), **(details or {})}))

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
        self._fd = -1  # a thread that still writes gets an error, never another file that reuses the file descriptor

    def _append(self, line: str) -> None:
        data = f"{chr(10) if self._cut else ''}{line}\n".encode()
        written = os.write(self._fd, data)
        self._cut = data[written - 1 : written] != b"\n"
        if written < len(data):  # the last free bytes of a disk
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.lost:
            print(printable(f"{self.path} can be written again; lines lost: {self.lost}"), file=sys.stderr, flush=True)
            self.missing, self.lost = self.missing + self.lost, 0


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Return the whole lines of a JSON-lines file; empty if it does not exist.

    A last line that a crash truncated is skipped.
    """
    try:
        for line in whole_lines(path):
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):  # truncated by a crash; the following lines are whole
                continue
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(
            "file.unreadable", "{file} cannot be read: {reason}", file=path, reason=error.strerror or error
        ) from error


def differences(old: dict[str, Any], new: dict[str, Any], where: str = "") -> Iterator[str]:
    """Return the differences of two nested dicts as text: `optimizer.lr was 0.1, is 0.2`."""
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from differences(before, after, f"{where}{key}.")
        elif before != after:
            yield f"{where}{key} was {before}, is {after}"


def _describe(path: Path, job: Job, cluster: Cluster, plan: Plan) -> None:
    """Write job, plan, cluster and environment files.

    `job.yaml` is written last, because it marks the directory as a run.
    """
    try:
        if not (path / "job.yaml").exists():  # keeps the permissions of a run that its owner has shared
            private_folder(path)
        for folder in FOLDERS:
            (path / folder).mkdir(mode=0o700, exist_ok=True)
        write_whole(path / "cluster.yaml", cluster.to_yaml())
        write_whole(path / "plan.txt", f"{plan}\n")
        write_whole(path / "environment.json", json.dumps(environment(), indent=1))
        write_whole(path / "job.yaml", job.to_yaml())
    except OSError as error:
        raise RunError(
            "run.directory_unwritable",
            "the run cannot be kept in {run}: {reason}. Name a writable directory with --run.",
            run=path,
            reason=error.strerror or error,
        ) from error


def _name(job_file: Path) -> str | None:
    if not job_file.is_file():
        return None
    name: str = yaml.safe_load(job_file.read_text()).get("name", Job.model_fields["name"].default)
    return name


def _has_aliases(text: str) -> bool:
    return "*" in text and any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text))


def work_of_run(run: Run) -> dict[str, Any]:
    """Return the keys of a run's job that affect the result of a step."""
    return _work(run.job)


def _work(job: Job) -> dict[str, Any]:
    work = {k: v for k, v in job.model_dump(mode="json").items() if k not in FREE_KEYS}
    if job.schedule.ends_with_run:
        work["stop"] = {"steps": job.stop.steps, "epochs": job.stop.epochs}
    return work
