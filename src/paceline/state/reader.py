"""Loading of checkpoints, whose files are checked first. Each rank reads its part."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import CheckpointError, RunError
from paceline.split.layout import ShardLayout
from paceline.state.manifest import (
    MANIFEST,
    REPLACED,
    Manifest,
    ShardEntry,
    TensorEntry,
    TensorPiece,
    checkpoints,
    shard_name,
)
from paceline.state.shard import DTYPES, MeshCoordinate, assign_writers, uncovered

# prefixes of the names of tensors that belong to a single rank: tensors of its sync rule, and of its replica
SYNC, OWN = "sync/", "own/"

NEWEST, BEST = "newest", "best"

_READ_BYTES = 16 * 2**20  # largest section that is read at once
_SHORT_BYTES = 512  # shorter runs are read together with the gaps between them

Report = Callable[[str, dict[str, Any]], None]
Gather = Callable[[Any], list[Any]]


class TensorPieces(Mapping[str, Tensor]):
    """Read-only mapping of full tensors whose pieces are in safetensors files.

    Indexing assembles a whole tensor in new memory, and `fill` reads a part of a tensor. Only the bytes of this part
    are read, through a small buffer. The files are not mapped, because mapped pages count as memory of the process.

    Args:
        entries: dtype, shape and pieces of every tensor.
        files: paths of the files, indexed by `TensorPiece.shard`.

    Attributes:
        held_as: types through which `fill` converts tensors, so that values that a model holds in bf16 are rounded
            to bf16 even if a plan computes in a wider type.
    """

    def __init__(self, entries: Mapping[str, TensorEntry], files: Sequence[Path]) -> None:
        self.entries, self.files = entries, files
        self.held_as: Mapping[str, torch.dtype] = {}
        self._headers: dict[int, tuple[int, dict[str, Any]]] = {}

    def __getitem__(self, name: str) -> Tensor:
        entry = self.entries[name]
        full = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        self.fill(name, full)
        return full

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def fill(self, name: str, own: Tensor, layout: ShardLayout | None = None) -> None:
        """Read a rank's part of a tensor into `own`, and convert the dtype and device.

        Args:
            layout: the part of the tensor that `own` holds; None for the whole tensor.

        Raises:
            CheckpointError: a file cannot be read, or the pieces do not cover the requested part.
        """
        layout = layout or ShardLayout.whole(own.shape)
        filled = 0
        with torch.no_grad():
            for box in layout.boxes():
                place = box.of(own)
                for piece in self.entries[name].pieces:
                    shared = _overlap(box.full, box.shape, piece)
                    if shared is not None:
                        begin, shape = shared
                        there = [a - b for a, b in zip(begin, piece.offset, strict=True)]
                        here = [a - b for a, b in zip(begin, box.full, strict=True)]
                        for first, rows in _rows(shape, own.element_size()):
                            within = [*rows, *shape[len(rows) :]]
                            source = self.block(piece, [a + b for a, b in zip(there, first, strict=True)], within)
                            source = source.to(self.held_as.get(name, source.dtype))
                            _narrow(place, [a + b for a, b in zip(here, first, strict=True)], within).copy_(source)
                        filled += prod(shape)
        if filled != layout.numel:
            raise CheckpointError(
                "checkpoint.elements_missing",
                "{where}: {missing:,} of {elements:,} elements of {name} are missing from all shards",
                where=self.where,
                missing=layout.numel - filled,
                elements=layout.numel,
                name=name,
            )

    def with_entries(self, entries: Mapping[str, TensorEntry]) -> TensorPieces:
        """Return a mapping of other tensors in the same files."""
        return TensorPieces(entries, self.files)

    def block(self, piece: TensorPiece, begin: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Read a block of a piece, and no other bytes.

        Args:
            begin: index, in the piece, of the first element of the block.
        """
        path = self.files[piece.shard]
        try:
            dtype, start = self._stored(piece)
            return _read(path, start, dtype, piece.shape, begin, shape)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                "checkpoint.unreadable", "{path} cannot be read: {error}", path=path, error=error
            ) from error

    def _stored(self, piece: TensorPiece) -> tuple[torch.dtype, int]:
        """Return a piece's dtype, and the position of its first byte."""
        path = self.files[piece.shard]
        if piece.shard not in self._headers:
            with safe_open(path, framework="pt"):  # checks the header
                pass
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                self._headers[piece.shard] = (8 + length, json.loads(file.read(length)))
        start, header = self._headers[piece.shard]
        if piece.key not in header:
            raise SafetensorError(f"the file has no tensor {piece.key}")
        stored = header[piece.key]
        shape = list(piece.shape)
        # a tensor that is stacked with others has one dimension less in the file
        if stored["shape"] not in (shape, shape[1:] if shape[:1] == [1] else shape):
            raise SafetensorError(f"{piece.key} has shape {stored['shape']} instead of {shape}")
        return DTYPES[stored["dtype"]], start + stored["data_offsets"][0]

    @property
    def where(self) -> Path:
        """Path of the only file, or of the folder that contains the files."""
        return self.files[0].parent if len(self.files) != 1 else self.files[0]


