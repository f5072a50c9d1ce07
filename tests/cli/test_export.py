"""`paceline export`: the file holds the measured model; unusable input is an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from commands import in_a_process, paceline, write_job
from paceline.job.job import Job
from paceline.run.record.run import Run
from paceline.state.writer import Snapshot
from single_process_mesh import save_all


def trained(job: Path) -> Run:
    outcome = paceline("train", job, "--plan", "dp=2", "--run", "run", folder=job.parent)
    assert outcome.code == 0, outcome.err
    return Run(job.parent / "run")


def exported(job: Job, file: Path) -> nn.Module:
    """A fresh model of the job with the file's weights."""
    torch.manual_seed(1)
    model = job.model.build().eval()
    model.load_state_dict(load_file(file))
    return model


def test_a_fresh_model_with_the_exported_weights_has_the_accuracy_of_the_run(tmp_path: Path) -> None:
    file = write_job(
        tmp_path / "job.yaml",
        data="digits",
        model="mlp",
        metrics=["accuracy"],
        global_batch=64,
        stop={"epochs": 2},
        checkpoint={"every_steps": 30},
    )
    run = trained(file)
    assert paceline("export", "run", "model.safetensors", folder=tmp_path).says("model.safetensors: load it with")
    held_out = run.job.data.build(input_shape=run.job.model.input_shape(), seed=run.job.seed).held_out
    assert held_out is not None
    inputs, labels = held_out.__getitems__(list(range(len(held_out))))  # type: ignore[arg-type, attr-defined]
    with torch.inference_mode():
        accuracy = (
            (exported(run.job, tmp_path / "model.safetensors")(inputs).argmax(1) == labels).double().mean().item()
        )
    assert accuracy == run.metrics["accuracy"]
    assert accuracy > 0.5

    outcome = paceline("export", "run", "model.safetensors", folder=tmp_path)
    assert outcome.error.startswith("model.safetensors exists already and is not overwritten")
    outcome = paceline("export", "run", "folder", "--layout", "hf", folder=tmp_path)
    assert "[export.not_hugging_face]" in outcome.error
    outcome = paceline("export", "runs", "other.safetensors", folder=tmp_path)
    assert outcome.error.startswith("runs does not exist. Name a run directory")

    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    (newest / "rank-0.safetensors").write_bytes(b"altered")
    outcome = paceline("export", "run", "older.safetensors", folder=tmp_path)
    assert outcome.code == 0
    assert outcome.err.startswith("note: run/checkpoints/step-")
    assert "truncated or altered. An older one is taken instead." in outcome.err
    assert ".py:" not in outcome.err, "a warning's code line is on the screen"


def test_tied_weights_are_in_the_file_under_each_name(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("to be or not to be, that is the question. " * 40)
    file = write_job(
        tmp_path / "job.yaml",
        model={"zoo": "gpt", "args": {"layers": 1, "hidden": 16, "heads": 2, "context": 16}},
        data={"kind": "text", "path": "words.txt", "context": 16, "held_out": 0.2},
        stop={"steps": 3},
    )
    run = trained(file)
    assert paceline("export", "run", "model.safetensors", folder=tmp_path).code == 0
    model = exported(run.job, tmp_path / "model.safetensors")
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert len(names) > len(list(model.parameters())), "otherwise nothing is tied here"
    assert set(names) <= set(load_file(tmp_path / "model.safetensors"))
    held_out = run.job.data.build(input_shape=None, seed=run.job.seed).held_out
    assert held_out is not None
    tokens, following = held_out.__getitems__(list(range(len(held_out))))  # type: ignore[arg-type, attr-defined]
    with torch.inference_mode():
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), following.flatten().long()).item()
    assert abs(loss - run.metrics["loss"]) < 1e-5


@pytest.mark.slow
def test_transformers_loads_the_exported_folder_of_a_bert(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    bert = {"zoo": "bert", "args": {"layers": 1, "hidden": 16, "heads": 2, "context": 16}}
    job = Job.load(write_job(tmp_path / "run" / "job.yaml", model=bert))
    model = job.model.build()
    save_all(
        tmp_path / "run" / "checkpoints", 1, [Snapshot({f"model/{name}": p for name, p in model.named_parameters()})]
    )
    outcome = in_a_process("export", "run", "bert", "--layout", "hf", folder=tmp_path)
    assert outcome.says("bert: load it with from_pretrained('bert')")
    assert outcome.err == "", "nothing of transformers is on the screen"
    assert json.loads((tmp_path / "bert" / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    stored = load_file(tmp_path / "bert" / "model.safetensors")
    assert all(torch.equal(stored[name], parameter) for name, parameter in model.named_parameters())
