"""Checkpoints of `torch.distributed.checkpoint` (DCP), as FSDP2 scripts and torchtitan write them.

Two formats are read: `.metadata` with `.distcp` files, and the sharded safetensors files of `HuggingFaceStorageWriter`.

`.metadata` is a pickle, which could run any code. It is read by an unpickler that knows the names of DCP's classes and
replaces each by a plain record, so nothing of torch is constructed. Any other name is refused before it is looked up.
The `.distcp` files are sequences of zip archives of `torch.save`. Their numbers are memory-mapped, and torch's
weights-only loader reads the small pickle with the strides.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import sys
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import JobError
from paceline.files import opened_to_read
from paceline.state.manifest import TensorEntry, TensorPiece
from paceline.state.reader import TensorPieces
from paceline.state.shard import CODES, DTYPES

METADATA = ".metadata"
_METADATA_LIMIT = 2**30
_INTEGERS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
_NAME_LENGTHS, _LOCAL_HEADER = 26, 30  # bytes of a zip archive's header before a file's name
_SHARDING, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
# state that training scripts save beside the model
_BESIDE_THE_MODEL = ("optimizer", "optim", "lr_scheduler", "dataloader", "train_state", "scheduler")

# Names that `.metadata` may contain. The dtypes of torch are allowed as well.
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"},
    "pathlib._local": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"},
}


class DcpPieces(TensorPieces):
    """Tensors of a DCP checkpoint, of which only the requested parts are read.

    Args:
        archives: place of each piece in a `.distcp` file, by `TensorPiece.key`.
    """

    def __init__(
        self,
        entries: Mapping[str, TensorEntry],
        files: Sequence[Path],
        archives: Mapping[str, _Archive] | None = None,
    ) -> None:
        super().__init__(entries, files)
        self._archives = archives or {}
        self._mapped: dict[str, np.ndarray[Any, Any]] = {}

    @property
    def where(self) -> Path:
        """Folder of the checkpoint."""
        return self.files[0].parent

    def with_entries(self, entries: Mapping[str, TensorEntry]) -> DcpPieces:
        """Return these files with other names of their tensors."""
        return DcpPieces(entries, self.files, self._archives)

    def of_model(self, names: Iterable[str]) -> DcpPieces:
        """Select the model's tensors, whose names may have a prefix such as `model.` or `app.model.`.

        Optimizer state and other values that scripts save beside the model are left out.

        Args:
            names: names of the model's tensors.
        """
        wanted = list(names)
        prefixes = {key[: -len(name)] for name in wanted[:1] + wanted[-1:] for key in self.entries if _ends(key, name)}
        best = max(
            sorted(prefixes, key=len), key=lambda prefix: sum(prefix + n in self.entries for n in wanted), default=""
        )
        chosen = {key.removeprefix(best): entry for key, entry in self.entries.items() if key.startswith(best)}
        if not best:
            chosen = {key: entry for key, entry in chosen.items() if key.partition(".")[0] not in _BESIDE_THE_MODEL}
        return self.with_entries(chosen)

    def block(self, piece: TensorPiece, begin: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Read a block of a piece."""
        if piece.key not in self._archives:
            return super().block(piece, begin, shape)
        archive = self._archives[piece.key]
        if piece.key not in self._mapped:
            with _unreadable(self.files[archive.file]):
                self._mapped[piece.key] = archive.mapped(self.files[archive.file], piece.shape)
        stored = self._mapped[piece.key][tuple(slice(a, a + n) for a, n in zip(begin, shape, strict=True))]
        # a copy, because archives begin at any byte of the file, and torch needs aligned numbers
        return torch.from_numpy(np.array(stored)).view(archive.dtype)


def open_dcp(folder: Path) -> DcpPieces:
    """Open a DCP checkpoint, to read its tensors on access.

    Raises:
        JobError: there is no checkpoint in `folder`, the files are not a checkpoint, or they name classes other than
            the classes of DCP.
    """
    if (folder / METADATA).is_file():
        with _unreadable(folder / METADATA):
            return _of_metadata(folder, _Metadata.read(folder / METADATA))
    shards = sorted(folder.glob("*.safetensors")) or sorted((folder / "sharded").glob("*.safetensors"))
    if not shards:
        raise JobError(
            "model.dcp_not_found",
            "{folder} holds neither {metadata} nor safetensors files, so it is not a checkpoint of "
            "torch.distributed.checkpoint. Name the folder of one step.",
            folder=folder,
            metadata=METADATA,
        )
    return _of_safetensors(shards)


def save_dcp(state: Mapping[str, Tensor], folder: Path) -> None:
    """Write tensors as a DCP checkpoint, from this process alone."""
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns about the missing process group
        save(dict(state), checkpoint_id=folder, no_dist=True)


# Metadata


class _Record:
    """Stand-in for an object in `.metadata`: its arguments and state."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.arguments, self.state = getattr(self, "arguments", ()), state

    def __getitem__(self, key: str) -> Any:
        return self.state[key]


class _Metadata(pickle.Unpickler):
    """Unpickler that makes records of DCP's classes, and refuses all other names."""

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path
        # new classes for each file, so that no file can change the classes of another
        self._made: dict[str, type[_Record]] = {}

    @classmethod
    def read(cls, path: Path) -> Any:
        if path.stat().st_size > _METADATA_LIMIT:
            raise ValueError(f"it has more than {_METADATA_LIMIT:,} bytes")
        with opened_to_read(path) as file:
            return cls(file, path).load()

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name == "Size":
            return tuple
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if module == "collections" and name == "OrderedDict":
            return dict
        if name not in _CLASSES.get(module, ()):
            raise JobError(
                "model.dcp_refused",
                "{file} names {found}, which is not part of a checkpoint and could run code, so the file was not "
                "read. If you trust its author, load the checkpoint in PyTorch, and save its model as safetensors.",
                file=self._path,
                found=f"{module}.{name}",
            )
        return self._made.setdefault(name, type(name, (_Record,), {}))


