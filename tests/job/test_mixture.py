"""Mixtures of sources: what a source may set, what may be mixed, and positions that only the same mixture continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import paceline
from paceline.data.loader import Loader
from paceline.errors import DataError, JobError
from paceline.job.job import Job
from paceline.job.partition import Partition, PartitionSpec
from paceline.job.samples import DataSets
from refusals import raises


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def source_of(file: Path, first: int, rows: int, shards: int = 4, **keys: Any) -> dict[str, Any]:
    """Write files in which row n has the target `first + n`; return a source that reads them."""
    for shard, part in enumerate(np.array_split(np.arange(first, first + rows), shards)):
        text = "".join(json.dumps({"x": [float(n)], "y": int(n)}) + "\n" for n in part)
        file.mkdir(parents=True, exist_ok=True)
        (file / f"{shard}.jsonl").write_text(text)
    return {"kind": "records", "path": str(file), "inputs": "x", "target": "y", "held_out": 0, **keys}


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Any]:
    return {"a": source_of(tmp_path / "a", 0, 60), "b": source_of(tmp_path / "b", 1000, 20)}


def built(sources: dict[str, Any], **keys: Any) -> DataSets:
    data = {"kind": "mixture", "sources": sources, **keys}
    job = Job(
        model="mlp", data=data, loss="mse", optimizer={"name": "sgd", "lr": 0.1}, global_batch=1, stop={"steps": 1}
    )
    return job.data.build(input_shape=None, seed=0)


def loader_of(sources: dict[str, Any], batch: int = 8, seed: int = 3, **keys: Any) -> Loader:
    train: Any = built(sources, **keys).train
    spec = PartitionSpec()
    part = Partition(spec, samples=len(train), global_batch=batch, seed=seed, replica=0, replicas=1, shards=train)
    return Loader(train, part)


def targets(loader: Any, epochs: int = 1) -> list[int]:
    return [int(y) for _ in range(epochs) for batch in loader for y in batch[-1]]


# what a source may set


@pytest.mark.parametrize(
    ("key", "value"), [("num_workers", 2), ("collate", "own:batch"), ("collate_held_out", "own:batch")]
)
def test_a_key_of_the_mixture_is_refused_in_a_source(key: str, value: Any, sources: dict[str, Any]) -> None:
    sources["b"][key] = value
    with raises(JobError, "data.key_of_mixture", name="b", key=key):
        built(sources)


def test_sources_share_one_cache(sources: dict[str, Any]) -> None:
    sources["b"]["cache_gb"] = 2
    with raises(JobError, "data.caches_differ", values=[2.0, 32.0]):
        built(sources)
    sources["a"]["cache_gb"] = 2
    assert len(built(sources).train) == 80  # type: ignore[arg-type]


def test_each_source_has_its_own_limit_and_validation_and_test_sets(tmp_path: Path, sources: dict[str, Any]) -> None:
    sources["a"] |= {"limit": 40, "held_out": 0.25, "test": 0.1}
    other = source_of(tmp_path / "other", 2000, 5)["path"]
    sources["b"] |= {"held_out_path": other, "test": str(source_of(tmp_path / "test", 3000, 4)["path"])}
    sets: Any = built(sources)
    found = [[int(part[n][1]) for n in range(len(part))] for part in (sets.train, sets.held_out, sets.test)]
    assert [len(part) for part in found] == [26 + 20, 10 + 5, 4 + 4]
    assert [{y // 1000 for y in part} for part in found] == [{0, 1}, {0, 2}, {0, 3}]
    assert len({y for part in found for y in part}) == 69


def test_each_source_says_what_happens_to_its_damaged_rows(tmp_path: Path, sources: dict[str, Any]) -> None:
    sources["b"]["on_bad_shard"] = "skip"
    for name in "ab":
        file = tmp_path / name / "0.jsonl"
        file.write_bytes(b"!" + file.read_bytes()[1:])
    train: Any = built({"b": sources["b"]}).train
    train.__getitems__([0, 1])
    assert train.counts == {"replaced": 1}
    with raises(DataError, "data.row_unreadable", shard=f"{tmp_path / 'a' / '0.jsonl'}, row 0"):
        built(sources)


def test_each_source_is_shuffled_in_its_own_windows(sources: dict[str, Any]) -> None:
    def drawn(**window: int) -> dict[str, list[int]]:
        keys = {name: {**source, "shuffle_window": window.get(name, 4096)} for name, source in sources.items()}
        found = targets(loader_of(keys))
        return {"a": [y for y in found if y < 1000], "b": [y for y in found if y >= 1000]}

    wide, narrow = drawn(), drawn(b=1)
    assert narrow["a"] == wide["a"]
    assert narrow["b"] != wide["b"]
    assert sorted(narrow["b"]) == sorted(wide["b"])


def test_the_collate_function_of_a_mixture_gets_samples_of_all_sources(tmp_path: Path, sources: dict[str, Any]) -> None:
    (tmp_path / "own.py").write_text("def batch(samples):\n    return len(samples), [int(y) for _, y in samples]\n")
    sources["b"]["inputs"] = ["x", "x"]
    sources["b"]["map"] = f"{tmp_path / 'own.py'}:same"
    (tmp_path / "own.py").open("a").write("def same(row):\n    return [1, 2, 3], row['y']\n")
    train: Any = built(sources, collate=f"{tmp_path / 'own.py'}:batch").train
    assert train.collate_fn(train.__getitems__([0, 79])) == (2, [0, 1019])


# what may be mixed


@pytest.mark.parametrize(
    "other",
    [
        {"x": [1.0, 2.0], "y": 1},  # another shape
        {"x": [1], "y": 1},  # integers instead of fractions
        {"x": [1.0], "y": 0.5},
        {"x": [1.0], "y": [1]},
        {"x": [1.0], "z": 2.0, "y": 1, "inputs": ["x", "z"]},  # another number of inputs
        {"x": [1.0], "y": 1, "inputs": None, "target": None},  # a dict instead of a tuple
    ],
    ids=str,
)
@pytest.mark.parametrize("first", [True, False])
def test_sources_whose_samples_cannot_be_in_one_batch_are_refused_before_the_start(
    other: dict[str, Any], first: bool, tmp_path: Path, sources: dict[str, Any]
) -> None:
    keys = {name: other.pop(name) for name in ("inputs", "target") if name in (other := dict(other))}
    (tmp_path / "c.jsonl").write_text(json.dumps(other) + "\n" + json.dumps(other) + "\n")
    third = {**sources["b"], "path": str(tmp_path / "c.jsonl"), **keys}
    both = {"c": third, "a": sources["a"]} if first else {"a": sources["a"], "c": third}
    with raises(DataError, "data.samples_of_sources_differ", first=next(iter(both)), second=list(both)[1]):
        built(both)


def test_numbers_of_a_users_function_mix_with_numbers_of_columns(tmp_path: Path, sources: dict[str, Any]) -> None:
    (tmp_path / "own.py").write_text("import torch\ndef sample(row):\n    return torch.tensor(row['x']), row['y']\n")
    sources["b"]["map"] = f"{tmp_path / 'own.py'}:sample"
    train: Any = built(sources).train
    batch = default_collate(train.__getitems__([0, 79]))
    assert batch[0].dtype == torch.float32
    assert batch[1].tolist() == [0, 1019]


# weights, repeats and small sources


def test_repeats_lengthen_and_shorten_an_epoch(sources: dict[str, Any]) -> None:
    loader = loader_of(sources, repeat={"a": 0.5, "b": 2.5})
    for _ in range(2):
        found = targets(loader)
        assert len(found) == 80
        assert sum(y < 1000 for y in found) == pytest.approx(30, abs=1)
    all_of_a = [y for y in targets(loader_of(sources, repeat={"a": 0.5, "b": 2.5}), 2) if y < 1000]
    assert len(set(all_of_a)) >= 58, "two halves are different samples"


def test_a_batch_may_have_more_samples_than_the_sources(sources: dict[str, Any]) -> None:
    loader = loader_of(sources, batch=190, repeat={"a": 2.5, "b": 2.5})
    assert loader.example(200)[0].shape == (200, 1)
    counts = np.bincount(targets(loader))
    assert counts.sum() == 200
    assert set(counts[:60].tolist()) == {2, 3}


def test_a_source_that_begins_with_weight_0_comes_at_its_step(sources: dict[str, Any]) -> None:
    schedule = [{"step": 25, "weights": {"a": 1, "b": 1}}, {"step": 30, "weights": {"b": 1}}]
    loader = loader_of(sources, weights={"a": 1}, schedule=schedule)
    steps = [[int(y) for y in batch[-1]] for _ in range(4) for batch in loader]
    of_b = [sum(y >= 1000 for y in step) for step in steps]
    assert of_b == [0] * 25 + [4] * 5 + [8] * 10
    first_of_b = [y for step in steps for y in step if y >= 1000][:20]
    assert sorted(first_of_b) == list(range(1000, 1020))


def test_a_source_smaller_than_its_share_of_a_batch_is_drawn_evenly(tmp_path: Path, sources: dict[str, Any]) -> None:
    sources["few"] = source_of(tmp_path / "few", 5000, 3, shards=2)
    loader = loader_of(sources, batch=40, weights={"a": 1, "few": 1})
    counts = np.bincount([y - 5000 for y in targets(loader, 3) if y >= 5000])
    assert len(counts) == 3
    assert counts.max() - counts.min() <= 1


# positions


CHANGES: dict[str, dict[str, Any]] = {
    "weights": {"weights": {"a": 1, "b": 2}},
    "schedule": {"schedule": [{"step": 2, "weights": {"a": 1, "b": 2}}]},
    "repeat": {"repeat": {"a": 2}},
    "seed": {"seed": 4},
    "batch": {"batch": 10},
}


@pytest.mark.parametrize("change", [*CHANGES, "window", "names", "sizes"])
def test_a_position_is_refused_with_another_mixture(change: str, tmp_path: Path, sources: dict[str, Any]) -> None:
    loader = loader_of(sources)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    within = json.loads(json.dumps(loader.state_dict()))
    list(batches)
    between = json.loads(json.dumps(loader.state_dict()))
    if change == "window":
        sources["b"]["shuffle_window"] = 7
    if change == "names":
        sources = {"b": sources["b"], "a": sources["a"]}
    if change == "sizes":
        sources["a"] = source_of(tmp_path / "other", 0, 60, shards=5)
    other = loader_of(sources, **CHANGES.get(change, {}))
    for state in (within, between):  # the sources go on from one epoch to the next
        with raises(DataError, "data.position_differs", step=state["step"]):
            other.load_state_dict(state)


def test_later_weights_may_change(sources: dict[str, Any]) -> None:
    loader = loader_of(sources)
    batches = iter(loader)
    begun = [int(y) for _ in range(4) for y in next(batches)[-1]]
    other = loader_of(sources, schedule=[{"step": 6, "weights": {"a": 1}}])
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    rest = targets(other)
    assert len({*begun, *rest[:16]}) == 48, "no sample comes twice before the sources have ended"
    assert all(y < 1000 for y in rest[16:])


def test_records_of_other_sizes_are_refused_at_a_position(tmp_path: Path) -> None:
    def loader(shards: int) -> Loader:
        source = source_of(tmp_path / str(shards), 0, 60, shards=shards)
        job = Job(
            model="mlp",
            data=source,
            loss="mse",
            optimizer={"name": "sgd", "lr": 0.1},
            global_batch=1,
            stop={"steps": 1},
        )
        train: Any = job.data.build(input_shape=None, seed=0).train
        part = Partition(PartitionSpec(), samples=60, global_batch=8, seed=3, replica=0, replicas=1, shards=train)
        return Loader(train, part)

    one = loader(4)
    next(iter(one))
    with raises(DataError, "data.position_differs", step=1):
        loader(5).load_state_dict(one.state_dict())


def test_a_users_own_loop_draws_by_weight_and_refuses_other_weights(sources: dict[str, Any]) -> None:
    def engine_of(**keys: Any) -> Any:
        model = torch.nn.Linear(1, 1)
        data = DataLoader(built(sources, **keys).train, 8, shuffle=True)
        return paceline.setup(model, torch.optim.SGD(model.parameters(), lr=1e-9), loss=torch.nn.MSELoss(), loader=data)

    engine = engine_of(weights={"a": 1, "b": 1})
    batches = iter(engine.loader)
    for _ in range(3):
        assert sum(int(y) >= 1000 for y in next(batches)[-1]) == 4
    state = json.loads(json.dumps(engine.loader.state_dict()))
    list(batches)
    engine.close()
    other = engine_of(weights={"a": 3, "b": 1})
    with raises(DataError, "data.position_differs", step=3):
        other.loader.load_state_dict(state)
    other.close()
