"""A user's own data set by import path, and what is refused with a word on what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from paceline.data.loader import Loader
from paceline.data.samples import held_out_batches
from paceline.errors import DataError, JobError
from paceline.job.data import DataSpec
from paceline.job.job import Job
from paceline.job.partition import Partition, PartitionSpec
from paceline.job.samples import DataSets
from paceline.planning.model.forward_pass import batch_of
from refusals import raises

CODE = """
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

def points(samples=10):
    return TensorDataset(torch.arange(samples).float().unsqueeze(1), torch.arange(samples) % 2)

class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(1), 0

class NoLength(Dataset):
    def __getitem__(self, index):
        return torch.zeros(1), 0

class Broken(Dataset):
    def __len__(self):
        return 3
    def __getitem__(self, index):
        raise KeyError("pixels")

class Counting(Dataset):
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return torch.zeros(1), 0
    def state_dict(self):
        return {"reads": 1}
    def load_state_dict(self, state):
        pass

def of(sample):
    return [sample, sample, sample]

def lone_tensors():
    return [torch.zeros(2)] * 3

def dicts():
    return [{"input_ids": torch.arange(3), "labels": torch.arange(3)}] * 5

def one_part():
    return [(torch.zeros(1),)] * 3

def words():
    return ["a", "bcd", "ef", "g"]

def pad(samples):
    longest = max(map(len, samples))
    codes = torch.tensor([[ord(letter) for letter in word.ljust(longest)] for word in samples])
    return {"input_ids": codes, "labels": codes}

def doubled(samples):
    return torch.stack([2 * x for x, _ in samples]), torch.tensor([int(y) for _, y in samples])

not_callable = 5
"""


@pytest.fixture
def build(tmp_path: Path) -> Any:
    file = tmp_path / f"own_data_{tmp_path.name}.py"
    file.write_text(CODE)

    def build(name: str, **values: Any) -> DataSets:
        spec = TypeAdapter(DataSpec).validate_python(
            {"kind": "dataset", "factory": f"{file}:{name}", **values}, context={"base": tmp_path}
        )
        return spec.build(input_shape=None, seed=0)

    return build


def test_a_users_data_set_is_split_like_any_other(build: Any) -> None:
    train, held_out, synthetic, _ = build("points", args={"samples": 20})
    assert (len(train), len(held_out), synthetic) == (18, 2, False)
    assert sorted(int(s[i][0]) for s in (train, held_out) for i in range(len(s))) == list(range(20))


def test_a_users_held_out_set_leaves_all_samples_to_train_on(build: Any, tmp_path: Path) -> None:
    file = tmp_path / f"own_data_{tmp_path.name}.py"
    train, held_out, *_ = build("points", held_out_factory=f"{file}:points", args={"samples": 8})
    assert (len(train), len(held_out)) == (8, 8)


@pytest.mark.parametrize("held_out", [0, 0.4])
def test_a_state_of_a_users_data_set_is_not_kept_so_that_no_lost_rank_takes_it_along(
    build: Any, held_out: float
) -> None:
    train = build("Counting", held_out=held_out).train
    loader = Loader(
        train, Partition(PartitionSpec(), samples=len(train), global_batch=1, seed=0, replica=0, replicas=1)
    )
    next(iter(loader))
    assert loader.state_dict()["reader"] is None


def test_samples_may_be_dicts(build: Any) -> None:
    assert set(build("dicts").train[0]) == {"input_ids", "labels"}


def test_a_jobs_own_collate_makes_the_batches_of_both_sets_from_samples_of_any_kind(build: Any, tmp_path: Path) -> None:
    train, held_out, *_ = build("words", collate=f"own_data_{tmp_path.name}.py:pad", held_out=0.5)
    (first,) = held_out_batches(held_out, batch=2, replica=0, replicas=1)
    assert first["input_ids"].shape == (2, max(len(held_out[0]), len(held_out[1])))
    partition = Partition(PartitionSpec(shuffle=False), samples=2, global_batch=2, seed=0, replica=0, replicas=1)
    (batch,) = Loader(train, partition)
    assert bytes(batch["input_ids"][0].tolist()).decode().strip() == train[0]


def test_a_collate_of_the_validation_set_replaces_that_of_training(build: Any, tmp_path: Path) -> None:
    here = f"own_data_{tmp_path.name}.py"
    data = build("points", collate=f"{here}:doubled", collate_held_out="torch.utils.data:default_collate", held_out=0.5)
    (measured,) = held_out_batches(data.held_out, batch=5, replica=0, replicas=1)
    assert torch.equal(measured[0], torch.stack([data.held_out[i][0] for i in range(5)]))
    (trained,) = held_out_batches(data.train, batch=5, replica=0, replicas=1)
    assert torch.equal(trained[0], 2 * torch.stack([data.train[i][0] for i in range(5)]))


def test_a_jobs_own_collate_gets_samples_also_of_a_built_in_data_set(tmp_path: Path) -> None:
    file = tmp_path / f"own_data_{tmp_path.name}.py"
    file.write_text(CODE)
    spec = {"kind": "synthetic", "shape": [3], "samples": 4, "held_out": 0, "collate": f"{file.name}:doubled"}
    train, _, *_ = (
        TypeAdapter(DataSpec).validate_python(spec, context={"base": tmp_path}).build(input_shape=None, seed=0)
    )
    (batch,) = held_out_batches(train, batch=4, replica=0, replicas=1)
    assert torch.equal(batch[0], 2 * torch.stack([train[i][0] for i in range(4)]))


def test_a_plan_knows_what_a_jobs_own_collate_makes(tmp_path: Path) -> None:
    (tmp_path / f"own_data_{tmp_path.name}.py").write_text(CODE)
    here = str(tmp_path / f"own_data_{tmp_path.name}.py")
    data = {"factory": f"{here}:words", "kind": "dataset", "held_out": 0, "collate": f"{here}:pad"}
    job = Job(
        model="gpt", data=data, loss="model", optimizer={"name": "sgd", "lr": 0.1}, global_batch=4, stop={"steps": 1}
    )
    batch = batch_of(job, 5)
    assert isinstance(batch, dict)
    assert batch["input_ids"].shape == (5, 1)


@pytest.mark.parametrize(
    ("name", "values", "code"),
    [
        ("Stream", {}, "data.iterable_factory"),
        ("NoLength", {}, "data.not_a_dataset"),
        ("points", {"args": {"samples": 0}}, "data.dataset_empty"),
        ("points", {"args": {"sample": 3}}, "data.factory_raised"),
        ("Broken", {}, "data.first_sample_raised"),
        ("of", {"args": {"sample": "text"}}, "data.sample_form"),
        ("lone_tensors", {}, "data.sample_form"),
        ("one_part", {}, "data.sample_form"),
        ("not_callable", {}, "data.factory_raised"),
    ],
)
def test_what_is_no_usable_data_set_is_refused_with_its_reason(
    build: Any, name: str, values: dict[str, Any], code: str
) -> None:
    with raises(DataError, code):
        build(name, **values)


def test_an_import_that_fails_names_what_there_is(build: Any) -> None:
    with raises(JobError, "job.object_missing"):
        build("poins")