class Loaded:
    """Checkpoint whose files are checked, and whose tensors are read on access.

    The other attributes, such as `step`, `mesh` and `values`, come from the manifest.

    Attributes:
        path: folder of the checkpoint.
        shared: tensors of the undivided model and its optimizer.
        own_values: each rank's own values, in the order of the ranks that wrote the checkpoint.
        coordinate: mesh coordinate of the rank that reads the checkpoint.
    """

    def __init__(self, path: Path, manifest: Manifest, coordinate: MeshCoordinate) -> None:
        self.path, self.coordinate, self.shards = path, coordinate, manifest.shards
        self.step, self.world = manifest.step, manifest.world
        self.mesh, self.data_ranks = manifest.mesh, manifest.data_ranks
        self.values, self.aliases = manifest.values, manifest.aliases
        self.own_values = [shard.own_values for shard in self.shards]
        self.shared = TensorPieces(manifest.tensors, [path / shard_name(rank) for rank in range(len(self.shards))])

    @cached_property
    def own(self) -> dict[str, Tensor]:
        """Buffers and random states for the rank at `self.coordinate`."""
        return self.own_of(self.coordinate)

    def own_of(self, coordinate: MeshCoordinate) -> dict[str, Tensor]:
        """Return buffers and random states for the rank at `coordinate`.

        On the mesh that saved the checkpoint, each rank gets its own buffers and random states. On another mesh, a rank
        gets the state of the rank that had the same data-parallel rank. If the number of data-parallel ranks differs,
        every rank gets the state of the first data-parallel rank, but with averaged floating-point buffers
        (`averaged_buffers`). The result may also contain buffers of other pipeline stages.
        """
        own = dict(TensorPieces(self.own_entries(coordinate), self.shared.files))
        if self.data_ranks != coordinate.data_ranks:
            own |= {name: buffer for name, buffer in self.averaged_buffers().items() if name in own}
        return own

    def averaged_buffers(self) -> dict[str, Tensor]:
        """Return the floating-point buffers averaged over the data-parallel ranks, as in an evaluation."""
        found: dict[str, dict[int, TensorEntry]] = {}
        for rank, shard in enumerate(self.shards):
            for name, entry in self._entries_of(rank):
                if name.startswith("buffer/"):
                    found.setdefault(name, {}).setdefault(shard.data_rank, entry)
        averaged = {}
        for name, entries in found.items():
            same = len({(entry.dtype, tuple(entry.shape)) for entry in entries.values()}) == 1
            dtype = DTYPES[next(iter(entries.values())).dtype]
            if len(entries) > 1 and same and dtype.is_floating_point:
                read = TensorPieces({str(data_rank): entry for data_rank, entry in entries.items()}, self.shared.files)
                averaged[name] = torch.stack([read[key].double() for key in read]).mean(dim=0).to(dtype)
        return averaged

    def own_entries(self, coordinate: MeshCoordinate) -> dict[str, TensorEntry]:
        """Return the dtypes, shapes and shards of the tensors that `own_of` returns."""
        data_rank = coordinate.data_rank if self.data_ranks == coordinate.data_ranks else 0
        chosen = [rank for rank, shard in enumerate(self.shards) if shard.data_rank == data_rank]
        if self.mesh == coordinate.sizes:
            # the rank itself takes precedence; tensors of other stages come from other ranks, because the cut may have
            # changed
            chosen.insert(0, coordinate.rank)
        entries: dict[str, TensorEntry] = {}
        for rank in reversed(chosen):
            entries |= {name: entry for name, entry in self._entries_of(rank) if not name.startswith((SYNC, OWN))}
        return entries

    def of_rank(self, rank: int) -> dict[str, Tensor]:
        """Return the tensors that belong only to a rank's sync rule and replica.

        Tensors of the replica exist only if replicas had local parameters.
        """
        entries = {name: entry for name, entry in self._entries_of(rank) if name.startswith((SYNC, OWN))}
        return dict(TensorPieces(entries, self.shared.files))

    def _entries_of(self, rank: int) -> Iterator[tuple[str, TensorEntry]]:
        for name, own in self.shards[rank].own.items():
            piece = TensorPiece(shard=rank, key=name, offset=[0] * len(own.shape), shape=own.shape)
            yield name, TensorEntry(dtype=own.dtype, shape=own.shape, pieces=[piece])


