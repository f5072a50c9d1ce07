"""Test sets. A sample that is also trained on, or validated on, makes the last figure worthless."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from paceline.errors import JobError
from paceline.job.data import DataSpec
from paceline.job.job import Job
from paceline.job.samples import DataSets, Selection


def build(base: Path, **values: Any) -> DataSets:
    spec: Any = TypeAdapter(DataSpec).validate_python(values, context={"base": base})
    sets: DataSets = spec.build(input_shape=None, seed=3)
    return sets


def test_a_share_has_samples_of_its_own_and_leaves_the_validation_set_as_it_is(tmp_path: Path) -> None:
    with_test, without = (build(tmp_path, kind="digits", limit=200, **more) for more in ({"test": 0.3}, {}))
    rows = []
    for dataset in (with_test.train, with_test.held_out, with_test.test, without.held_out):
        assert isinstance(dataset, Selection)
        rows.append(dataset.rows.tolist())
    assert sorted(rows[0] + rows[1] + rows[2]) == list(range(200))
    assert len(rows[2]) == 60
    assert rows[1] == rows[3]


def test_a_share_of_text_lies_between_training_and_validation(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(200)))
    sets = build(tmp_path, kind="text", path="a.txt", context=8, held_out=0.1, test=0.2)
    parts = (sets.train, sets.test, sets.held_out)
    read = [[int(b) for x, y in (part[i] for i in range(len(part))) for b in (*x, y[-1])] for part in parts]  # type: ignore[arg-type, index]
    assert read[0][-1] < read[1][0] < read[1][-1] < read[2][0]
    assert sets.held_out is not None
    assert len(sets.test) > len(sets.held_out)  # type: ignore[arg-type]


def test_a_share_of_invented_data_is_apart(tmp_path: Path) -> None:
    sets = build(tmp_path, kind="synthetic", shape=[3], samples=20, held_out=0.1, test=0.2)
    parts = (sets.train, sets.test, sets.held_out)
    seen = [tuple(part[i][0].tolist()) for part in parts if part for i in range(len(part))]  # type: ignore[arg-type]
    assert len(set(seen)) == len(seen) == 20


def test_files_and_factories_of_their_own_are_test_sets(tmp_path: Path) -> None:
    for name, rows in (("train", 10), ("test", 4)):
        np.savez(tmp_path / f"{name}.npz", x=np.full((rows, 2), rows, dtype=np.float32), y=np.zeros(rows))
        (tmp_path / f"{name}.txt").write_bytes(bytes([rows]) * 100)
    arrays = build(tmp_path, kind="arrays", path="train.npz", test="test.npz", held_out=0)
    text = build(tmp_path, kind="text", path="train.txt", test="test.txt", context=9)
    (tmp_path / "sets_of_tests.py").write_text(
        "import torch\n\n\ndef make(n=6):\n    return torch.utils.data.TensorDataset(torch.zeros(n), torch.zeros(n))\n\n\n"  # noqa: E501
        "def test():\n    return make(3)\n"
    )
    own = build(tmp_path, kind="dataset", factory="sets_of_tests.py:make", test="sets_of_tests.py:test")
    assert (len(arrays.train), len(arrays.test)) == (10, 4)  # type: ignore[arg-type]
    assert arrays.test is not None
    assert torch.equal(arrays.test[0][0], torch.tensor([4.0, 4.0]))
    assert text.test is not None
    assert text.test[0][0].tolist() == [4] * 9
    assert len(own.test) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize("test", [0.0, 1.5, "other"])
def test_what_is_neither_a_share_nor_a_source_is_refused(test: Any, tmp_path: Path) -> None:
    with pytest.raises(ValidationError):
        build(tmp_path, kind="digits", test=test)


def test_metrics_need_a_validation_or_a_test_set() -> None:
    values: dict[str, Any] = {
        "model": "mlp", "loss": "cross_entropy", "optimizer": "sgd", "global_batch": 8, "stop": {"steps": 1},
        "metrics": ["accuracy"],
    }  # fmt: skip
    assert Job(**values, data={"kind": "digits", "held_out": 0, "test": 0.1}).metrics
    with pytest.raises(JobError):
        Job(**values, data={"kind": "digits", "held_out": 0})
