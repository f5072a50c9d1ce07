"""A trained model leaves paceline as one file that plain PyTorch loads."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from paceline.errors import CheckpointError, RunError
from paceline.train.checkpoint import Checkpointer, Snapshot
from paceline.train.checkpoint_read import export, load, load_latest


class Tied(nn.Module):
    """Has what exports tend to lose: tied weights and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


def ignore(event: str, facts: dict[str, Any]) -> None:
    pass


def save(folder: Path, step: int, model: nn.Module) -> None:
    saving = Checkpointer(folder, rank=0, world=1, keep=5, deadline_s=30, report=ignore)
    shared = {f"model/{n}": p for n, p in model.named_parameters()}
    own = {f"buffer/{n}": b for n, b in model.named_buffers()} | {"rng/torch": torch.get_rng_state()}
    saving.save(
        step, Snapshot(shared | {"optimizer/w/step": torch.tensor(1.0)}, own, aliases={"model/head.weight": "model/embedding.weight"})
    )
    saving.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with two checkpoints of different weights."""
    for step in (1, 2):
        torch.manual_seed(step)
        save(tmp_path / "checkpoints", step, Tied())
    return tmp_path


@pytest.mark.parametrize("where", [".", "checkpoints", "checkpoints/step-00000002"])
def test_the_exported_file_fills_a_fresh_model_strictly(run: Path, where: str) -> None:
    out = run / "model.safetensors"
    export(run / where, out)
    torch.manual_seed(2)
    expected, fresh = Tied(), Tied()
    fresh.load_state_dict(load_file(out))
    for name, tensor in expected.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name


def test_an_export_never_overwrites(run: Path) -> None:
    out = run / "model.safetensors"
    out.write_text("precious")
    with pytest.raises(RunError, match="exists already"):
        export(run, out)
    assert out.read_text() == "precious"


def test_an_export_that_passes_over_a_damaged_checkpoint_says_so(run: Path) -> None:
    (run / "checkpoints/step-00000002/rank-0.safetensors").unlink()
    with pytest.warns(UserWarning, match=r"rank-0\.safetensors is missing\. An older one is exported"):
        export(run, run / "model.safetensors")
    torch.manual_seed(1)
    assert torch.equal(load_file(run / "model.safetensors")["head.weight"], Tied().head.weight)


def test_an_export_without_a_checkpoint_or_a_place_says_what_to_do(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(RunError, match="holds no checkpoint"):
        export(tmp_path_factory.mktemp("empty"), run / "model.safetensors")
    with pytest.raises(RunError, match=r"cannot be written .* Name a file in a folder that can be written"):
        export(run, run / "no/such/folder/model.safetensors")


def test_no_checkpoint_at_all_is_none_and_none_whole_is_an_error(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert load_latest(tmp_path_factory.mktemp("empty"), rank=0, world=1, report=ignore) is None
    assert load_latest(run / "nowhere", rank=0, world=1, report=ignore) is None
    for manifest in run.glob("checkpoints/*/manifest.json"):
        manifest.write_text("{")
    with pytest.raises(CheckpointError, match=r"(?s)is whole:.*step-00000002.*step-00000001"):
        load_latest(run / "checkpoints", rank=0, world=1, report=ignore)


def test_a_checkpoint_of_a_format_to_come_is_refused_by_name(run: Path) -> None:

    path = run / "checkpoints/step-00000002/manifest.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    content["format"] = 2
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**content, "sha256": hashlib.sha256(text.encode()).hexdigest()}))
    with pytest.raises(CheckpointError, match=r"not of the format that this version of paceline reads \(format:"):
        load(path.parent, rank=0, world=1)
