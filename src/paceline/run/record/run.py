"""The record of a run: a directory of plain files, readable without paceline."""

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

# files that describe the run; ranks read them before they start
DESCRIPTION = ("job.yaml", "cluster.yaml", "plan.txt", "environment.json")
FOLDERS = ("steps", "checkpoints")
HARNESS = "harness.jsonl"  # results of tasks of lm-eval
# Job keys that may differ when a run is resumed. Of these, only `stop` can affect a step's result, and only with a
# schedule that spans the whole run.
FREE_KEYS = {"name", "metrics", "stop", "evaluate", "checkpoint", "deadline_s", "trackers"}
# names that a new run's directory may already contain: hidden files and launchers' logs
_BESIDE_A_RUN = re.compile(r"\..*|(?:.*[-_.])?logs?(?:[-_.\d].*)?|.*\.(?:out|err|pid)")
_ALIKE = 0.1  # maximum relative difference at which two speeds are shown as one
WARM_UP_STEPS = 5  # steps excluded from throughput, because they allocate memory and fill caches


class Run:
    """The record of a run in its directory or at a URL.

    `job.yaml`, `cluster.yaml`, `plan.txt` and `environment.json` describe the run. `steps/rank-*.jsonl` (one line per
    step), `events.jsonl` and `checkpoints/` are written during training. If a step was repeated after a crash, it has
    two lines; the later line is valid.

    Args:
        path: the run directory, or a URL. The record at a URL is downloaded into a temporary directory, without
            checkpoints.

    Attributes:
        path: the local directory.
        url: URL from which the record was downloaded, or to which it was uploaded; None for a local run.

    Raises:
        RunError: there is no run at `path`.
        StorageError: the object store cannot be used.

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
        """Return the directory, the newest step and loss, and the reason for the end."""
        try:
            newest = self.steps()[-1:]
            at = "".join(f"step {line['step']}, loss {line['loss']:.6g}" for line in newest) or "before its first step"
            state = f"{at}, {self.reason or 'not ended'}"
        except (PacelineError, OSError, ValueError, LookupError, TypeError):  # the record was not written by paceline
            state = "its record cannot be read"
        return printable(f"<Run {self.url or self.path}: {state}>")

    def _repr_html_(self) -> str:
        """Return the loss curve and the main figures as HTML, for notebooks."""
        html: str = load_object("paceline.report.notebook:run_html")(self)
        return html

    @classmethod
    def create(cls, path: Path, job: Job, cluster: Cluster, plan: Plan) -> Run:
        """Create the directory, and write the files that describe the run.

        Raises:
            RunError: the directory already holds a run, or cannot be written.
        """
        cls.must_be_new(path)
        _describe(path, job, cluster, plan)
        return cls(path)

    @staticmethod
    def must_be_new(path: Path) -> None:
        """Raise RunError if the directory contains a run, or unrelated files.

        Hidden files, launchers' logs, and files of a failed start are allowed.
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
                "{path} holds files that belong to no run: {files}. Name an empty or new directory with --run.",
                path=path,
                files=f"{listed(foreign[:3])}{', …' if len(foreign) > 3 else ''}",
            )

    @classmethod
    def newest(cls, root: Path, name: str) -> Run | None:
        """Return the newest run of job `name` under `root`; None if there is none.

        Runs with a checkpoint take precedence over runs without.
        """
        # the pattern also matches jobs whose names begin with `name-`, so compare the name
        found = [cls(d) for d in root.glob(f"{name}-*") if _name(d / "job.yaml") == name]
        # A later failed start, without checkpoints, must not take precedence over an earlier run.
        saved = [run for run in found if run.has_checkpoint]
        return max(saved or found, key=lambda run: (run.path / "environment.json").stat().st_mtime, default=None)

    def withdraw_unless_begun(self) -> None:
        """If no training has begun, make the directory available for another run.

        A corrected job can then start in the same directory.
        """
        if not any(event["event"] in ("start", "resume") for event in self.events()):
            (self.path / "job.yaml").unlink(missing_ok=True)

    def continue_with(self, job: Job, cluster: Cluster, plan: Plan) -> None:
        """Replace the run's job, cluster and plan, to continue the run with them.

        Only the keys in `FREE_KEYS`, the cluster and the plan may differ from before. If the schedule spans the whole
        run, `stop.steps` and `stop.epochs` may not differ.

        Raises:
            JobError: the job differs in a key that may not differ; the message lists all of them.
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
        """Job of the run, from `job.yaml`."""
        return Job.load(self.path / "job.yaml")

    @cached_property
    def plan(self) -> Plan:
        """Plan of the run, from `plan.txt`."""
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
        """Cluster of the run, from `cluster.yaml`."""
        file = self.path / "cluster.yaml"
        try:
            text = read_text(file, 2**20)
            # PyYAML takes minutes to read deep nesting, and aliases can expand to gigabytes. paceline writes neither.
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
        """True if there is a checkpoint, complete or not."""
        return any(self.checkpoints.glob("step-*"))

    def steps(self, rank: int = 0) -> list[dict[str, Any]]:
        """Return the records of a rank's steps in order, each step once.

        If the run returned to an earlier step, later records of the abandoned attempt are left out.
        """
        lines = list(read_lines(self.path / "steps" / f"rank-{rank}.jsonl"))
        newest = {line["step"]: line for line in lines}
        return [newest[step] for step in sorted(newest) if step <= lines[-1]["step"]]

    def events(self) -> list[dict[str, Any]]:
        """Return all events in order, such as start, evaluation, checkpoint and end."""
        return list(read_lines(self.path / "events.jsonl"))

    @property
    def losses(self) -> list[float]:
        """Training loss of every step; NaN if it was not finite."""
        return [math.nan if line["loss"] is None else line["loss"] for line in self.steps()]

    @property
    def metrics(self) -> dict[str, float]:
        """Newest validation metrics; empty before the first evaluation."""
        return next((e["metrics"] for e in reversed(self.events()) if e["event"] == "evaluation"), {})

    @property
    def test_metrics(self) -> dict[str, float]:
        """Metrics on the test set; empty before the end, or without a test set."""
        return next((e["metrics"] for e in reversed(self.events()) if e["event"] == "test"), {})

    @property
    def reason(self) -> str | None:
        """Reason for the end of the run: the stop rule or a signal.

        The reason is None while the run is active, or after a crash.
        """
        ends = [e for e in self.events() if e["event"] in ("start", "resume", "end")]
        return ends[-1].get("reason") if ends else None

    @property
    def training_time_s(self) -> float:
        """Seconds from the first step to the end; 0 before the end.

        The time includes all attempts, evaluations and checkpoints.
        """
        ends = [e for e in self.events() if e["event"] == "end"]
        return float(ends[-1]["elapsed_s"]) if ends else 0.0

    @property
    def speed(self) -> Speed | None:
        """Speed of the run; None after too few steps."""
        return Speed.of(self.steps(), self.training_time_s)

    @property
    def throughput(self) -> float:
        """Samples per second, see `Speed`; 0 after too few steps."""
        speed = self.speed
        return 0.0 if speed is None else speed.throughput


@dataclass(frozen=True)
class Speed:
    """Speed of a run, as all commands and pages show it.

    Attributes:
        step_s: median step time of rank 0 in seconds, without warm-up steps.
        samples: median number of samples per step, without warm-up steps.
        overall: samples per second over the whole training, including evaluations, checkpoints and pauses; None while
            the run is active.
        tokens: mean number of tokens per sample whose label counts, of rank 0; None if the data has no tokenizer.
        padding: share of padding in the positions that rank 0 computes; None if the data has no tokenizer.
        filled: mean number of positions per sample of rank 0 without padding; None if the data has no tokenizer.
    """

    step_s: float
    samples: float
    overall: float | None = None
    tokens: float | None = None
    padding: float | None = None
    filled: float | None = None

    @classmethod
    def of(cls, steps: Sequence[dict[str, Any]], training_time_s: float = 0.0) -> Speed | None:
        """Compute the speed from rank 0's step records; None without a timed step."""
        counted = timed(steps)
        if not counted:
            return None
        samples, step_s = (float(statistics.median(s[key] for s in counted)) for key in ("samples", "step_s"))
        each = {s["step"]: s["samples"] for s in steps}  # count a repeated step once
        overall = sum(each.values()) / training_time_s if training_time_s else None
        return cls(step_s, samples, overall, *_tokens(counted))

    @property
    def throughput(self) -> float:
        """Samples per second in a median step."""
        return self.samples / self.step_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second whose label counts; None if the data has no tokenizer."""
        return None if self.tokens is None else self.throughput * self.tokens

    @property
    def overall_if_other(self) -> float | None:
        """Overall speed; None if it differs from the throughput by at most 10%."""
        overall = self.overall
        return None if overall is None or abs(overall / self.throughput - 1) <= _ALIKE else overall


def _tokens(steps: Sequence[dict[str, Any]]) -> tuple[float | None, float | None, float | None]:
    """Return `Speed.tokens`, `padding` and `filled`, if steps have them."""
    counted = [(s["data"], s["local_samples"]) for s in steps if "positions" in s.get("data", {})]
    positions, samples = sum(data["positions"] for data, _ in counted), sum(count for _, count in counted)
    if not positions or not samples:
        return None, None, None
    tokens, padding = (sum(data[key] for data, _ in counted) for key in ("tokens", "padding"))
    return tokens / samples, padding / positions, (positions - padding) / samples


def lost_samples(steps: Sequence[dict[str, Any]]) -> str:
    """Describe how many samples of rank 0 were cut, unlabelled or replaced; empty if none."""
    samples = sum(s.get("local_samples", 0) for s in steps)  # some kinds of runs omit it
    found = []
    for key, what in (
        ("shortened", "were longer than the context"),
        ("untrained", "had no label"),
        ("replaced", "were replaced, because their rows are damaged or refused"),
    ):
        if number := sum(s.get("data", {}).get(key, 0) for s in steps):
            found.append(f"{number:,} of {samples:,} samples {what}")
    return "; ".join(found)


def timed(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Select the timed steps after the warm-up, from which speeds are computed.

    On accelerators, the last step of an attempt has no time.
    """
    return [s for s in steps[WARM_UP_STEPS:] if s["step_s"] > 0]


