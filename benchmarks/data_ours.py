"""The loader of paceline for a task of `data.py`: the data and the loader of a job, in this process.

python benchmarks/data_ours.py TASK    (started by data.py)
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from data_serve import Batch, Loading, Task, serve
from paceline.data.loader import Loader
from paceline.job.job import Job
from paceline.job.partition import Partition
from paceline.job.samples import DataSets

SHAPE = [3, 256, 256]


def main(task: Task) -> None:
    """Serve the loader of one rank that reads everything."""
    serve(lambda: loading_of(task), lambda: None)


def loading_of(task: Task) -> Loading:
    """Return the loader of a rank that reads everything."""
    loader = loader_of(task, data_of(task))

    def epoch() -> Iterator[Batch]:
        for batch in loader:
            yield tuple(batch.values()) if isinstance(batch, dict) else tuple(batch)

    def seek(sample: int) -> None:
        loader.load_state_dict(loader.state_dict() | {"step": sample // task.batch})

    return Loading(epoch, seek)


def data_of(task: Task) -> DataSets:
    """Open the data of a task, as a job does."""
    return job_of(task).data.build(input_shape=None, seed=task.seed)


def job_of(task: Task) -> Job:
    """Return a job that trains on the corpus of a task."""
    kinds: dict[str, dict[str, Any]] = {
        "text": {"kind": "tokens", "tokenizer": task.tokenizer, "context": task.context, "pack": task.pack},
        "tokens": {"kind": "records", "inputs": "tokens", "target": "label"},
        "tiny": {"kind": "records", "inputs": "tokens", "target": "label"},
        "images": {"kind": "records", "shape": SHAPE},
        "tars": {"kind": "records", "columns": {"image": "jpg", "label": "cls"}, "shape": SHAPE},
    }
    data = {"path": task.source, "held_out": 0, **kinds[task.work]}
    if task.window:
        data["shuffle_window"] = task.window
    return Job.model_validate(
        {
            "model": "mlp",
            "data": data,
            "loss": "cross_entropy",
            "optimizer": {"name": "sgd", "lr": 0.1},
            "global_batch": task.batch,
            "seed": task.seed,
            "stop": {"steps": 10**9},
        }
    )


def loader_of(task: Task, data: DataSets, replica: int = 0, replicas: int = 1) -> Loader:
    """Return the loader of one of several ranks, as `paceline train` builds it."""
    job, train = job_of(task), data.train
    partition = Partition(
        job.partition,
        samples=len(train),  # type: ignore[arg-type]
        global_batch=job.global_batch,
        seed=job.seed,
        replica=replica,
        replicas=replicas,
        shards=train,  # type: ignore[arg-type]
        leaves_empty=True,
    )
    return Loader(train, partition, num_workers=task.workers)


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    main(Task(**json.loads(sys.argv[1])))
