"""Cache of what was measured or found before, in private files of the user."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from paceline.files import made_cache_folder, write_whole
from paceline.job.job import Job
from paceline.units import percent

# keys of a job that decide what a step computes
WORK = (
    "model",
    "data",
    "loss",
    "optimizer",
    "global_batch",
    "drop_last",
    "clip_norm",
    "batch_norm",
    "precision",
    "partition",
)
# share of the cores: what was measured while other processes used more is not kept
MOST_OTHER_WORK = 0.25
# seconds for measuring other work on the cores
_LOOK_S = 0.2


def keep(file: Path, text: str, *, busy: float = 0.0, hint: str = "") -> str:
    """Write a file of the cache, atomically; returns a phrase that tells where.

    Args:
        busy: share of the cores that other processes used meanwhile; beyond `MOST_OTHER_WORK` nothing is written.
        hint: what the phrase ends with.
    """
    if busy > MOST_OTHER_WORK:
        return f"not kept, as other work took {percent(busy, 0)} of the cores"
    # a home that cannot be written: the next start begins anew
    with suppress(OSError):
        write_whole(made_cache_folder(file.parent.name) / file.name, text)
        return f"kept in {file}{hint}"
    return f"not kept, as {file.parent} cannot be written"


def other_work() -> float:
    """Share of the cores that other processes use, before the ranks start."""
    return psutil.cpu_percent(_LOOK_S) / 100


def work_facts(job: Job, keys: Iterable[str]) -> dict[str, Any]:
    """Facts about a job's work, which name a file of the cache.

    They are these keys, and the code that they name. The learning rate changes no time, and is left out.
    """
    values = job.model_dump(mode="json", include=set(keys))
    values["optimizer"].pop("lr", None)
    return {"job": values, "files": list(digests(values))}


def digests(values: Any) -> Iterator[str]:
    """SHA-256 of the Python and JSON files that the job names. An edited model is another one."""
    if isinstance(values, dict):
        for value in values.values():
            yield from digests(value)
    elif isinstance(values, str):
        file = Path(values.rpartition(":")[0] or values)
        if file.suffix in (".py", ".json") and file.is_file():
            yield hashlib.sha256(file.read_bytes()).hexdigest()


def short_hash(facts: object) -> str:
    """Hash of plain values, for the name of a file."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]