def load_latest(
    folder: Path,
    *,
    rank: int,
    world: int,
    report: Report,
    gather: Gather | None = None,
    fetch: Callable[[Path], None] = lambda _: None,
) -> Loaded | None:
    """Load the newest whole checkpoint in `folder`, or return None if there are no checkpoints.

    Each damaged checkpoint is reported with `report("checkpoint_damaged", {"path": …, "reason": …})` and skipped.

    Args:
        gather: function that gathers a value of every rank on all ranks (`Group.gather_json`). If given, every rank
            checks its share of the files, so that each file is checked only once, and all ranks use the same
            checkpoint. If None, this rank checks all files alone.
        fetch: function that copies a checkpoint to this host, called with the path before the checkpoint is read.

    Raises:
        CheckpointError: all checkpoints in the folder are damaged.
    """
    names = [path.name for _, path in reversed(checkpoints(folder))]
    reasons: list[str] = []
    for name in names if gather is None else gather(names)[0]:
        loaded, found = None, None
        try:
            fetch(folder / name)
            manifest = Manifest.read(folder / name)
            share = range(len(manifest.shards)) if gather is None else _share(manifest, rank, world)
            loaded = _checked(folder / name, manifest, share, MeshCoordinate.plain(rank, world))
        except CheckpointError as error:
            found = str(error)
        trouble = [reason for reason in ([found] if gather is None else gather(found)) if reason is not None]
        if not trouble:
            return loaded
        report("checkpoint_damaged", {"path": name, "reason": trouble[0]})
        reasons.append(trouble[0])
    if reasons:
        listed = "\n".join(f"  {reason}" for reason in reasons)
        raise CheckpointError(
            "checkpoint.none_whole",
            "no checkpoint in {folder} is complete:\n{reasons}\nRestore one from a copy, or start a new run.",
            folder=folder,
            reasons=listed,
        )
    return None


def load(path: Path, rank: int, world: int) -> Loaded:
    """Load the checkpoint at `path` for `rank` of `world`, and check every file.

    Raises:
        CheckpointError: a file is missing, truncated or altered. The message names the file.
    """
    manifest = Manifest.read(path)
    return _checked(path, manifest, range(len(manifest.shards)), MeshCoordinate.plain(rank, world))


def chosen_checkpoint(run_or_folder: Path, which: str = NEWEST) -> Loaded:
    """Load a checkpoint of a run, and check its files.

    Args:
        run_or_folder: run directory, its folder `checkpoints/`, or the folder of one checkpoint. For one checkpoint,
            `which` has no effect.
        which: `newest` for the newest whole checkpoint, `best` for the best by the job's `checkpoint.best`, or the
            number of a step. With `newest`, a warning is shown for each damaged checkpoint.

    Raises:
        RunError: there is no such checkpoint.
        CheckpointError: the checkpoint is not whole.
    """
    if (run_or_folder / MANIFEST).exists():
        return load(run_or_folder, rank=0, world=1)
    inner = run_or_folder / "checkpoints"
    folder = inner if inner.is_dir() else run_or_folder
    found = {step: path for step, path in checkpoints(folder) if not path.name.endswith(REPLACED)}
    there = f"Saved steps: {', '.join(map(str, found))}." if found else "Nothing is saved yet."
    if which.isdecimal():
        if int(which) not in found:
            raise RunError(
                "checkpoint.step_missing",
                "{folder} has no checkpoint of step {step}. {there}",
                folder=folder,
                step=which,
                there=there,
            )
        return load(found[int(which)], rank=0, world=1)
    if which not in (NEWEST, BEST):
        raise RunError(
            "checkpoint.name_unknown",
            'there is no checkpoint "{which}". Name {newest}, {best} or the number of a step. {there}',
            which=which,
            newest=NEWEST,
            best=BEST,
            there=there,
        )

    def warn(event: str, facts: dict[str, Any]) -> None:
        warnings.warn(f"{facts['reason']}. An older one is taken instead.", stacklevel=5)

    loaded = load_latest(folder, rank=0, world=1, report=warn)
    if loaded is None and (run_or_folder / "job.yaml").is_file():
        raise RunError(
            "run.nothing_saved",
            "{path} has no checkpoint: the run ended before its first one. Continue it with --resume.",
            path=run_or_folder,
        )
    if loaded is None:
        what = "holds no checkpoint" if run_or_folder.exists() else "does not exist"
        raise RunError(
            "export.not_a_run",
            "{path} {what}. Name a run directory, or a folder of checkpoints.",
            path=run_or_folder,
            what=what,
        )
    if which == NEWEST or (step := best_step(loaded.values)) == loaded.step:
        return loaded
    if step is None:
        raise RunError(
            "checkpoint.no_best",
            "{path} has no best checkpoint: the job has no `checkpoint: {{best: METRIC}}`, or the metric was not "
            "measured yet. {there}",
            path=run_or_folder,
            there=there,
        )
    if step not in found:
        raise RunError(
            "checkpoint.best_not_written",
            "the checkpoint of step {step}, the best checkpoint of {path}, could not be written. {there}",
            step=step,
            path=run_or_folder,
            there=there,
        )
    return load(found[step], rank=0, world=1)


