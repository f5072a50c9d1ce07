"""Seconds to continue at sample 9 million of 10 million; a part of `data.py`."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import data_corpora as corpora
from data_serve import Task
from data_speed import OURS, PEERS, SEED, loader
from paceline.stats import median_interval

SAMPLES, QUICK_SAMPLES, BATCH = 10_000_000, 200_000, 64
STARTS, QUICK_STARTS = 5, 2
# webdataset stores no position and reads all earlier samples again: it is timed on a corpus smaller by this factor
READ_SHARE = 100


def measured(folder: Path, quick: bool) -> dict[str, float]:
    """Time the opening of the data and the first batch in new processes, in turn, and print a table."""
    samples = QUICK_SAMPLES if quick else SAMPLES
    source = corpora.tiny_rows(folder, samples)
    few = corpora.tiny_rows(folder, samples // READ_SHARE)
    at = samples * 9 // 10 // BATCH * BATCH
    times_s: dict[str, list[float]] = {system: [] for system in (OURS, *PEERS)}
    batches = []
    for _ in range(QUICK_STARTS if quick else STARTS):
        for system in times_s:
            reads = system == "webdataset"
            task = Task("tiny", str(few if reads else source), str(folder / "own"), BATCH, 1, seed=SEED)
            found = continued(system, task, at // READ_SHARE if reads else at, 1)
            times_s[system].append(found["seconds"] * (READ_SHARE if reads else 1))
            if system == OURS:
                batches.append(found["digests"][0])
    task = Task("tiny", str(source), str(folder / "own"), BATCH, 1, seed=SEED)
    earlier = continued(OURS, task, at - 3 * BATCH, 4)["digests"]
    equal = all(batch == earlier[3] for batch in batches)
    print(f"to the first batch at sample {at:,} of {samples:,}, from opening the data: seconds (95 % interval)")
    for system, values in times_s.items():
        note = (
            f"  (reads what precedes: {READ_SHARE} x the time of a corpus of that part)"
            if system == "webdataset"
            else ""
        )
        print(f"  {system:12} {median_interval(values)}{note}")
    print(f"our batch is {'the' if equal else 'NOT THE'} batch that follows the ones before it")
    medians = {system: statistics.median(values) for system, values in times_s.items()}
    figures = {f"resume_s_{system}": value for system, value in medians.items() if system != OURS}
    return {"resume_s": medians[OURS], "resume_equal": float(equal), **figures}


def continued(system: str, task: Task, sample: int, batches: int) -> dict[str, Any]:
    """Open the data in a new process, and read batches from this sample on."""
    with loader(system, task) as (opened, ask):
        found: dict[str, Any] = ask({"ask": "from", "sample": sample, "batches": batches})
    return found | {"seconds": opened["opened_s"] + found["first_s"]}