def _of_metadata(folder: Path, metadata: Any) -> DcpPieces:
    tensors: dict[str, TensorEntry] = {}
    for name, about in metadata["state_dict_metadata"].items():
        if type(about).__name__ == "TensorStorageMetadata":
            dtype = about["properties"].state[0]
            tensors[str(name)] = TensorEntry(dtype=CODES[dtype], shape=list(about["size"]), pieces=[])
    numbers: dict[str, int] = {}
    archives: dict[str, _Archive] = {}
    sizes = {
        (name, tuple(chunk["offsets"])): list(chunk["sizes"])
        for name in tensors
        for chunk in metadata["state_dict_metadata"][name]["chunks"]
    }
    for index, place in metadata["storage_data"].items():
        if index["fqn"] not in tensors:
            continue  # not a tensor
        file, transforms = place["relative_path"], place.state.get("transform_descriptors")
        if transforms:
            raise JobError(
                "model.dcp_transformed",
                "{folder}: the files are transformed by {transforms}, which paceline cannot read. Save the checkpoint "
                "without extensions.",
                folder=folder,
                transforms=", ".join(map(str, transforms)),
            )
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise ValueError(f"it names {file!r}, which is not a file of its folder")
        offset = list(index.state.get("offset") or [])
        shape = sizes[index["fqn"], tuple(offset)]
        number = numbers.setdefault(file, len(numbers))
        key = f"{index['fqn']} {offset}"
        if key in archives:
            continue  # a rank that holds the same block has written it again
        dtype = DTYPES[tensors[index["fqn"]].dtype]
        archives[key] = _Archive(number, int(place["offset"]), int(place["length"]), dtype)
        tensors[index["fqn"]].pieces.append(TensorPiece(shard=number, key=key, offset=offset, shape=shape))
    return DcpPieces(tensors, [folder / name for name in numbers] or [folder / METADATA], archives)


def _of_safetensors(files: Sequence[Path]) -> DcpPieces:
    """Open the files that the ranks of `HuggingFaceStorageWriter` have written."""
    entries: dict[str, TensorEntry] = {}
    for number, file in enumerate(files):
        with _unreadable(file), safe_open(file, framework="pt") as opened:
            sharding = json.loads((opened.metadata() or {}).get(_SHARDING, "{}"))
            for name in opened.keys():  # noqa: SIM118 - it is not a mapping
                stored = opened.get_slice(name)
                shape = stored.get_shape()
                offset = list(sharding[name][_OFFSETS]) if sharding else [0] * len(shape)
                entry = entries.setdefault(
                    name, TensorEntry(dtype=stored.get_dtype(), shape=[0] * len(shape), pieces=[])
                )
                entry.shape[:] = [max(n, a + m) for n, a, m in zip(entry.shape, offset, shape, strict=True)]
                if all(piece.offset != offset for piece in entry.pieces):
                    entry.pieces.append(TensorPiece(shard=number, key=name, offset=offset, shape=shape))
    return DcpPieces(entries, files)


# Archives


@dataclass(frozen=True)
class _Archive:
    """Archive of one piece: its file, its place in bytes, and its dtype."""

    file: int
    offset: int
    length: int
    dtype: torch.dtype

    def mapped(self, path: Path, shape: Sequence[int]) -> np.ndarray[Any, Any]:
        """Map the numbers of the piece into memory, as integers of the same size.

        Raises:
            ValueError: the archive does not hold one such tensor.
        """
        with open(path, "rb") as file:
            view = _Slice(file, self.offset, self.length)
            with zipfile.ZipFile(view) as archive:
                name = next((name for name in archive.namelist() if name.endswith("/data/0")), "")
                info = archive.getinfo(name)
                order = name.removesuffix("data/0") + "byteorder"
                order = archive.read(order).decode() if order in archive.namelist() else sys.byteorder
            view.seek(info.header_offset + _NAME_LENGTHS)
            begin = self.offset + info.header_offset + _LOCAL_HEADER + sum(struct.unpack("<HH", view.read(4)))
            view.seek(0)
            tensor = torch.load(io.BufferedReader(view), map_location="meta", weights_only=True)
        if order != sys.byteorder or info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"an archive is compressed or {order}-endian")
        if not isinstance(tensor, Tensor) or (tensor.dtype, list(tensor.shape)) != (self.dtype, list(shape)):
            raise ValueError(f"an archive does not hold a tensor of shape {list(shape)} and type {self.dtype}")
        size = tensor.element_size()
        return np.ndarray(
            tuple(tensor.shape),
            _INTEGERS[size],
            buffer=np.memmap(path, np.uint8, "r", begin, (info.file_size,)),
            offset=tensor.storage_offset() * size,
            strides=tuple(stride * size for stride in tensor.stride()),
        )


class _Slice(io.RawIOBase):
    """Part of an open file, as a file."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._at)
        found = self._file.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


@contextmanager
def _unreadable(file: Path) -> Iterator[None]:
    """Report a file that cannot be read, or that does not belong to a checkpoint."""
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        EOFError,
        ImportError,
        LookupError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
        SafetensorError,
        pickle.UnpicklingError,
        zipfile.BadZipFile,
    ) as error:
        if isinstance(error, JobError):
            raise
        raise JobError(
            "model.weights_unreadable",
            "the weights in {file} cannot be read: {error}",
            file=file,
            error=f"{type(error).__name__}: {error}",
        ) from error


def _ends(key: str, name: str) -> bool:
    return key == name or key.endswith(f".{name}")
