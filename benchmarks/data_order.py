"""Order, position and memory of paceline's loader if ranks are killed or resized; parts of `data.py`."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import data_corpora as corpora
from data_ours import data_of, loader_of
from data_serve import Task
from data_speed import SEED
from paceline.data.loader import Loader
from paceline.job.job import Job
from paceline.job.samples import DataSets
from paceline_lab.chaos.invariants import reference
from paceline_lab.chaos.schedule import Fault, Schedule
from paceline_lab.chaos.session import Session

TRIALS, QUICK_TRIALS, WITH_WORKERS = 200, 20, 10  # of the trials, these have loader processes
MOST_RANKS = 8
EPOCHS = 2
KILLS, RUN_STEPS = (0.15, 0.35, 0.55, 0.75), 400
MEMORY_STEPS, QUICK_MEMORY_STEPS, WARM_STEPS, MEMORY_BATCH = 1_000_000, 20_000, 5_000, 8


def exact_measured(folder: Path, quick: bool) -> dict[str, float]:
    """Count the trials and the runs in which every sample was read exactly once per epoch."""
    trials, dice = QUICK_TRIALS if quick else TRIALS, random.Random(SEED)
    held = 0
    for number in range(trials):
        workers = dice.choice((1, 2)) if number < WITH_WORKERS * trials // TRIALS else 0
        held += exactly_once(folder, dice, workers)
    print(f"each sample exactly once per epoch: {held} of {trials} sequences of kills and resizes of 1 to 8 ranks")
    runs = [run_held(folder, seed) for seed in range(1 if quick else 3)]
    print(f"each sample exactly once per epoch: {sum(runs)} of {len(runs)} runs whose ranks were killed")
    return {"epoch_exact": held / trials, "epoch_exact_runs": sum(runs) / len(runs)}


# Sequences of kills and resizes, by the loaders alone


def exactly_once(folder: Path, dice: random.Random, workers: int) -> bool:
    """Read two epochs in pieces, each by another number of ranks; return True if no sample is missing or repeated.

    After each piece, the ranks are killed: what they have read since a random earlier step is forgotten, and the next
    ranks continue from the position of that step.
    """
    samples, shards = dice.randrange(200, 3000), dice.randrange(1, 9)
    source = corpora.tiny_rows(folder / "small", samples, shards=shards)
    task = Task("tiny", str(source), "", batch=dice.randrange(8, 64), workers=workers, seed=dice.randrange(1000))
    data = data_of(task)
    counts = np.zeros((EPOCHS, samples), np.int64)
    state: dict[str, Any] | None = None
    while state is None or state["epoch"] < EPOCHS:
        ranks = dice.randrange(1, (3 if workers else MOST_RANKS) + 1)
        with loaders(task, data, ranks, state) as there:
            state = piece(there, dice, counts)
    return bool((counts == 1).all())


@contextmanager
def loaders(task: Task, data: DataSets, ranks: int, state: dict[str, Any] | None) -> Iterator[list[Loader]]:
    """Yield the loaders of some ranks, at a position."""
    with ExitStack() as held:
        found = [held.enter_context(closing(loader_of(task, data, rank, ranks))) for rank in range(ranks)]
        for loader in found if state is not None else ():
            loader.load_state_dict(state)  # type: ignore[arg-type]
        yield found


def piece(there: list[Loader], dice: random.Random, counts: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Read steps on all ranks; count the samples before a random one of these steps, and return its position."""
    begins = there[0].state_dict()
    steps = dice.randrange(1, there[0].partition.steps_per_epoch + 1)
    states, read = [begins], []
    epochs = [iter(loader) for loader in there]
    for _ in range(steps):
        try:
            batches = [next(batches) for batches in epochs]
        except StopIteration:  # the epoch has ended on all ranks
            break
        read.append((states[-1]["epoch"], np.concatenate([numbers_of(batch) for batch in batches])))
        states.append(there[0].state_dict())
    kept = dice.randrange(len(read) + 1) if dice.random() < 0.5 else len(read)
    for epoch, numbers in read[:kept]:
        if epoch < EPOCHS:
            np.add.at(counts[epoch], numbers, 1)
    return states[kept]


def numbers_of(batch: tuple[Tensor, ...] | None) -> np.ndarray[Any, Any]:
    """Return the numbers of tiny rows, from their tokens."""
    if batch is None:
        return np.zeros(0, np.int64)
    numbers: np.ndarray[Any, Any] = (batch[0][:, 0] * corpora.TINY_BASE + batch[0][:, 1]).numpy()
    return numbers


# Runs whose ranks are killed


class Classifier(nn.Module):
    """Mean of the embeddings of a row's tokens, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(corpora.TINY_BASE, 8)
        self.output = nn.Linear(8, corpora.CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of the classes."""
        scores: Tensor = self.output(self.tokens(tokens).mean(1))
        return scores


def run_held(folder: Path, seed: int) -> bool:
    """Train four replicas on files while ranks are killed; return True if no sample was lost or repeated.

    The chaos session compares the samples of every step, as the ranks recorded them, with those of an undisturbed run.
    """
    source = corpora.tiny_rows(folder / "small", 2000, shards=7)
    data = {"kind": "records", "path": str(source), "inputs": "tokens", "target": "label", "num_workers": seed % 2}
    written: dict[str, Any] = {
        "name": "data-kills",
        "model": {"factory": f"{Path(__file__).resolve()}:Classifier"},
        "data": data | {"held_out": 0.02},
        "global_batch": 48,
        "loss": "cross_entropy",
        "optimizer": {"name": "sgd", "lr": 0.01},
        "checkpoint": {"every_steps": 50},
        "stop": {"steps": RUN_STEPS},
        "seed": seed,
    }
    job = Job.model_validate(written)
    dice = random.Random(seed)
    faults = tuple(Fault(kind="kill", at=at, target="rank", number=dice.randrange(4)) for at in KILLS)
    schedule = Schedule(seed=seed, plan="dp=4 precision=fp64", steps=RUN_STEPS, hosts=0, faults=faults)
    with tempfile.TemporaryDirectory(prefix="paceline-data-") as place:
        session = Session(job, 0, Path(place), lambda text: print(text, file=sys.stderr))
        reference(session.job, schedule.plan, session.cluster, session.folder, session.say)
        found = session.tried(schedule, f"seed-{seed}")
    return found.held


# Memory


def memory_measured(folder: Path, quick: bool) -> dict[str, float]:
    """Return the growth of the process's memory over a million steps, in MB."""
    torch.set_num_threads(1)
    steps = QUICK_MEMORY_STEPS if quick else MEMORY_STEPS
    source = corpora.tiny_rows(folder, 200_000 if quick else 2_000_000, shards=64)
    task = Task("tiny", str(source), "", MEMORY_BATCH, 0, seed=SEED)
    taken = steps_of(loader_of(task, data_of(task)))
    for _ in range(WARM_STEPS):
        next(taken)
    before = resident_mb()
    course = []
    for number in range(1, steps + 1):
        next(taken)
        if number % (steps // 10) == 0:
            course.append(resident_mb())
    print(f"memory after {WARM_STEPS:,} steps {before:.1f} MB, then every {steps // 10:,} steps: {course}")
    return {"memory_growth_mb": course[-1] - before}


def steps_of(loader: Loader) -> Iterator[Any]:
    """Yield the batches of all epochs."""
    while True:
        yield from loader


def resident_mb() -> float:
    """Return the memory of this process, without the pages of mapped files, which the kernel may drop."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return round(int(line.split()[1]) * 1024 / 1e6, 1)
    raise SystemExit("/proc/self/status names no RssAnon")