def best_step(values: Mapping[str, Any]) -> int | None:
    """Return the step of the best evaluation, according to a checkpoint's values, or None."""
    best = ((values.get("loop") or {}).get("stop") or {}).get("best")
    return None if best is None or best["value"] is None else int(best["step"])


def _share(manifest: Manifest, rank: int, world: int) -> list[int]:
    checker = assign_writers({str(r): entry.bytes for r, entry in enumerate(manifest.shards)}, world)
    return [r for r in range(len(manifest.shards)) if checker[str(r)] == rank]


def _checked(path: Path, manifest: Manifest, share: Sequence[int], coordinate: MeshCoordinate) -> Loaded:
    if wrong := next(_contradictions(manifest), None):
        raise CheckpointError(
            "checkpoint.contradictory", "{path} is inconsistent: {wrong}", path=path / MANIFEST, wrong=wrong
        )
    expected: dict[int, dict[str, tuple[str, list[int]]]] = {
        rank: {name: (entry.dtype, entry.shape) for name, entry in manifest.shards[rank].own.items()} for rank in share
    }
    for entry in manifest.tensors.values():
        for piece in entry.pieces:
            if piece.shard in expected:
                expected[piece.shard][piece.key] = (entry.dtype, piece.shape)
    loaded = Loaded(path, manifest, coordinate)
    for rank in share:
        _check(loaded.shared.files[rank], manifest.shards[rank], expected[rank])
    return loaded


def _contradictions(manifest: Manifest) -> Iterator[str]:
    """Yield the contradictions in a manifest, which would leave tensors incomplete or overwritten."""
    shards = len(manifest.shards)
    if (
        manifest.step < 0
        or shards != manifest.world
        or not all(n >= 1 for n in (manifest.data_ranks, *manifest.mesh.values()))
    ):
        ranks = f"{manifest.world} ranks, {manifest.data_ranks} of them data-parallel"
        yield f"step {manifest.step}, {shards} shards of {ranks}, mesh {manifest.mesh}"
    taken: set[tuple[int, str]] = set()
    for rank, shard in enumerate(manifest.shards):
        if shard.bytes < 0 or not 0 <= shard.data_rank < manifest.data_ranks:
            yield (
                f"shard {rank} has {shard.bytes} bytes and data-parallel rank {shard.data_rank} of "
                f"{manifest.data_ranks}"
            )
        for name, own in shard.own.items():
            taken.add((rank, name))
            if own.dtype not in DTYPES or any(n < 0 for n in own.shape):
                yield f"{name} of shard {rank} is {own.dtype} {own.shape}"
    for name, entry in manifest.tensors.items():
        if entry.dtype not in DTYPES or any(n < 0 for n in entry.shape):
            yield f"{name} is {entry.dtype} {entry.shape}"
            continue
        for piece in entry.pieces:
            if not 0 <= piece.shard < shards:
                yield f"{name} has a piece in shard {piece.shard}, and there are {shards}"
            if (
                len(piece.offset) != len(entry.shape)
                or len(piece.shape) != len(entry.shape)
                or any(n < 0 for n in piece.shape)
            ):
                yield f"{name} has the shape {entry.shape}, and a piece of the shape {piece.shape} at {piece.offset}"
                return
            if (piece.shard, piece.key) in taken:
                yield f"{piece.key} of shard {piece.shard} stands for two pieces"
            taken.add((piece.shard, piece.key))
        if wrong := uncovered(entry.shape, entry.pieces):
            yield f"the pieces of {name} do not make up the tensor of shape {entry.shape}: {wrong}"


