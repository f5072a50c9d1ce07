"""Format of a checkpoint on disk: a folder with shards and a manifest.

    checkpoints/step-00000100/rank-0.safetensors
                              rank-1.safetensors
                              manifest.json       format, step, mesh, values; each shard's size and SHA-256;
                                                  each tensor's pieces

A tensor has the name, type and shape that it has in the undivided model. A tensor is divided into pieces, and each
piece is a block in the file of one rank. Therefore only the number and size of the pieces depend on the plan that wrote
the checkpoint.

While the checkpoint is written, the folder is called `.step-00000100.partial`. Each rank first writes its shard and
then its receipt. The manifest is written last. If a step is trained again, the older checkpoint of this step is called
`step-00000100.replaced` until the new checkpoint has its final name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.errors import CheckpointError
from paceline.files import read_text, write_whole

MANIFEST = "manifest.json"
PARTIAL = ".step-*.partial"
REPLACED = ".replaced"

_MOST_BYTES = 2**30  # largest size of a manifest in bytes
_NAME = re.compile(r"step-(\d{8,})(\.replaced)?")
_CANONICAL: dict[str, Any] = {"sort_keys": True, "separators": (",", ":")}


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, validate_by_name=True, serialize_by_alias=True)


class TensorPiece(_Entry):
    """A block of a full tensor, stored in one rank's shard.

    Attributes:
        shard: rank whose shard contains the piece.
        key: name of the piece in the file of the shard.
        offset: index, in the full tensor, of the first element of the piece.
        shape: size of the piece along every dimension.
    """

    shard: int
    key: str
    offset: list[int]
    shape: list[int]


class TensorEntry(_Entry):
    """Full tensor: its dtype (as a safetensors code), shape and pieces."""

    dtype: str
    shape: list[int]
    pieces: list[TensorPiece]


class OwnEntry(_Entry):
    """Tensor that only one rank holds. It has the same name in the shard of this rank."""

    dtype: str
    shape: list[int]


class ShardEntry(_Entry):
    """File of one rank: its size, digest, data-parallel rank and rank-local content."""

    bytes: int
    sha256: str
    data_rank: int = Field(alias="reader")
    own: dict[str, OwnEntry]
    own_values: dict[str, Any]


class Receipt(_Entry):
    """Record that a rank writes when its shard is complete. It lists the file and its pieces.

    `tensors` lists every tensor that the rank holds, but only the pieces that the rank has written itself.
    """

    shard: ShardEntry
    tensors: dict[str, TensorEntry]
    aliases: dict[str, str]


class Manifest(_Entry):
    """Description of a whole checkpoint. The entries of `shards` are in rank order."""

    format: Literal[2] = 2
    step: int
    world: int
    mesh: dict[str, int]  # number of ranks along each mesh axis that had more than one rank
    data_ranks: int = Field(alias="readers")
    shards: list[ShardEntry]
    tensors: dict[str, TensorEntry]  # the shared tensors
    aliases: dict[str, str]
    values: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Write the manifest to `folder` durably, with a SHA-256 digest of its content."""
        content = self.model_dump()
        write_durably(folder / MANIFEST, {**content, "sha256": _digest(content)})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a checkpoint.

        Raises:
            CheckpointError: the manifest is missing, cannot be read, or has changed since it was written.
        """
        path = folder / MANIFEST
        try:
            content = json.loads(read_text(path, _MOST_BYTES))
            claimed = content.pop("sha256")
        except OSError as error:
            raise CheckpointError(
                "file.unreadable", "{file} cannot be read: {reason}", file=path, reason=error.strerror or error
            ) from error
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise CheckpointError(
                "checkpoint.manifest_damaged",
                "{path} is not the manifest of a checkpoint: the file is truncated or damaged",
                path=path,
            ) from error
        if claimed != _digest(content):
            raise CheckpointError(
                "checkpoint.manifest_altered",
                "{path} was altered: its content does not match the SHA-256 digest in the file",
                path=path,
            )
        if content.get("format") == 1:
            raise CheckpointError(
                "checkpoint.format_1",
                "{path} has format 1, which only development versions of paceline before 0.1.0 read. Continue the "
                "run with such a version, or start a new run.",
                path=path,
            )
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            where = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise CheckpointError(
                "checkpoint.other_format",
                "{path} does not have the format that this version of paceline reads ({where})",
                path=path,
                where=where,
            ) from error


def step_name(step: int) -> str:
    """Return the folder name of the checkpoint of a step."""
    return f"step-{step:08d}"


def partial_name(step: int) -> str:
    """Return the folder name in which the checkpoint of a step is written."""
    return f".{step_name(step)}.partial"


def shard_name(rank: int) -> str:
    """Return the file name of a rank's tensors."""
    return f"rank-{rank}.safetensors"


def receipt_name(rank: int) -> str:
    """Return the file name of a rank's receipt, which reports its shard or its error."""
    return f"rank-{rank}.receipt.json"


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """List (step, path) of all checkpoints in a folder, oldest first. Damaged checkpoints are included.

    A replaced checkpoint comes before the new checkpoint of the same step.
    """
    found = [(match, path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    found.sort(key=lambda entry: (int(entry[0][1]), entry[0][2] is None))
    return [(int(match[1]), path) for match, path in found]


def plain(values: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Copy `values` through JSON, which turns tuples into lists and keeps NaN and infinities.

    Raises:
        CheckpointError: a value cannot be represented in JSON.
    """
    try:
        copy: dict[str, Any] = json.loads(json.dumps(values))
    except (TypeError, ValueError) as error:
        bad = [key for key, value in values.items() if not _is_json(value)]
        raise CheckpointError(
            "checkpoint.not_json",
            "{what} {names} cannot be saved: {error}. Values may contain only numbers, text, lists and "
            "dicts. Save tensors as tensors of the snapshot instead.",
            what=what,
            names=list(bad),
            error=error,
        ) from error
    return copy


def write_durably(path: Path, content: object) -> None:
    """Write a JSON file. After a crash, the file is either complete or does not exist."""
    # json.dump is not used, because its pure-Python encoder would hold the GIL for a long time.
    write_whole(path, json.dumps(content, **_CANONICAL), durable=True)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a file from `write_durably`, or return None if the file does not exist yet."""
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return content


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, **_CANONICAL).encode()).hexdigest()


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
