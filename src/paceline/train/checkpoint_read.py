"""Loading what `checkpoint` wrote: the newest whole one, every byte checked, and the model alone as one file."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.errors import CheckpointError, RunError
from paceline.train.manifest import MANIFEST, Manifest, ShardEntry, checkpoints, shard_name, sync_folder
from paceline.train.shard import Shard, describe

Report = Callable[[str, dict[str, Any]], None]


@dataclass
class Loaded:
    """A checkpoint in memory (its tensors on the CPU).

    Attributes:
        path: its folder.
        step: the optimizer steps that it stands for.
        world: how many ranks wrote it.
        shared: the shared tensors of all shards.
        own: the tensors that this rank had of its own; those of rank 0 where the number of ranks is another now.
        values: what was the same on all ranks.
        own_values: what each rank had of its own, in the order of the ranks that wrote it.
        aliases: names of tied tensors, each with the name in `shared`.
    """

    path: Path
    step: int
    world: int
    shared: dict[str, Tensor]
    own: dict[str, Tensor]
    values: dict[str, Any]
    own_values: list[dict[str, Any]]
    aliases: dict[str, str]


def load_latest(folder: Path, *, rank: int, world: int, report: Report) -> Loaded | None:
    """The newest whole checkpoint in `folder`; None where there is none at all.

    Damaged ones are skipped, each after `report("checkpoint_damaged", {"path": …, "reason": …})`.

    Raises:
        CheckpointError: there are some, but none is whole.
    """
    reasons: list[str] = []
    for _, path in reversed(checkpoints(folder)):
        try:
            return load(path, rank, world)
        except CheckpointError as error:
            report("checkpoint_damaged", {"path": path.name, "reason": str(error)})
            reasons.append(str(error))
    if reasons:
        listed = "\n".join(f"  {reason}" for reason in reasons)
        raise CheckpointError(f"no checkpoint in {folder} is whole:\n{listed}\nRestore one from a copy, or start a new run.")
    return None


def load(path: Path, rank: int, world: int) -> Loaded:
    """The checkpoint at `path`, as `rank` of `world` needs it.

    Raises:
        CheckpointError: a part is missing, truncated or altered. Names the file.
    """
    manifest = Manifest.read(path)
    shards = [_read_shard(path / shard_name(r), entry) for r, entry in enumerate(manifest.shards)]
    wanted = rank if world == manifest.world else 0
    try:
        shared = {name: shards[entry.shard][name] for name, entry in manifest.tensors.items()}
        own = {name: shards[wanted][name] for name in manifest.shards[wanted].own}
    except LookupError as error:
        raise CheckpointError(f"{path / MANIFEST} names {error}, which no shard holds") from error
    for name, entry in manifest.tensors.items():
        if describe(name, shared[name]) != {"dtype": entry.dtype, "shape": entry.shape}:
            raise CheckpointError(f"{path}: {name} is {describe(name, shared[name])}, but the manifest says {entry.dtype} {entry.shape}")
    own_values = [entry.own_values for entry in manifest.shards]
    return Loaded(path, manifest.step, manifest.world, shared, own, manifest.values, own_values, manifest.aliases)


def export(run_or_folder: Path, out: Path) -> None:
    """Write the model of the newest whole checkpoint as one safetensors file for `model.load_state_dict(load_file(out))`.

    `run_or_folder` is a run directory, its `checkpoints/`, or one checkpoint. Tied tensors are written under each of their names.
    A damaged newer checkpoint is passed over with a warning.

    Raises:
        RunError: there is no checkpoint, or `out` exists or cannot be written.
        CheckpointError: none is whole.
    """
    if out.exists():
        raise RunError(f"{out} exists already and is not overwritten. Remove it, or name another file.")
    loaded = _newest(run_or_folder)
    state = {**loaded.shared, **loaded.own}
    state |= {alias: state[name] for alias, name in loaded.aliases.items() if name in state}
    model = {name.partition("/")[2]: tensor for name, tensor in state.items() if name.startswith(("model/", "buffer/"))}
    temporary = out.with_name(f".{out.name}.partial")
    shard = Shard()
    shard.begin(model, {})
    shard.gather()
    try:
        for _ in shard.write(temporary):
            pass
        os.replace(temporary, out)
        sync_folder(out.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        text = f"{out} cannot be written ({shard.file_bytes:,} bytes): {error.strerror or error}"
        raise RunError(f"{text}. Name a file in a folder that can be written and has the room.") from error


def _read_shard(path: Path, entry: ShardEntry) -> dict[str, Tensor]:
    """The tensors of a file that is byte for byte the one that was written."""
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            raise CheckpointError(f"{path} has {size:,} bytes instead of {entry.bytes:,}: truncated or altered")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != entry.sha256:
            raise CheckpointError(f"{path} was altered or damaged: it does not have the SHA-256 that the manifest names")
        return load_file(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _newest(run_or_folder: Path) -> Loaded:
    if (run_or_folder / MANIFEST).exists():
        return load(run_or_folder, rank=0, world=1)
    inner = run_or_folder / "checkpoints"
    folder = inner if inner.is_dir() else run_or_folder

    def warn(event: str, facts: dict[str, Any]) -> None:
        warnings.warn(f"{facts['reason']}. An older one is exported instead.", stacklevel=5)

    loaded = load_latest(folder, rank=0, world=1, report=warn)
    if loaded is None:
        raise RunError(f"{run_or_folder} holds no checkpoint. Name a run directory, or a folder of checkpoints.")
    return loaded