class JsonLines:
    """Append-only file of JSON lines.

    Each line is a single write, so a crash loses at most the last line.

    Args:
        lossy: whether a failed write only counts and reports the lost line, instead of raising an error.

    Attributes:
        lost: number of lines lost since the last successful write.
        missing: number of lines lost before the last successful write; the caller resets it.
    """

    def __init__(self, path: Path, *, lossy: bool = False) -> None:
        self.path, self.lossy, self.lost, self.missing = path, lossy, 0, 0
        self._writing = threading.Lock()  # a lock, because the checkpoint writer's thread also writes events
        try:
            self._fd = open_to_append(path)
            size = os.fstat(self._fd).st_size
            self._cut = bool(size) and os.pread(self._fd, 1, size - 1) != b"\n"  # a crash truncated the last line
        except OSError as error:
            raise RunError(
                "file.unwritable", "{file} cannot be written: {reason}", file=path, reason=error.strerror
            ) from error

    def write(self, line: str) -> None:
        """Append one line of JSON text.

        Raises:
            RunError: the write fails, and the file is not `lossy`. Earlier lines stay readable.
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
        self._fd = -1  # so that a late write raises an error, instead of going to a file that reuses the descriptor

    def _append(self, line: str) -> None:
        data = f"\n{line}\n".encode() if self._cut else f"{line}\n".encode()
        written = os.write(self._fd, data)
        if self._cut or written < len(data):
            self._cut = data[written - 1 : written] != b"\n"
        if written < len(data):  # the disk became full during the write
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.lost:
            print(printable(f"{self.path} can be written again; lines lost: {self.lost}"), file=sys.stderr, flush=True)
            self.missing, self.lost = self.missing + self.lost, 0


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a JSON-lines file; none if the file does not exist.

    Lines that a crash has truncated are skipped.
    """
    try:
        for line in whole_lines(path):
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):  # a crash truncated this line; later lines are valid
                continue
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(
            "file.unreadable", "{file} cannot be read: {reason}", file=path, reason=error.strerror or error
        ) from error


def differences(old: dict[str, Any], new: dict[str, Any], where: str = "") -> Iterator[str]:
    """Yield the differences of two nested dicts: `optimizer.lr was 0.1, is 0.2`."""
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
        if not (path / "job.yaml").exists():  # keep an existing run's permissions, because its owner may have shared it
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
    """Return the values of a run's job that affect the result of a step."""
    return _work(run.job)


def _work(job: Job) -> dict[str, Any]:
    work = {k: v for k, v in job.model_dump(mode="json").items() if k not in FREE_KEYS}
    if job.schedule.ends_with_run:
        work["stop"] = {"steps": job.stop.steps, "epochs": job.stop.epochs}
    return work
