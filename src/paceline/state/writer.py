"""Asynchronous checkpointing: ranks copy their share during the next step, a thread writes it.

Nothing in a checkpoint is executable: safetensors and JSON, no pickle. Ranks communicate only through the file system,
so all hosts of a run need a shared one. `state/reader.py` loads these checkpoints.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.errors import CheckpointError
from paceline.split.layout import Part
from paceline.state.manifest import (
    PARTIAL,
    REPLACED,
    Manifest,
    OwnEntry,
    Receipt,
    ShardEntry,
    checkpoints,
    partial_name,
    plain,
    read_json,
    receipt_name,
    shard_name,
    step_name,
    sync_folder,
    write_durably,
)
from paceline.state.shard import MeshCoordinate, Shard, ShardContents, describe, merge
from paceline.wire.status import GenerationOver, generation_is_over

Report = Callable[[str, dict[str, Any]], None]

# pause after each piece, as a multiple of its CPU time: writing then takes memory and a core only a tenth of the time
REST = 9.0
_LOOK_EVERY_S = 0.02
_AFTER_THE_END_S = 5.0  # a rank that ended without `close` (it raised) waits at most this long for the others


@dataclass
class Snapshot:
    """State that one rank saves.

    Names are `model/<fqn>`, `optimizer/<fqn>/<key>`, `buffer/<fqn>`, `rng/torch`, …

    Attributes:
        shared: this rank's parts of the undivided model's tensors (parameters, optimizer state), unchanged until the
            next optimizer step. Ranks that hold the same part have the same values. May be large.
        own: tensors of this rank alone, or changed by the forward pass (random states, batch-norm buffers). They are
            small and copied at once.
        values: JSON, the same on all ranks (step, epoch, position, stop rule, parameter groups).
        own_values: JSON, of this rank alone.
        aliases: names of tied tensors, each with the name under which its tensor is in `shared`.
        parts: the part of each shared tensor that this rank holds; a tensor without an entry is whole on every rank.
        coordinate: this rank's mesh coordinate; None if every rank is a replica.
        protected: step of an older checkpoint to keep, in addition to the newest ones.
    """

    shared: dict[str, Tensor]
    own: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    own_values: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    coordinate: MeshCoordinate | None = None
    protected: int | None = None


class Checkpointer:
    """Writer of a run's checkpoints into `folder`; one instance per rank.

    Every rank writes its share of the shared tensors' pieces and its own tensors into `.step-….partial`, then a
    receipt. When all receipts are there and cover every tensor, rank 0 adds the manifest and renames the folder. So a
    checkpoint gets its final name only when it is whole and on disk. Then rank 0 deletes all but the newest `keep`
    checkpoints. The memory cost is a staging buffer of this rank's share, which is kept between checkpoints.

    Args:
        folder: the run's `checkpoints/`; made if missing. The same for all ranks.
        rank, world: this rank, and the number of ranks.
        keep: number of newest checkpoints to keep, at least 1.
        deadline_s: how long rank 0 waits for the others without any new byte.
        report: called with `checkpoint_saved` (step, path, bytes, write_s) on rank 0, mostly from the writing thread.

    Attributes:
        completed: step of the newest checkpoint for which this rank's part is written; on rank 0, all parts.
        write_s: seconds of background writing for this checkpoint.

    Raises:
        CheckpointError: the folder cannot be written.
    """

    def __init__(self, folder: Path, *, rank: int, world: int, keep: int, deadline_s: float, report: Report) -> None:
        self.folder, self.rank, self.world, self.keep = folder, rank, world, keep
        self.deadline_s, self.report = deadline_s, report
        self._shard = Shard()
        self._thread: threading.Thread | None = None
        self._work: Iterator[None] = iter(())  # leftovers of the current checkpoint
        self._protected: int | None = None
        self._error: CheckpointError | None = None
        self._copied = threading.Event()
        self._hurry = threading.Event()  # a caller waits until all is written
        self._copying = False
        self.completed = 0
        self.write_s = 0.0
        self._claim_folder()

    def save(self, step: int, snapshot: Snapshot) -> None:
        """Begin the checkpoint of `step` and return.

        This waits for a previous checkpoint that is still being written. `release` must be called before the shared
        tensors change.

        Raises:
            CheckpointError: the previous checkpoint failed, or the snapshot has a value that cannot be saved. The new
                checkpoint is then not begun.
        """
        self._finish()
        self.poll()
        values, own_values = plain(snapshot.values, "values"), plain(snapshot.own_values, "own values")
        coordinate = snapshot.coordinate or MeshCoordinate.plain(self.rank, self.world)
        contents, pieces = ShardContents.of(snapshot.shared, snapshot.parts, coordinate)
        own = {name: OwnEntry(**describe(name, tensor)) for name, tensor in snapshot.own.items()}
        self._shard.begin(pieces, snapshot.own)
        self._copied.clear()
        self._hurry.clear()
        entry = ShardEntry(
            bytes=self._shard.file_bytes, sha256="", data_rank=coordinate.data_rank, own=own, own_values=own_values
        )
        manifest = Manifest(
            step=step,
            world=self.world,
            mesh=coordinate.sizes,
            data_ranks=coordinate.data_ranks,
            shards=[],
            tensors={},
            aliases={},
            values=values,
        )
        self._protected = snapshot.protected
        self._work = self._pieces(manifest, entry, contents, dict(snapshot.aliases))
        # One thread per checkpoint, because it lowers its priority, which an ordinary user cannot raise again.
        # It is not a daemon thread: a terminating interpreter waits for the remaining bytes.
        self._thread = threading.Thread(target=self._run, name=f"checkpoint-{step}")
        self._thread.start()
        self._copying = True

    def release(self) -> float:
        """Wait until the shared tensors are copied and may change; return the seconds waited.

        On accelerators, the current stream waits, not the host.
        """
        if not self._copying:
            return 0.0
        started = time.perf_counter()
        self._copied.wait()
        self._shard.hold_stream()
        self._copying = False
        return time.perf_counter() - started

    @property
    def busy(self) -> bool:
        """True while a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def under_way(self) -> bool:
        """True between the start of a checkpoint and `complete`, `close` or the next one."""
        return self._thread is not None

    def complete(self) -> float:
        """Write the remainder of the current checkpoint on this thread; return the seconds taken.

        `poll` raises if it failed.
        """
        started = time.perf_counter()
        self._finish()
        return time.perf_counter() - started

    def poll(self) -> None:
        """Raise the error of the background thread, once.

        Raises:
            CheckpointError: the last checkpoint could not be written; older ones are unchanged.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Wait until all is written.

        Raises:
            CheckpointError: the checkpoint could not be written; older ones are unchanged.
        """
        self._finish()
        self.poll()

    def abandon(self) -> None:
        """Abandon the current checkpoint, because ranks with parts of it are gone."""
        if self._thread is not None:
            self._hurry.set()
            self._thread.join()
            self._thread = None
        self._work, self._error, self._copying = iter(()), None, False

    def _finish(self) -> None:
        """Complete the current checkpoint on the calling thread, at its normal priority.

        Raises:
            GenerationOver: a rank was lost, and its part will never arrive.
        """
        if self._thread is not None:
            self._hurry.set()
            self._thread.join()
            self._thread = None
            for _ in self._work:
                if generation_is_over():
                    raise GenerationOver(
                        "checkpoint.rank_lost", "the checkpoint being written lacks the shard of a lost rank"
                    )
        self._copying = False

    def _claim_folder(self) -> None:
        probe = self.folder / f".probe-{self.rank}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"")
            probe.unlink()
            for left in self.folder.glob(PARTIAL) if self.rank == 0 else ():
                shutil.rmtree(left)
        except OSError as error:
            text = f"no checkpoint can be written in {self.folder}: {error.strerror or error}"
            raise CheckpointError(
                "checkpoint.folder_unusable", "{reason}. Make it writable, or name another run directory.", reason=text
            ) from error

    # Writing

    def _run(self) -> None:
        # At normal priority: `release` waits for this copy, and a low-priority thread could delay training behind all
        # other
        # processes.
        next(self._work, None)
        # At the lowest priority from here: if every core is busy, the thread still gets 1.5 % of one (with SCHED_IDLE
        # only 0.3 %, so
        # a large state would never be written).
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        started = time.thread_time()
        for _ in self._work:
            if self._hurry.wait(REST * (time.thread_time() - started)):
                return
            started = time.thread_time()

    def _pieces(
        self, manifest: Manifest, entry: ShardEntry, contents: ShardContents, aliases: dict[str, str]
    ) -> Iterator[None]:
        """Write one checkpoint piece by piece, after copying the state.

        This is a generator; `poll` raises its errors.
        """
        started = time.perf_counter()
        partial = self.folder / partial_name(manifest.step)
        try:
            self._shard.gather()
            self._copied.set()
            yield
            yield from self._write(partial, Receipt(shard=entry, tensors=contents.entries(), aliases=aliases))
            if self.rank == 0:
                yield from self._publish(partial, manifest)
                facts = {"bytes": sum(s.bytes for s in manifest.shards), "write_s": time.perf_counter() - started}
                self.report("checkpoint_saved", {"step": manifest.step, "path": step_name(manifest.step), **facts})
            self.completed, self.write_s = manifest.step, time.perf_counter() - started
        except Exception as error:  # noqa: BLE001 - raised again by poll, on the training thread
            if (
                self.rank != 0
                and isinstance(error, FileNotFoundError)
                and self.folder.exists()
                and not partial.exists()
            ):
                return  # rank 0 has given up, removed the folder, and raises the reason
            reason = self._give_up(partial, entry.bytes, error)
            before = [path.name for _, path in checkpoints(self.folder)]
            kept = f"Saved before and untouched: {', '.join(before)}." if before else "There is none before it."
            self._error = CheckpointError(
                "checkpoint.not_written",
                "the checkpoint of step {step} was not written: {reason}. {kept}",
                step=manifest.step,
                reason=reason,
                kept=kept,
            )
            self._error.__cause__ = error
        finally:
            self._copied.set()

    def _write(self, partial: Path, receipt: Receipt) -> Iterator[None]:
        partial.mkdir(exist_ok=True)
        (partial / receipt_name(self.rank)).unlink(missing_ok=True)
        receipt.shard.sha256 = yield from self._shard.write(partial / shard_name(self.rank))
        write_durably(partial / receipt_name(self.rank), receipt.model_dump())

    def _publish(self, partial: Path, manifest: Manifest) -> Iterator[None]:
        """Turn the folder into a checkpoint once it has every rank's shard."""
        receipts = yield from self._await_receipts(partial)
        for rank, receipt in enumerate(receipts):
            if (size := _size(partial / shard_name(rank))) != receipt.shard.bytes:
                raise CheckpointError(
                    "checkpoint.shard_short",
                    "{shard} has {size:,} of the {expected:,} bytes that rank {rank} wrote",
                    shard=shard_name(rank),
                    size=size,
                    expected=receipt.shard.bytes,
                    rank=rank,
                )
        manifest.shards = [receipt.shard for receipt in receipts]
        manifest.tensors = merge(receipts)
        manifest.aliases = {alias: name for receipt in receipts for alias, name in receipt.aliases.items()}
        for rank in range(self.world):
            (partial / receipt_name(rank)).unlink()
        manifest.write(partial)
        sync_folder(partial)
        final = self.folder / step_name(manifest.step)
        replaced = final.with_suffix(REPLACED)
        if final.exists():  # a step that was trained again, after a recovery or a rewind
            _remove(replaced)
            final.rename(replaced)
        partial.rename(final)
        sync_folder(self.folder)
        _remove(replaced)
        self._remove_old(manifest.step)

    def _await_receipts(self, partial: Path) -> Generator[None, None, list[Receipt]]:
        receipts: dict[int, Receipt] = {}
        arrived, since = -1, time.monotonic()
        while True:
            missing = [rank for rank in range(self.world) if rank not in receipts]
            for rank in missing:
                content = read_json(partial / receipt_name(rank))
                if content is not None and "error" in content:
                    raise CheckpointError(
                        "checkpoint.shard_not_written",
                        "rank {rank} could not write its shard: {error}",
                        rank=rank,
                        error=content["error"],
                    )
                if content is not None:
                    receipts[rank] = Receipt.model_validate(content)
            if len(receipts) == self.world:
                return [receipts[rank] for rank in range(self.world)]
            now_there = sum(_size(partial / shard_name(rank)) for rank in missing)
            if now_there != arrived:
                arrived, since = now_there, time.monotonic()
            deadline_s = (
                self.deadline_s if threading.main_thread().is_alive() else min(self.deadline_s, _AFTER_THE_END_S)
            )
            if time.monotonic() - since > deadline_s:
                names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
                raise CheckpointError(
                    "checkpoint.timeout",
                    "{ranks} of {world} sent nothing for {deadline_s:g} s. Find out what delayed them, or raise "
                    "deadline_s.",
                    ranks=names,
                    world=self.world,
                    deadline_s=deadline_s,
                )
            time.sleep(_LOOK_EVERY_S if not self._hurry.is_set() else _LOOK_EVERY_S / 10)
            yield

    def _remove_old(self, step: int) -> None:
        """Delete all but this checkpoint, the newest ones before it, and the protected one.

        Later checkpoints, which a resumed run skipped, are replaced when training reaches them.
        """
        older = [(s, path) for s, path in checkpoints(self.folder) if s < step]
        for s, path in older[: max(len(older) - self.keep + 1, 0)]:
            if s != self._protected:
                _remove(path)

    def _give_up(self, partial: Path, needed_bytes: int, error: Exception) -> str:
        """Remove the written files and return the reason; other ranks report it to rank 0."""
        if self.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        else:
            with suppress(OSError):
                (partial / shard_name(self.rank)).unlink()
        reason = self._explain(needed_bytes, error)
        if self.rank != 0:
            with suppress(OSError):  # the disk is too full even for this: rank 0 names this rank after its deadline
                write_durably(partial / receipt_name(self.rank), {"error": reason})
        return reason

    def _explain(self, needed_bytes: int, error: Exception) -> str:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = shutil.disk_usage(self.folder).free
            others = ", the other ranks as much as their parts take," if self.world > 1 else ""
            room = f"rank {self.rank} needs {needed_bytes:,} bytes in {self.folder}{others} and {free:,} are free"
            return f"{error.strerror}: {room}. Make room, keep fewer checkpoints, or save to another disk"
        if isinstance(error, OSError):
            return f"{error.strerror or error} ({error.filename or self.folder})"
        return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _remove(path: Path) -> None:
    """Delete a checkpoint; rename it first so that no reader finds an incomplete one."""
    if path.exists():
        doomed = path.rename(path.with_name(f".{path.name}.removed.partial"))
        shutil.rmtree(doomed)
