"""The job as a script of one rank has it: its batches, weights and losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from paceline.job.job import Job
from paceline_lab.systems.system import JOB, Steps, Task
from paceline_lab.systems.work import Work

HERE = str(Path(__file__).resolve())


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A data set as people write one: without access to many samples at once."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((3,), float(index)), torch.tensor(index % 2)


def line() -> torch.nn.Module:
    return torch.nn.Linear(3, 2)


DATA: dict[str, Any] = {
    "tensors": {"kind": "synthetic", "samples": 40, "shape": [3], "classes": 2, "held_out": 0},
    "samples": {"kind": "dataset", "factory": f"{HERE}:Numbers", "held_out": 0},
}


@pytest.fixture(params=DATA)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    job = Job(
        model=f"{HERE}:line",
        data=DATA[request.param],
        loss="cross_entropy",
        optimizer="sgd",
        global_batch=8,
        stop={"steps": 7},
    )
    (tmp_path / JOB).write_text(job.to_yaml())
    return tmp_path


def work(folder: Path, **changes: Any) -> Work:
    Task(**{"ranks": 2, "hosts": 1, "steps": 7} | changes).write(folder)
    return Work(folder)


def test_ranks_share_each_global_batch_and_a_tuned_script_reads_the_same(folder: Path) -> None:
    whole = [batch[0] for batch in work(folder).batches()]
    assert len(whole) == 7, "one epoch of five steps, and two of the next"
    for changes in ({}, {"tuned": True}, {"tuned": True, "num_workers": 1}):
        parts = [[batch[0] for batch in work(folder, **changes).batches(rank, 2)] for rank in range(2)]
        for step, batch in enumerate(whole):
            assert torch.equal(torch.cat([part[step] for part in parts]), batch)


def test_a_batch_of_one_step_is_the_one_that_a_script_reads_then(folder: Path) -> None:
    read = list(work(folder).batches(1, 2))
    for step, (inputs, target) in enumerate(read):
        again = list(work(folder).batch(step, 1, 2))
        assert torch.equal(again[0], inputs)  # type: ignore[arg-type]
        assert torch.equal(again[1], target)  # type: ignore[arg-type]


def test_the_first_weights_are_the_same_in_every_process_and_the_steps_are_left_for_all(folder: Path) -> None:
    first, second = work(folder), work(folder)
    weights = [model.state_dict()["weight"] for model in (first.model(), second.model())]
    assert torch.equal(*weights)
    model = second.model()
    for batch in second.batches(1, 2):
        second.took(second.loss(model, batch))
    second.write()
    left = Steps.of_ranks(folder, 1) if (folder / "rank-0.json").exists() else None
    assert left is None, "it was rank 1"
    (folder / "rank-1.json").rename(folder / "rank-0.json")
    assert len(Steps.of_ranks(folder, 1).losses) == 7


def words() -> torch.nn.Module:
    return torch.nn.Embedding(3, 2, sparse=True)


def test_a_tuned_update_is_fused_but_where_gradients_are_sparse(folder: Path) -> None:
    taken = work(folder, tuned=True)
    assert taken.optimizer(taken.model().parameters()).param_groups[0]["fused"]
    (folder / JOB).write_text((folder / JOB).read_text().replace(":line", ":words"))
    taken = work(folder, tuned=True)
    assert not taken.optimizer(taken.model().parameters()).param_groups[0]["fused"]
