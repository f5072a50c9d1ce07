"""Checkpoints go to and come from scripts that use torch.distributed.checkpoint, and no pickle is executed."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from commands import DEADLINE_S, paceline, write_job
from paceline.errors import JobError
from paceline.run.convert import export, export_dcp, fitted, load_weights, weights_from
from paceline.run.dcp import METADATA, open_dcp
from paceline.state.writer import Snapshot
from refusals import raises
from single_process_mesh import meshes, own_parts, parts_of, random_tensors, save_all

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 7), nn.Linear(7, 10)
        self.scale = nn.Parameter(torch.ones(2, 3, 5))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x.flatten(1)))) * self.scale.mean()
"""

# a script as torchtitan's: FSDP2 on two ranks; it knows nothing of paceline
SCRIPT = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from net import Net

dist.init_process_group("gloo")
torch.manual_seed(99)
model = Net()
mesh = init_device_mesh("cpu", (2,))
fully_shard(model.first, mesh=mesh)
fully_shard(model, mesh=mesh)
state = get_model_state_dict(model)
dcp.load(state, checkpoint_id="exported")
full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if dist.get_rank() == 0:
    expected = load_file("exported.safetensors")
    assert expected.keys() == full.keys()
    for name in full:
        assert torch.equal(full[name], expected[name]), name
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 64)).sum().backward()
optimizer.step()
weights, moments = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": moments, "step": 4}, checkpoint_id="scripts")
dcp.save({**weights, "optimizer": moments}, checkpoint_id="titan")
dcp.save(weights, storage_writer=dcp.HuggingFaceStorageWriter("sharded", save_distributed=True))
full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if dist.get_rank() == 0:
    save_file({name: tensor.contiguous() for name, tensor in full.items()}, "scripts.safetensors")
dist.destroy_process_group()
"""


def on_two_ranks(folder: Path) -> None:
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), "TMPDIR": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr


def digits_job(folder: Path, **model: Any) -> Path:
    (folder / "net.py").write_text(NET)
    return write_job(
        folder / "job.yaml",
        model={"factory": "net.py:Net", **model},
        data={"kind": "digits"},
        optimizer={"name": "sgd", "lr": 1e-30},
        global_batch=32,
        stop={"steps": 1},
    )


@pytest.mark.slow
def test_weights_go_to_an_fsdp2_script_and_come_back_into_a_divided_run(tmp_path: Path) -> None:
    job = digits_job(tmp_path)
    assert paceline("train", job, "--plan", "dp=1", "--run", "run", folder=tmp_path).code == 0
    export(tmp_path / "run", tmp_path / "exported.safetensors")
    outcome = paceline("export", "run", "exported", "--layout", "dcp", folder=tmp_path)
    assert outcome.code == 0, outcome.err
    assert not outcome.err, "warnings of torch are on the screen"
    assert paceline("export", "run", "exported", "--layout", "dcp", folder=tmp_path).fails_with("export.folder_exists")

    on_two_ranks(tmp_path)
    expected = load_file(tmp_path / "scripts.safetensors")
    for form, plan in (("scripts", "fsdp=2"), ("titan", "dp=1"), ("sharded", "dp=1")):
        job = digits_job(tmp_path, weights=f"dcp:{form}")
        outcome = paceline("train", job, "--plan", plan, "--run", f"run-{form}", folder=tmp_path)
        assert outcome.code == 0, outcome.err
        export(tmp_path / f"run-{form}", tmp_path / f"{form}-back.safetensors")
        back = load_file(tmp_path / f"{form}-back.safetensors")
        assert back.keys() == expected.keys()
        assert all(torch.equal(back[name], expected[name]) for name in expected), form


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A DCP checkpoint of one process."""
    folder, tensors = tmp_path_factory.mktemp("dcp") / "saved", random_tensors()
    tensors["half"] = torch.randn(6, 4).to(torch.bfloat16)
    tensors["turned"] = torch.randn(5, 8).t()
    save({"model": tensors, "note": "text"}, checkpoint_id=folder, no_dist=True)
    return folder, tensors


def test_every_rank_reads_its_part(saved: tuple[Path, dict[str, Tensor]]) -> None:
    folder, tensors = saved
    source = open_dcp(folder).of_model(tensors)
    assert source.keys() == tensors.keys()
    assert all(torch.equal(source[name], tensor) for name, tensor in tensors.items())
    for mesh in meshes(tp=2, fsdp=2):
        parts = parts_of(mesh)
        own = {name: torch.zeros(part.layout.shape, dtype=torch.float32) for name, part in parts.items()}
        load_weights(own, parts, source)
        assert all(torch.equal(own[name], part.layout.take(tensors[name]).float()) for name, part in parts.items())


