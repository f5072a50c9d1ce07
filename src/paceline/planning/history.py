"""History of predicted and measured step times on this hardware, which corrects later predictions.

The user's cache contains one file for each kind of hardware, with one pair per line. New pairs are appended, and
existing lines are never changed.
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

# number of newest pairs from which corrections are computed
NEWEST = 40
# Weights of the priors, as equivalent numbers of pairs. DOUBT is for the factor of all plans, whose prior is 1.
# DOUBT_OF_KIND is for one kind of plan, whose prior is the factor of all plans.
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
    """Predicted and measured step time of the same plan.

    Attributes:
        plan: text of the plan.
        predicted_s, measured_s: step times in seconds; the prediction is without corrections from the history.
        work: hash of the job fields that affect step time (`work_of`).
        calibrated: True if the prediction used measurements of the machines.
        job: name of the job, for display.
        hardware: description of the hardware, for display.
        created: time of the measurement, in seconds since 1970.
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
        """Create the pair of a plan that was measured just now."""
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
        """True if both times are positive and finite, and their ratio is plausible."""
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
        factor: factor by which predicted times are multiplied.
        pairs: number of pairs of this kind.
        all: number of pairs of all kinds.
    """

    factor: float = 1.0
    pairs: int = 0
    all: int = 0


def corrected(
    prediction: Prediction, job: Job, cluster: Cluster, plan: Plan, *, calibrated: bool = False
) -> Prediction:
    """Correct a prediction by earlier prediction errors on this hardware, and add a note.

    Without earlier measurements, the prediction is returned unchanged.

    Args:
        calibrated: True if the prediction used measurements of the machines. Only pairs with the same value are used.
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

    The factor is the geometric mean of measured / predicted over plans of the same kind. With few pairs of this kind,
    the mean is shrunk towards the mean over all plans. Otherwise, on a machine that is slower than predicted, plans
    that were never measured would look faster than measured ones. The mean over all plans is shrunk towards 1. Pairs of
    the same job have a larger weight. Two plans are of the same kind if the same degrees exceed 1 and remat is equal.
    """
    kind, work = kind_of(plan), work_of(job)
    known = [pair for pair in pairs(cluster) if pair.calibrated == calibrated]
    like = [pair for pair in known if _kind_of_text(pair.plan) == kind]
    general = _mean(known[-NEWEST:], work, towards=0.0, doubt=DOUBT)
    return Correction(
        math.exp(_mean(like[-NEWEST:], work, towards=general, doubt=DOUBT_OF_KIND)), len(like), len(known)
    )


def _mean(of: Sequence[Pair], work: str, *, towards: float, doubt: float) -> float:
    """Return the weighted mean logarithm of measured / predicted.

    The mean is shrunk as if there were `doubt` additional pairs whose logarithm is `towards`.
    """
    weights = [OWN_WEIGHT if pair.work == work else 1.0 for pair in of]
    logs = [math.log(pair.measured_s / pair.predicted_s) for pair in of]
    return (sum(w * r for w, r in zip(weights, logs, strict=True)) + doubt * towards) / (sum(weights) + doubt)


def remember(pair: Pair, cluster: Cluster) -> bool:
    """Append a pair to the history of the hardware.

    Return False if the pair is unusable or the cache cannot be written.

    Several processes may append at the same time.
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
    """Return the newest usable pairs of the hardware, the oldest first.

    Lines that cannot be parsed are skipped.
    """
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

    Examples of kinds are `dp tp`, `fsdp block` and `one rank`.
    """
    degrees = [axis for axis in DEGREES if getattr(plan, axis) > 1] or ["one rank"]
    return " ".join([*degrees, *([plan.remat] if plan.remat != "none" else [])])


def work_of(job: Job) -> str:
    """Return a short hash of the job fields that affect step time.

    These fields are the model, data, loss, optimizer, batch and precision.
    """
    keys = ("model", "adapter", "quantize", "data", "loss", "optimizer", "global_batch", "precision")
    return short_hash(work_facts(job, keys)["job"])


def hardware_of(cluster: Cluster) -> list[object]:
    """Return the properties of hosts that affect step time, as plain values.

    These properties are CPUs, cores, GPUs and emulation.
    """
    hosts = [
        [h.cpu, h.cores, h.physical_cores, [[gpu.name, gpu.memory_bytes] for gpu in h.gpus]] for h in cluster.hosts
    ]
    return [hosts, cluster.emulate.model_dump(mode="json") if cluster.emulate else None]


# maps a file to its (mtime, size, inode) at the last read, and its pairs
_read: dict[Path, tuple[tuple[int, int, int] | None, tuple[Pair, ...]]] = {}


def file_of(cluster: Cluster) -> Path:
    """Return the path of the history file of this hardware."""
    return cache_folder() / "history" / f"{short_hash(hardware_of(cluster))}.jsonl"


def _pairs(lines: bytes) -> Iterator[Pair]:
    for line in lines.splitlines():
        try:
            pair = Pair(**json.loads(line))
            usable = pair.usable and bool(_kind_of_text(pair.plan))
        except (ValueError, TypeError):
            # the line is cut off by a crash or by the start of the tail, or another version wrote it
            continue
        if usable:
            yield pair


@cache
def _kind_of_text(text: str) -> str:
    """Return the kind of a plan given as text; "" for invalid text."""
    try:
        return kind_of(Plan.parse(text))
    except PlanError:  # written by another version
        return ""


# keys of a job that determine what a step computes
WORK = (
    "model",
    "quantize",
    "adapter",
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
# largest share of the cores that other processes may use during measurements that are saved
MOST_OTHER_WORK = 0.25
# time in seconds over which other processes' use of the cores is measured
_LOOK_S = 0.2


def keep(file: Path, text: str, *, busy: float = 0.0, hint: str = "") -> str:
    """Write a cache file atomically, and return a phrase that states where it is.

    If the file cannot be written, the phrase states the reason.

    Args:
        busy: share of the cores that other processes used during the measurement. Above `MOST_OTHER_WORK`, nothing is
            written.
        hint: text that is appended to the phrase.
    """
    if busy > MOST_OTHER_WORK:
        return f"not saved, because other processes used {percent(busy, 0)} of the cores"
    # the home directory is not writable: the next start measures again
    with suppress(OSError):
        write_whole(made_cache_folder(file.parent.name) / file.name, text)
        return f"kept in {file}{hint}"
    return f"not saved, because {file.parent} cannot be written"


def other_work() -> float:
    """Measure the share of the cores that other processes use. Call this before the ranks start."""
    return psutil.cpu_percent(_LOOK_S) / 100


def work_facts(job: Job, keys: Iterable[str]) -> dict[str, Any]:
    """Return the facts about a job that determine the name of a cache file.

    The facts are the values of `keys`, and hashes of the code files that these values name. The learning rate is left
    out because it does not affect time.
    """
    values = job.model_dump(mode="json", include=set(keys))
    values["optimizer"].pop("lr", None)
    return {"job": values, "files": list(digests(values))}


def digests(values: Any) -> Iterator[str]:
    """Yield the SHA-256 digests of the Python and JSON files that `values` name.

    The digests distinguish a model from its edited version.
    """
    if isinstance(values, dict):
        for value in values.values():
            yield from digests(value)
    elif isinstance(values, str):
        file = Path(values.rpartition(":")[0] or values)
        file = file / "config.json" if file.is_dir() else file
        if file.suffix in (".py", ".json") and file.is_file():
            yield hashlib.sha256(file.read_bytes()).hexdigest()


def short_hash(facts: object) -> str:
    """Return a short hash of plain values, for use in a file name."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]
