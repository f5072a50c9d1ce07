"""Predicted and measured step times of this hardware, which correct later predictions.

There is one file for each kind of hardware in the user's cache, with one pair per line. Measuring appends lines; no
line is ever rewritten.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from paceline.cluster.cluster import Cluster
from paceline.errors import PlanError
from paceline.files import cache_folder, made_cache_folder, open_to_append, write_whole
from paceline.job.job import Job
from paceline.planning.cost.layout import Prediction
from paceline.planning.plan import DEGREES, Plan
from paceline.units import count, percent

# number of newest pairs that count
NEWEST = 40
# Weights of the priors, in pairs: for a factor of 1 over all plans, and for the factor of all plans in one kind of
# plan.
DOUBT, DOUBT_OF_KIND = 0.5, 4.0
# weight of a pair of the same job, relative to another job's pair
OWN_WEIGHT = 4.0
# the last part of the file, which is read: some hundred pairs
_TAIL_BYTES = 2**18
# Largest ratio of measured to predicted time, either way; beyond it, the measurement is not comparable.
_MOST = 30.0
_MARK = "corrected by what was measured before"


@dataclass(frozen=True)
class Pair:
    """A prediction and the measurement of the same plan.

    Attributes:
        plan: text of the plan.
        predicted_s, measured_s: step times; the prediction is uncorrected.
        work: hash of the trained work (`work_of`).
        calibrated: True if the prediction used measurements of the machines.
        job: name of the job, for people.
        hardware: a phrase, for people.
        created: seconds since 1970.
    """

    plan: str
    predicted_s: float
    measured_s: float
    work: str = ""
    calibrated: bool = False
    job: str = ""
    hardware: str = ""
    created: float = 0.0

    @classmethod
    def of(
        cls, job: Job, cluster: Cluster, plan: Plan, *, predicted_s: float, measured_s: float, calibrated: bool
    ) -> Pair:
        """Return the pair of a plan that was just measured."""
        return cls(
            str(plan),
            predicted_s,
            measured_s,
            work_of(job),
            calibrated,
            job.name,
            cluster.describe(),
            round(time.time(), 1),
        )

    @property
    def usable(self) -> bool:
        """True if both values are times, and their ratio is plausible."""
        times = (self.predicted_s, self.measured_s)
        if not isinstance(self.plan, str) or not all(
            isinstance(t, (int, float)) and math.isfinite(t) and t > 0 for t in times
        ):
            return False
        return 1 / _MOST <= self.measured_s / self.predicted_s <= _MOST


@dataclass(frozen=True)
class Correction:
    """Correction factor for predictions of one kind of plan.

    Attributes:
        factor: multiplies predicted times.
        pairs: number of pairs of this kind.
        all: number of pairs of all kinds.
    """

    factor: float = 1.0
    pairs: int = 0
    all: int = 0


def corrected(
    prediction: Prediction, job: Job, cluster: Cluster, plan: Plan, *, calibrated: bool = False
) -> Prediction:
    """Correct a prediction by earlier errors on this hardware, and add a note.

    The prediction is returned unchanged if there are no earlier errors.

    Args:
        calibrated: True if the prediction used measurements of the machines; other predictions have different errors.
    """
    if any(_MARK in note for note in prediction.notes):
        return prediction
    found = correction(job, cluster, plan, calibrated=calibrated)
    if not found.all:
        return prediction
    factor = found.factor
    how_many = f"{count(found.pairs, 'such plan')} of {found.all}"
    return replace(
        prediction.times(factor),
        notes=(*prediction.notes, f"{_MARK}: times {factor:.2f}, by {how_many} on this hardware"),
    )


def correction(job: Job, cluster: Cluster, plan: Plan, *, calibrated: bool = False) -> Correction:
    """Compute the correction from the newest pairs on this hardware.

    It is the geometric mean of measured / predicted, first over all plans and then over the plans of this kind. With
    few pairs, the mean of the kind is shrunk towards the mean of all, so that a machine that is slower than predicted
    does not favour plans that were never measured. The mean of all is shrunk towards 1. Pairs of the same job have a
    larger weight. Plans are of one kind if the same degrees exceed 1 and remat is the same.
    """
    kind, work = kind_of(plan), work_of(job)
    known = [pair for pair in pairs(cluster) if pair.calibrated == calibrated]
    like = [pair for pair in known if _kind_of_text(pair.plan) == kind]
    general = _mean(known[-NEWEST:], work, towards=0.0, doubt=DOUBT)
    return Correction(
        math.exp(_mean(like[-NEWEST:], work, towards=general, doubt=DOUBT_OF_KIND)), len(like), len(known)
    )


def _mean(of: Sequence[Pair], work: str, *, towards: float, doubt: float) -> float:
    """Return the mean logarithm of measured / predicted, with `doubt` additional pairs at `towards`."""
    weights = [OWN_WEIGHT if pair.work == work else 1.0 for pair in of]
    logs = [math.log(pair.measured_s / pair.predicted_s) for pair in of]
    return (sum(w * r for w, r in zip(weights, logs, strict=True)) + doubt * towards) / (sum(weights) + doubt)


def remember(pair: Pair, cluster: Cluster) -> bool:
    """Append a pair; return False if it is unusable or the cache cannot be written.

    Concurrent writers do not harm each other.
    """
    if not pair.usable:
        return False
    file = file_of(cluster)
    line = (json.dumps(asdict(pair)) + "\n").encode()
    try:
        made_cache_folder("history")
        descriptor = open_to_append(file)
        try:
            # a single call: O_APPEND puts the line after all other lines
            return os.write(descriptor, line) == len(line)
        finally:
            os.close(descriptor)
    except OSError:
        return False


def pairs(cluster: Cluster) -> tuple[Pair, ...]:
    """Return the newest usable pairs of the hardware, oldest first; other lines are skipped."""
    file = file_of(cluster)
    try:
        about = file.stat()
        stamp = (about.st_mtime_ns, about.st_size, about.st_ino)
        if _read.get(file, (None, ()))[0] != stamp:
            with file.open("rb") as opened:
                opened.seek(max(0, about.st_size - _TAIL_BYTES))
                _read[file] = stamp, tuple(_pairs(opened.read()))
        return _read[file][1]
    except OSError:
        return ()


def kind_of(plan: Plan) -> str:
    """Return the kind of a plan: its degrees above 1 and its remat.

    Examples are `dp tp`, `fsdp block`, and `one rank`.
    """
    degrees = [axis for axis in DEGREES if getattr(plan, axis) > 1] or ["one rank"]
    return " ".join([*degrees, *([plan.remat] if plan.remat != "none" else [])])


def work_of(job: Job) -> str:
    """Return a short hash of the work that affects step time.

    The work is the model, data, loss, optimizer, batch and precision.
    """
    return short_hash(
        work_facts(job, ("model", "freeze", "data", "loss", "optimizer", "global_batch", "precision"))["job"]
    )


def hardware_of(cluster: Cluster) -> list[object]:
    """Return facts about hosts that affect step time, as plain values.

    They are cores, GPUs and emulation.
    """
    hosts = [
        [h.cpu, h.cores, h.physical_cores, [[gpu.name, gpu.memory_bytes] for gpu in h.gpus]] for h in cluster.hosts
    ]
    return [hosts, cluster.emulate.model_dump(mode="json") if cluster.emulate else None]


# by file: its (mtime, size, inode) at the last read, and its pairs
_read: dict[Path, tuple[tuple[int, int, int] | None, tuple[Pair, ...]]] = {}


def file_of(cluster: Cluster) -> Path:
    """Return the file with the history of this hardware."""
    return cache_folder() / "history" / f"{short_hash(hardware_of(cluster))}.jsonl"


def _pairs(lines: bytes) -> Iterator[Pair]:
    for line in lines.splitlines():
        try:
            pair = Pair(**json.loads(line))
            usable = pair.usable and bool(_kind_of_text(pair.plan))
        except (ValueError, TypeError):
            # truncated by a crash or by the start of the tail, or written by another version
            continue
        if usable:
            yield pair


@cache
def _kind_of_text(text: str) -> str:
    """Return the kind of the plan in a text. "" if the text is not a valid plan."""
    try:
        return kind_of(Plan.parse(text))
    except PlanError:  # written by another version
        return ""


# keys of a job that determine what a step computes
WORK = (
    "model",
    "freeze",
    "data",
    "loss",
    "optimizer",
    "global_batch",
    "drop_last",
    "clip_norm",
    "clip_value",
    "batch_norm",
    "precision",
    "partition",
)
# share of the cores; measurements while other processes used more are not saved
MOST_OTHER_WORK = 0.25
# seconds for measuring other processes' use of the cores
_LOOK_S = 0.2


def keep(file: Path, text: str, *, busy: float = 0.0, hint: str = "") -> str:
    """Write a file of the cache atomically; return a phrase with its location.

    Args:
        busy: share of the cores that other processes used during the measurement; above `MOST_OTHER_WORK` nothing is
            written.
        hint: the end of the phrase.
    """
    if busy > MOST_OTHER_WORK:
        return f"not kept, as other work took {percent(busy, 0)} of the cores"
    # the home directory is not writable: the next start measures again
    with suppress(OSError):
        write_whole(made_cache_folder(file.parent.name) / file.name, text)
        return f"kept in {file}{hint}"
    return f"not kept, as {file.parent} cannot be written"


def other_work() -> float:
    """Measure the share of the cores that other processes use, before the ranks start."""
    return psutil.cpu_percent(_LOOK_S) / 100


def work_facts(job: Job, keys: Iterable[str]) -> dict[str, Any]:
    """Return facts about a job's work, which determine the name of a cache file.

    They are these keys, and the code that they name. The learning rate does not affect time, and is left out.
    """
    values = job.model_dump(mode="json", include=set(keys))
    values["optimizer"].pop("lr", None)
    return {"job": values, "files": list(digests(values))}


def digests(values: Any) -> Iterator[str]:
    """Return SHA-256 digests of the Python and JSON files that the job names.

    So an edited model counts as another model.
    """
    if isinstance(values, dict):
        for value in values.values():
            yield from digests(value)
    elif isinstance(values, str):
        file = Path(values.rpartition(":")[0] or values)
        if file.suffix in (".py", ".json") and file.is_file():
            yield hashlib.sha256(file.read_bytes()).hexdigest()


def short_hash(facts: object) -> str:
    """Hash plain values, for the name of a file."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]