def test_a_divided_checkpoint_of_a_run_is_written_whole(tmp_path: Path) -> None:
    full, snapshots = random_tensors(), []
    from paceline.state.shard import MeshCoordinate

    for mesh in meshes(fsdp=2, tp=2):
        parts = parts_of(mesh)
        shared = {f"model/{name}": tensor for name, tensor in own_parts(full, parts).items()}
        held = {f"model/{name}": part for name, part in parts.items()}
        aliases = {"model/head": "model/embedding"}
        snapshots.append(Snapshot(shared, aliases=aliases, parts=held, coordinate=MeshCoordinate.of(mesh)))
    save_all(tmp_path / "checkpoints", 1, snapshots)
    export_dcp(tmp_path, tmp_path / "out")
    state = {name: torch.zeros_like(tensor) for name, tensor in {**full, "head": full["embedding"]}.items()}
    load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert all(torch.equal(state[name], tensor) for name, tensor in full.items())
    assert torch.equal(state["head"], full["embedding"])
    assert {entry.name for entry in tmp_path.iterdir()} == {"checkpoints", "out"}, "something is left over"


class Runs:
    """An object whose unpickling creates a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


class Writes:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return io.FileIO, (str(self.file), "w")


@pytest.mark.parametrize("kind", [Runs, Writes])
def test_a_pickle_that_would_run_code_is_refused_without_running_it(tmp_path: Path, kind: Any) -> None:
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / METADATA).write_bytes(pickle.dumps({"state_dict_metadata": {}, "planner_data": kind(tmp_path / "ran")}))
    with raises(JobError, "model.dcp_refused", file=folder / METADATA):
        weights_from(f"dcp:{folder}")
    assert not (tmp_path / "ran").exists()


def test_a_class_of_dcp_does_not_open_a_way_to_others(tmp_path: Path) -> None:
    """Names that are allowed are looked up in no module, so attributes of them cannot be reached either."""
    for name in (b"Metadata.__init__.__globals__", b"Metadata.__class__"):
        (tmp_path / METADATA).write_bytes(
            b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c" + bytes([len(name)]) + name + b"\x93."
        )
        with raises(JobError, "model.dcp_refused"):
            open_dcp(tmp_path)


def test_an_archive_that_would_run_code_is_refused_without_running_it(
    tmp_path: Path, saved: tuple[Path, dict[str, Tensor]]
) -> None:
    folder, tensors = saved
    evil = tmp_path / "evil"
    evil.mkdir()
    metadata = FileSystemReader(folder).read_metadata()
    buffer = io.BytesIO()
    torch.save([tensors["qkv"], Runs(tmp_path / "ran")], buffer)
    place = next(p for index, p in metadata.storage_data.items() if index.fqn == "model.qkv")
    place.offset, place.length = 0, len(buffer.getvalue())
    (evil / METADATA).write_bytes(pickle.dumps(metadata))
    (evil / place.relative_path).write_bytes(buffer.getvalue())
    source = open_dcp(evil)
    with raises(JobError, "model.weights_unreadable"):
        source["model.qkv"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", ""])
def test_files_outside_of_the_folder_are_not_read(
    tmp_path: Path, saved: tuple[Path, dict[str, Tensor]], path: str
) -> None:
    metadata = FileSystemReader(saved[0]).read_metadata()
    for place in metadata.storage_data.values():
        place.relative_path = path
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    with raises(JobError, "model.weights_unreadable", file=tmp_path / METADATA):
        open_dcp(tmp_path)


def test_damaged_checkpoints_are_reported(tmp_path: Path, saved: tuple[Path, dict[str, Tensor]]) -> None:
    with raises(JobError, "model.dcp_not_found", folder=tmp_path):
        open_dcp(tmp_path)
    for content in (b"", b"\x80\x04N.", b"\x80\x04\x8c\x01x.", (saved[0] / METADATA).read_bytes()[:-100]):
        (tmp_path / METADATA).write_bytes(content)
        with raises(JobError, "model.weights_unreadable", file=tmp_path / METADATA):
            open_dcp(tmp_path)
    (tmp_path / METADATA).write_bytes((saved[0] / METADATA).read_bytes())
    for file in saved[0].glob("*.distcp"):
        content = file.read_bytes()
        (tmp_path / file.name).write_bytes(content[: len(content) // 2])
    source = open_dcp(tmp_path)
    with raises(JobError, "model.weights_unreadable"):
        dict(source)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    save(
        {"model": nn.Linear(3, 4).state_dict(), "optimizer": {"weight": torch.ones(3)}},
        checkpoint_id=tmp_path / "one",
        no_dist=True,
    )
    source = weights_from(f"dcp:{tmp_path / 'one'}")
    assert set(fitted(source, nn.Linear(3, 4))) == {"weight", "bias"}
    with raises(JobError, "model.weights_differ"):
        fitted(source, nn.Linear(3, 5))
    with raises(JobError, "model.weights_differ"):
        fitted(source, nn.Sequential(nn.Linear(3, 4)))


def test_safetensors_of_one_file_are_a_checkpoint_too(tmp_path: Path) -> None:
    tensors = nn.Linear(3, 4).state_dict()
    save_file(tensors, tmp_path / "model-00001-of-00001.safetensors")
    source = open_dcp(tmp_path)
    assert all(torch.equal(source[name], tensor) for name, tensor in tensors.items())
