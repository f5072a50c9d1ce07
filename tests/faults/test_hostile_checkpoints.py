"""A checkpoint that contradicts itself is refused, whatever its checksums."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import CheckpointError
from paceline.state.manifest import MANIFEST
from paceline.state.reader import load_latest
from paceline.state.writer import Checkpointer, Snapshot
from refusals import raises
from small_jobs import small_job, train_here

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Checkpoints of steps 1 and 2: a matrix and a vector."""
    for step in (1, 2):
        saving = Checkpointer(tmp_path, rank=0, world=1, keep=3, deadline_s=60, report=lambda event, facts: None)
        tensors = {"model/w": torch.full((4, 3), float(step)), "model/b": torch.full((3,), float(step))}
        saving.save(
            step, Snapshot(tensors, {"rng/torch": torch.arange(4)}, {"value": step}, aliases={"model/v": "model/w"})
        )
        saving.close()
    return tmp_path


def signed(file: Path, change: Change) -> None:
    """Change a manifest and give it the checksum that fits."""
    content = json.loads(file.read_text())
    content.pop("sha256")
    change(content)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    file.write_text(json.dumps({**content, "sha256": hashlib.sha256(text.encode()).hexdigest()}))


def shard_with(folder: Path, change: Change) -> None:
    """Change the header of a shard and let the manifest name what then is there."""
    file = folder / "rank-0.safetensors"
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + content[8 + length :]
    file.write_bytes(content)

    def name(manifest: dict[str, Any]) -> None:
        manifest["shards"][0] |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    signed(folder / MANIFEST, name)


def reason_passed_over(folder: Path) -> str:
    """Why the checkpoint of step 2 was not taken, after that of step 1 was."""
    reports: list[str] = []
    loaded = load_latest(folder, rank=0, world=1, report=lambda event, facts: reports.append(facts["reason"]))
    assert loaded is not None
    assert loaded.step == 1
    assert (loaded.shared["model/w"] == 1.0).all()
    assert len(reports) == 1
    return reports[0]


def piece(content: dict[str, Any], name: str = "model/w") -> dict[str, Any]:
    found: dict[str, Any] = content["tensors"][name]["pieces"][0]
    return found


MANIFESTS: dict[str, Change] = {
    "pieces that overlap and leave a gap": lambda c: c["tensors"]["model/w"].update(
        pieces=[{**piece(c), "shape": [2, 3]}, {**piece(c), "shape": [2, 3], "key": "other"}]
    ),
    "a piece outside": lambda c: piece(c).update(offset=[1, 0]),
    "a piece before the beginning": lambda c: piece(c).update(offset=[-1, 0]),
    "a piece of another rank": lambda c: piece(c).update(shard=7),
    "a piece of too few dimensions": lambda c: piece(c).update(shape=[12], offset=[0]),
    "a piece of negative size": lambda c: piece(c).update(shape=[-4, -3]),
    "no piece": lambda c: c["tensors"]["model/w"].update(pieces=[]),
    "one key for two tensors": lambda c: piece(c).update(key="model/b"),
    "a piece that is a rank's own tensor": lambda c: piece(c).update(key="rng/torch"),
    "an unknown type": lambda c: c["tensors"]["model/w"].update(dtype="OBJECT"),
    "another type": lambda c: c["tensors"]["model/w"].update(dtype="I32"),
    "another shape": lambda c: (c["tensors"]["model/w"].update(shape=[3, 4]), piece(c).update(shape=[3, 4])),
    "a huge shape": lambda c: c["tensors"]["model/w"].update(shape=[2**40, 2**40]),
    "a negative shape": lambda c: c["tensors"]["model/w"].update(shape=[-4, -3]),
    "a number for a list": lambda c: c["tensors"]["model/w"].update(shape=12),
    "text for a number": lambda c: c.update(step="2"),
    "a truth for a number": lambda c: c.update(world=True),
    "a list for a table": lambda c: c.update(tensors=[]),
    "a negative step": lambda c: c.update(step=-2),
    "more ranks than shards": lambda c: c.update(world=2),
    "a data-parallel rank that there is not": lambda c: c["shards"][0].update(reader=3),
    "the format before": lambda c: c.update(format=1),
}


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_manifest_that_contradicts_itself_is_passed_over(saved: Path, what: str) -> None:
    signed(saved / "step-00000002" / MANIFEST, MANIFESTS[what])
    assert "step-00000002" in reason_passed_over(saved)


HEADERS: dict[str, Change] = {
    "overlapping tensors": lambda h: h["model/b"].update(data_offsets=[0, 12]),
    "a tensor behind the end": lambda h: h["model/b"].update(data_offsets=[10**6, 10**6 + 12]),
    "a tensor that ends before it begins": lambda h: h["model/b"].update(data_offsets=[12, 0]),
    "another type": lambda h: h["model/b"].update(dtype="I32"),
    "another shape": lambda h: h["model/w"].update(shape=[3, 4]),
    "a shape that does not fit its bytes": lambda h: h["model/w"].update(shape=[40, 3]),
    "no shape": lambda h: h["model/w"].pop("shape"),
    "a number for a tensor": lambda h: h.update({"model/w": 3}),
    "a tensor less": lambda h: h.pop("model/b"),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_shard_whose_header_lies_is_passed_over(saved: Path, what: str) -> None:
    shard_with(saved / "step-00000002", HEADERS[what])
    assert "step-00000002" in reason_passed_over(saved)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "null", '{"sha256": 3}'], ids=["deep", "list", "null", "number"])
def test_what_is_no_manifest_is_passed_over(saved: Path, text: str) -> None:
    (saved / "step-00000002" / MANIFEST).write_text(text)
    assert "manifest" in reason_passed_over(saved)


def test_a_pipe_for_a_manifest_is_never_waited_for(saved: Path) -> None:
    (saved / "step-00000002" / MANIFEST).unlink()
    os.mkfifo(saved / "step-00000002" / MANIFEST)
    assert "no regular file" in reason_passed_over(saved)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps."""
    return train_here(tmp_path_factory.mktemp("trained") / "run", small_job(stop={"steps": 3})).path


@pytest.mark.parametrize("values", [{}, {"loop": 3}, {"step": "many"}])
def test_a_whole_checkpoint_with_values_of_no_run_is_an_error_that_names_it(
    tmp_path: Path, trained: Path, values: dict[str, Any]
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")

    def change(content: dict[str, Any]) -> None:
        content["values"] = {**content["values"], **values} if values else {}

    signed(run / "checkpoints" / "step-00000003" / MANIFEST, change)
    with raises(CheckpointError, "checkpoint.unusable"):
        train_here(run, small_job(stop={"steps": 5}))
