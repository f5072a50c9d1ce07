"""A DataLoader worker process that is killed.

The rank that it belonged to is named, and the worker, and nobody else.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.comm.backend import joined
from paceline.errors import LoaderProcessError
from paceline.launch.failure import ErrorRecord
from ranks import RankError, Ranks


def loader(**options: Any) -> DataLoader[Any]:
    dataset = TensorDataset(torch.randn(400, 4), torch.arange(400) % 3)
    return DataLoader(dataset, 8, num_workers=2, multiprocessing_context="fork", **options)


def train_and_lose_a_worker() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    engine = paceline.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, loader())
    for step, batch in enumerate(engine.loader):
        if step == 3 and os.environ["RANK"] == "1":
            # While this rank waits for the other one, which torch's own handler of SIGCHLD would interrupt.
            iterator = engine.loader._loader._iterator
            assert iterator is not None
            threading.Timer(0.2, os.kill, (iterator._workers[0].pid, signal.SIGKILL)).start()
        if step == 3 and os.environ["RANK"] == "0":
            threading.Event().wait(0.6)
        engine.step(batch)


def test_the_rank_whose_loader_process_was_killed_is_blamed_and_nobody_else(ranks: Ranks) -> None:
    said = (
        r"(?s)rank 1 of 2 failed first.*rank 1, before step 4 of epoch 0: a DataLoader worker process \(pid \d+\) "
        r"was killed by signal 9"
    )
    with pytest.raises(RankError, match=said):
        ranks(2, train_and_lose_a_worker, backend="shm")


def lose_a_worker_of_ones_own(done: str) -> str:
    """With a DataLoader that paceline knows nothing of, as for validation."""
    with joined(deadline_s=30.0) as group:
        if group.rank == 0:
            while not Path(done).exists():
                threading.Event().wait(0.02)
            return ""
        batches: Any = iter(loader())
        next(batches)
        threading.Timer(0.2, os.kill, (batches._workers[0].pid, signal.SIGKILL)).start()
        try:
            group.barrier()
        except LoaderProcessError as error:
            return f"{ErrorRecord.of(error, 1).secondary} {error}"
        finally:
            Path(done).touch()
            batches._shutdown_workers()
        return "nothing was raised"


def test_a_wait_that_the_death_of_another_loaders_process_ends_tells_of_that_process(
    ranks: Ranks, tmp_path: Path
) -> None:
    _, said = ranks(2, lose_a_worker_of_ones_own, str(tmp_path / "done"), backend="shm")
    assert said.startswith("False rank 1, in a wait for other ranks (all-reduce): DataLoader worker (pid ")
    assert "is killed by signal: Killed" in said


def test_a_lost_loader_process_may_be_tried_again() -> None:
    record = ErrorRecord.of(LoaderProcessError("rank 0: a DataLoader worker process was killed"), 0)
    assert record.explained
    assert record.may_pass
    assert not record.secondary