def _check(path: Path, entry: ShardEntry, expected: Mapping[str, tuple[str, list[int]]]) -> None:
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            raise CheckpointError(
                "checkpoint.size_differs",
                "{path} has {size:,} bytes instead of {expected:,}: it is truncated or altered",
                path=path,
                size=size,
                expected=entry.bytes,
            )
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != entry.sha256:
            raise CheckpointError(
                "checkpoint.altered",
                "{path} was altered or damaged: its SHA-256 digest differs from the digest in the manifest",
                path=path,
            )
        with safe_open(path, framework="pt") as opened:
            if missing := expected.keys() - set(opened.keys()):
                raise CheckpointError(
                    "checkpoint.tensor_missing",
                    "{path} lists the tensor {name}, but {shard} does not contain this tensor",
                    path=path.parent / MANIFEST,
                    name=sorted(missing)[0],
                    shard=path.name,
                )
            for key, said in expected.items():
                stored = opened.get_slice(key)
                if (stored.get_dtype(), stored.get_shape()) != said:
                    raise CheckpointError(
                        "checkpoint.tensor_differs",
                        "{path}: the tensor {name} is {dtype} {shape}, but the manifest lists it as {expected}",
                        path=path,
                        name=key,
                        dtype=stored.get_dtype(),
                        shape=stored.get_shape(),
                        expected=said,
                    )
    except FileNotFoundError as error:
        raise CheckpointError("checkpoint.file_missing", "{path} is missing", path=path) from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            "checkpoint.unreadable", "{path} cannot be read: {error}", path=path, error=error
        ) from error


def _rows(shape: Sequence[int], itemsize: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the first index of each section that is read at once, and its size.

    The size covers only the first dimensions; a section is whole in the others.
    """
    if not shape:
        yield [], []
        return
    size = itemsize * prod(shape[1:])
    if size > _READ_BYTES and len(shape) > 1:
        for number, (first, rows) in product(range(shape[0]), list(_rows(shape[1:], itemsize))):
            yield [number, *first], [1, *rows]
        return
    count = max(1, _READ_BYTES // max(1, size))
    for begin in range(0, shape[0], count):
        yield [begin, *[0] * (len(shape) - 1)], [min(count, shape[0] - begin)]


def _read(
    path: Path, start: int, dtype: torch.dtype, full: Sequence[int], begin: Sequence[int], shape: Sequence[int]
) -> Tensor:
    """Read a block of a tensor whose bytes begin at `start` of a file.

    Runs of bytes between gaps are read one by one. Very short runs are read together with the gaps.
    """
    # the block is contiguous in the dimensions after `outer`
    outer = max((dim for dim in range(len(full)) if shape[dim] != full[dim]), default=0)
    lead, run = list(shape[:outer]), prod(shape[outer:]) * dtype.itemsize
    if outer and run < _SHORT_BYTES:
        widened = [*begin[:outer], *[0] * (len(full) - outer)]
        whole = _read(path, start, dtype, full, widened, [*lead, *full[outer:]])
        return _narrow(whole, [0] * outer + list(begin[outer:]), shape)
    strides = [prod(full[dim + 1 :]) * dtype.itemsize for dim in range(len(full))]
    buffer = np.empty(prod(shape) * dtype.itemsize, dtype=np.uint8)
    into = buffer.data
    first = start + sum(a * stride for a, stride in zip(begin, strides, strict=True))
    with path.open("rb", buffering=0) as file:
        if lead and hasattr(os, "posix_fadvise"):  # no reading ahead into the gaps
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for number, index in enumerate(product(*map(range, lead))):
            place = first + sum(i * stride for i, stride in zip(index, strides, strict=False))
            done, end = number * run, (number + 1) * run
            while done < end:
                count = os.preadv(file.fileno(), [into[done:end]], place)
                if not count:
                    raise SafetensorError("the file is shorter than its header says")
                done, place = done + count, place + count
    return torch.from_numpy(buffer).view(dtype).view(list(shape))


def _overlap(begin: Sequence[int], shape: Sequence[int], piece: TensorPiece) -> tuple[list[int], list[int]] | None:
    """Return the overlap of a block and a piece as (first element, shape), or None.

    The first elements are coordinates in the full tensor.
    """
    low = [max(a, b) for a, b in zip(begin, piece.offset, strict=True)]
    high = [min(a + n, b + m) for a, n, b, m in zip(begin, shape, piece.offset, piece.shape, strict=True)]
    extent = [b - a for a, b in zip(low, high, strict=True)]
    return None if any(n <= 0 for n in extent) else (low, extent)


def _narrow(tensor: Tensor, begin: Sequence[int], shape: Sequence[int]) -> Tensor:
    for dim, (start, length) in enumerate(zip(begin, shape, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor
