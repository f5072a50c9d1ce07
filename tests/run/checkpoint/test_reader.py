"""A trained model leaves paceline as one file that plain PyTorch loads."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from paceline.errors import CheckpointError, RunError
from paceline.run.convert import export
from paceline.split.layout import ShardLayout
from paceline.split.mesh import Mesh
from paceline.state.manifest import TensorEntry, TensorPiece
from paceline.state.reader import TensorPieces, load, load_latest
from paceline.state.shard import MeshCoordinate
from paceline.state.writer import Checkpointer, Snapshot
from refusals import raises
from single_process_mesh import meshes, save_all


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
        step,
        Snapshot(
            shared | {"optimizer/w/step": torch.tensor(1.0)},
            own,
            aliases={"model/head.weight": "model/embedding.weight"},
        ),
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
    with raises(RunError, "export.file_exists"):
        export(run, out)
    assert out.read_text() == "precious"


def test_an_export_that_passes_over_a_damaged_checkpoint_says_so(run: Path) -> None:
    (run / "checkpoints/step-00000002/rank-0.safetensors").unlink()
    with pytest.warns(UserWarning, match=r"rank-0\.safetensors"):
        export(run, run / "model.safetensors")
    torch.manual_seed(1)
    assert torch.equal(load_file(run / "model.safetensors")["head.weight"], Tied().head.weight)


def test_an_export_without_a_checkpoint_or_a_place_says_what_to_do(
    run: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with raises(RunError, "export.not_a_run", what="holds no checkpoint"):
        export(tmp_path_factory.mktemp("empty"), run / "model.safetensors")
    stopped_early = tmp_path_factory.mktemp("run")
    (stopped_early / "job.yaml").touch()
    with raises(RunError, "run.nothing_saved"):
        export(stopped_early, run / "model.safetensors")
    with raises(RunError, "export.unwritable"):
        export(run, run / "no/such/folder/model.safetensors")


def test_no_checkpoint_at_all_is_none_and_none_whole_is_an_error(
    run: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert load_latest(tmp_path_factory.mktemp("empty"), rank=0, world=1, report=ignore) is None
    assert load_latest(run / "nowhere", rank=0, world=1, report=ignore) is None
    for manifest in run.glob("checkpoints/*/manifest.json"):
        manifest.write_text("{")
    with raises(CheckpointError, "checkpoint.none_whole"):
        load_latest(run / "checkpoints", rank=0, world=1, report=ignore)


@pytest.mark.parametrize(("number", "code"), [(1, "checkpoint.format_1"), (3, "checkpoint.other_format")])
def test_a_checkpoint_of_another_format_is_refused_by_name(run: Path, number: int, code: str) -> None:
    path = run / "checkpoints/step-00000002/manifest.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    content["format"] = number
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**content, "sha256": hashlib.sha256(text.encode()).hexdigest()}))
    with raises(CheckpointError, code):
        load(path.parent, rank=0, world=1)


def test_of_another_plan_a_reader_gets_the_buffers_of_its_share_of_the_data(tmp_path: Path) -> None:
    """Batch-norm statistics belong to the data that was read.

    Peers that divide a model have the same, stages different ones.
    """

    def snapshot(mesh: Mesh) -> Snapshot:
        stage = mesh.place["pp"]
        own = {f"buffer/mean{stage}": torch.tensor(float(mesh.data_rank)), "rng/torch": torch.tensor(mesh.world.rank)}
        return Snapshot({}, own, coordinate=MeshCoordinate.of(mesh))

    loaded = load(save_all(tmp_path, 1, [snapshot(mesh) for mesh in meshes(dp=2, pp=2)]), rank=0, world=1)
    for mesh in meshes(dp=2, pp=2):
        own = loaded.own_of(MeshCoordinate.of(mesh))
        assert [own[n].item() for n in (f"buffer/mean{mesh.place['pp']}", "rng/torch")] == [
            mesh.data_rank,
            mesh.world.rank,
        ], "its own, on the same mesh"
        assert own[f"buffer/mean{1 - mesh.place['pp']}"] == mesh.data_rank, (
            "and its reader's, where the model is cut elsewhere now"
        )
    for mesh in meshes(fsdp=2):
        own = loaded.own_of(MeshCoordinate.of(mesh))
        assert {own["buffer/mean0"].item(), own["buffer/mean1"].item()} == {mesh.data_rank}, (
            "both stages', of the same share of the data"
        )
    for mesh in meshes(dp=3):
        assert loaded.own_of(MeshCoordinate.of(mesh))["buffer/mean1"] == 0.5, (
            "shares that are no more: their mean, as an evaluation takes it"
        )


def test_a_part_that_the_pieces_do_not_hold_is_an_error_not_garbage(tmp_path: Path) -> None:
    file = tmp_path / "half.safetensors"
    save_file({"w": torch.ones(2, 3)}, file)
    half = TensorPieces(
        {
            "w": TensorEntry(
                dtype="F32", shape=[4, 3], pieces=[TensorPiece(shard=0, key="w", offset=[0, 0], shape=[2, 3])]
            )
        },
        [file],
    )
    own = torch.zeros(2, 3)
    half.fill("w", own, ShardLayout.whole((4, 3)).narrow(0, 0, 2))
    assert own.all()
    with raises(CheckpointError, "checkpoint.elements_missing", elements=6, missing=3, name="w"):
        half.fill("w", own, ShardLayout.whole((4, 3)).narrow(0, 1, 3))


def test_rows_that_are_longer_than_what_is_read_at_once_are_whole(tmp_path: Path) -> None:
    file = tmp_path / "wide.safetensors"
    wide = torch.arange(2 * 5 * 2**20, dtype=torch.float32).view(2, 5, 2**20)
    save_file({"w": wide}, file)
    piece = TensorPiece(shard=0, key="w", offset=[0, 0, 0], shape=list(wide.shape))
    source = TensorPieces({"w": TensorEntry(dtype="F32", shape=list(wide.shape), pieces=[piece])}, [file])
    assert torch.equal(source["w"], wide)
    for dim, start, stop in ((0, 1, 2), (1, 1, 4), (2, 3, 2**19)):
        own = torch.zeros_like(wide.narrow(dim, start, stop - start))
        source.fill("w", own, ShardLayout.whole(wide.shape).narrow(dim, start, stop))
        assert torch.equal(own, wide.narrow(dim, start, stop - start))
