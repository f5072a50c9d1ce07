"""`paceline evaluate` and `paceline predict` compute what the run measured, and what the exported model returns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from commands import paceline, write_job
from paceline.errors import DataError
from paceline.job.job import Job
from paceline.run.prediction_inputs import inputs_of
from paceline.run.record.run import Run

COLUMNS = ("a", "b", "c")
CODE = """
import torch


def net(inputs=3, classes=3):
    linear = torch.nn.Linear
    return torch.nn.Sequential(torch.nn.Flatten(), linear(inputs, 16), torch.nn.ReLU(), linear(16, classes))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that divide the model, with a best checkpoint and a test set."""
    base = tmp_path_factory.mktemp("evaluated")
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(203, 3)).astype(np.float32)
    labels = (inputs[:, 0] > 0).astype(np.int64) + (inputs[:, 1] > 1)
    table = {name: inputs[:, i] for i, name in enumerate(COLUMNS)}
    pq.write_table(pa.table({**table, "y": labels}), base / "train.parquet")
    pq.write_table(pa.table({"id": [f"n{i}" for i in range(203)], **table}), base / "new.parquet", row_group_size=50)
    np.savez_compressed(base / "new.npz", a=table["a"], b=table["b"], c=table["c"])
    (base / "net_of_tests.py").write_text(CODE)
    job = write_job(
        base / "job.yaml",
        model="net_of_tests.py:net",
        data={"kind": "arrays", "path": "train.parquet", "inputs": list(COLUMNS), "target": "y", "test": 0.2},
        metrics=["accuracy", "f1"],
        optimizer={"name": "adam", "lr": 0.3},
        global_batch=32,
        evaluate={"every_steps": 2},
        checkpoint={"best": "loss", "keep": 1},
        stop={"steps": 20},
    )
    outcome = paceline("train", job, "--plan", "fsdp=2", "--run", "run", folder=base)
    assert outcome.code == 0, outcome.err
    assert outcome.says("test         loss")
    return base


def evaluations(folder: Path) -> dict[int, dict[str, float]]:
    return {e["step"]: e["metrics"] for e in Run(folder / "run").events() if e["event"] == "evaluation"}


def measured(folder: Path, *words: str) -> dict[str, float]:
    outcome = paceline("evaluate", "run", *words, "--json", folder=folder)
    assert outcome.code == 0, outcome.err
    found: dict[str, float] = json.loads(outcome.out)["metrics"]
    return found


def test_a_saved_run_measures_as_it_did_at_its_end(folder: Path) -> None:
    run = Run(folder / "run")
    assert run.test_metrics.keys() == {"loss", "accuracy", "f1"}
    assert measured(folder) == pytest.approx(run.test_metrics, rel=1e-5)
    assert measured(folder, "--data", "held_out") == pytest.approx(run.metrics, rel=1e-5)
    assert measured(folder, "--data", "train.parquet").keys() == run.metrics.keys()


def test_the_best_checkpoint_is_kept_measured_and_exported(folder: Path) -> None:
    each = evaluations(folder)
    best = min(each, key=lambda step: each[step]["loss"])
    steps = sorted(int(path.name.rpartition("-")[2]) for path in (folder / "run" / "checkpoints").glob("step-*"))
    assert steps == sorted({best, 20})
    assert measured(folder, "--data", "held_out", "--checkpoint", "best") == pytest.approx(each[best], rel=1e-5)
    for which in ("best", str(best)):
        outcome = paceline("export", "run", f"{which}.safetensors", "--checkpoint", which, folder=folder)
        assert outcome.code == 0, outcome.err
    first, second = (load_file(folder / f"{which}.safetensors") for which in ("best", str(best)))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (
        "[checkpoint.step_missing]"
        in paceline("export", "run", "none.safetensors", "--checkpoint", "3", folder=folder).error
    )


def test_predictions_are_those_of_the_model_in_the_order_of_the_data(folder: Path) -> None:
    assert paceline("export", "run", "model.safetensors", folder=folder).code == 0
    scope: dict[str, Any] = {}
    exec(CODE, scope)
    model = scope["net"]().eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    new = pq.read_table(folder / "new.parquet")
    with torch.no_grad():
        logits = model(torch.from_numpy(np.stack([new[name].to_numpy() for name in COLUMNS], axis=1)))
    both = ("--outputs", "classes", "--outputs", "probabilities")
    for source, out, words in (
        ("new.parquet", "out.parquet", ("--columns", "id", *both)),
        ("new.npz", "out.npz", ("--batch", "50", *both)),
        ("new.npz", "out.npy", ("--outputs", "logits")),
    ):
        outcome = paceline("predict", "run", "--data", source, "--out", out, *words, folder=folder)
        assert outcome.code == 0, outcome.err
    table, arrays = pq.read_table(folder / "out.parquet"), np.load(folder / "out.npz")
    assert table["row"].to_pylist() == arrays["row"].tolist() == list(range(203))
    assert table["id"].to_pylist() == new["id"].to_pylist()
    assert table["class"].to_pylist() == arrays["class"].tolist() == logits.argmax(1).tolist()
    for found in (np.array(table["probability"].to_pylist()), arrays["probability"]):
        assert torch.allclose(torch.from_numpy(found).float(), logits.softmax(1), atol=1e-6)
    assert torch.allclose(torch.from_numpy(np.load(folder / "out.npy")), logits, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--data", "new.parquet", "--out", "job.yaml"), "predict.unknown_ending"),
        (("--data", "job.yaml", "--out", "x.parquet"), "predict.unknown_file"),
        (("--data", "new.npz", "--out", "x.npz", "--columns", "id"), "predict.no_columns"),
        (("--data", "new.npz", "--out", "x.npz", "--outputs", "labels"), "predict.unknown_output"),
    ],
)
def test_what_cannot_be_predicted_is_refused_by_name(folder: Path, words: tuple[str, ...], code: str) -> None:
    assert f"[{code}]" in paceline("predict", "run", *words, folder=folder).error


@pytest.mark.parametrize(
    ("data", "code"), [("digits", "data.source_without_files"), ("net.py:Own", "data.source_not_a_factory")]
)
def test_data_of_another_kind_is_refused(
    data: str, code: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text("class Own: ...\n")
    with pytest.raises(DataError) as caught:
        inputs_of(Job.load(write_job(tmp_path / "job.yaml", data=data)), str(folder / "new.npz"), (), None)
    assert caught.value.code == code


def test_images_get_the_names_of_their_classes(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for name, dark, number in (("photos/cat", 0, 8), ("photos/dog", 128, 8), ("new", 0, 3)):
        (tmp_path / name).mkdir(parents=True)
        for i in range(number):
            pixels = draw.integers(0, 127, (8, 8, 3), dtype=np.uint8) + np.uint8(dark)
            Image.fromarray(pixels).save(tmp_path / name / f"{i}.png")
    (tmp_path / "net_of_photos.py").write_text(CODE)
    job = write_job(
        tmp_path / "job.yaml",
        model={"factory": "net_of_photos.py:net", "args": {"inputs": 192, "classes": 2}},
        data={"kind": "images", "path": "photos", "shape": [3, 8, 8]},
        optimizer={"name": "adam", "lr": 0.02},
        global_batch=8,
        stop={"steps": 6},
    )
    assert paceline("train", job, "--plan", "dp=1", "--run", "run", folder=tmp_path).code == 0
    outcome = paceline("predict", "run", "--data", "new", "--out", "out.parquet", folder=tmp_path)
    assert outcome.code == 0, outcome.err
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["file"] for row in rows] == ["0.png", "1.png", "2.png"]
    assert [row["label"] for row in rows] == ["cat"] * 3
