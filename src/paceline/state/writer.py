"""Asynchronous checkpointing: shards are copied during the next step, and written in the background.

A checkpoint consists of safetensors and JSON files without pickle, so that loading it cannot execute code. Ranks
communicate only through the file system, so all hosts of a run need a shared file system. `state/reader.py` loads these
checkpoints.
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

# pause after each piece, as a multiple of its CPU time, so that writing uses a core only a tenth of the time
REST = 9.0
_LOOK_EVERY_S = 0.02
# rank 0 waits at most this long for other ranks if its main thread ended without `close`, after an exception
_AFTER_THE_END_S = 5.0


@dataclass
class Snapshot:
    """State that one rank saves in a checkpoint.

    Names are `model/<fqn>`, `optimizer/<fqn>/<key>`, `buffer/<fqn>`, `rng/torch`, …

    Attributes:
        shared: this rank's parts of the undivided model's parameters and optimizer state. These tensors may be large,
            and must not change before the next optimizer step. Ranks that hold the same part must have the same values.
        own: tensors that only this rank has, or that the forward pass changes, such as random states and batch-norm
            buffers. They are small, and are copied immediately.
        values: JSON values that are equal on all ranks, such as step, epoch, position, stop rule and parameter groups.
        own_values: JSON values that belong only to this rank.
        aliases: further names of tied tensors, each with the name of the tensor in `shared`.
        parts: the part of each shared tensor that this rank holds. A tensor without an entry is whole on every rank.
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
    """Writer of a run's checkpoints. Each rank has one instance.

    Every rank writes its share of the shared tensors and its own tensors to the folder `.step-….partial`, and then a
    receipt. Once all receipts exist and cover every tensor, rank 0 adds the manifest and renames the folder. A
    checkpoint therefore gets its final name only when it is whole and on disk. Then rank 0 deletes all checkpoints
    except the newest `keep`. The staging buffer for this rank's share stays in memory between checkpoints.

    Args:
        folder: folder `checkpoints/` of the run, which must be the same for all ranks. A missing folder is created.
        rank, world: number of this rank, and number of ranks.
        keep: number of newest checkpoints to keep, at least 1.
        deadline_s: longest time that rank 0 waits for other ranks without new data, in seconds.
        report: called on rank 0 with the event `checkpoint_saved` (step, path, bytes, write_s), usually in the writing
            thread.

    Attributes:
        completed: step of the newest checkpoint that this rank has written. On rank 0, all ranks have written this
            checkpoint.
        write_s: seconds that writing the newest checkpoint took in the background.

    Raises:
        CheckpointError: the folder cannot be written.
    """

    def __init__(self, folder: Path, *, rank: int, world: int, keep: int, deadline_s: float, report: Report) -> None:
        self.folder, self.rank, self.world, self.keep = folder, rank, world, keep
        self.deadline_s, self.report = deadline_s, report
        self._shard = Shard()
        self._thread: threading.Thread | None = None
        self._work: Iterator[None] = iter(())  # remaining work of the current checkpoint
        self._protected: int | None = None
        self._error: CheckpointError | None = None
        self._copied = threading.Event()
        self._hurry = threading.Event()  # set when a caller waits for the end of writing
        self._copying = False
        self.completed = 0
        self.write_s = 0.0
        self._claim_folder()

    def save(self, step: int, snapshot: Snapshot, *, copies: bool = True) -> None:
        """Begin the checkpoint of `step`, and continue it in the background.

        If the previous checkpoint is still being written, this method waits for it. Callers must call `release` before
        they change the shared tensors.

        Args:
            copies: False if nothing changes until `close` has returned, as at the end of a run. The state on CPUs is
                then written without a copy in memory.

        Raises:
            CheckpointError: the previous checkpoint failed, or the snapshot has a value that cannot be saved. In both
                cases the new checkpoint is not begun.
        """
        self._finish()
        self.poll()
        values, own_values = plain(snapshot.values, "values"), plain(snapshot.own_values, "own values")
        coordinate = snapshot.coordinate or MeshCoordinate.plain(self.rank, self.world)
        contents, pieces = ShardContents.of(snapshot.shared, snapshot.parts, coordinate)
        own = {name: OwnEntry(**describe(name, tensor)) for name, tensor in snapshot.own.items()}
        self._shard.begin(pieces, snapshot.own, copies=copies)
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
        # Each checkpoint has a new thread, because the thread lowers its priority, and an ordinary user cannot raise a
        # priority again. The thread is not a daemon, so that a terminating interpreter waits for the remaining bytes.
        self._thread = threading.Thread(target=self._run, name=f"checkpoint-{step}")
        self._thread.start()
        self._copying = True

    def release(self) -> float:
        """Wait until the shared tensors are copied and may change. Return the seconds waited.

        On accelerators, the current stream waits instead of the host.
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
        """True from the start of a checkpoint until `complete`, `close` or the next checkpoint."""
        return self._thread is not None

    def complete(self) -> float:
        """Write the rest of the current checkpoint in this thread; return the seconds taken.

        If the checkpoint fails, `poll` raises the error.
        """
        started = time.perf_counter()
        self._finish()
        return time.perf_counter() - started

    def poll(self) -> None:
        """Raise the error of the background thread, if there is one. Each error is raised once.

        Raises:
            CheckpointError: the last checkpoint could not be written. Older checkpoints are unchanged.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Wait until the current checkpoint is written.

        Raises:
            CheckpointError: the checkpoint could not be written. Older checkpoints are unchanged.
        """
        self._finish()
        self.poll()

    def abandon(self) -> None:
        """Stop writing the current checkpoint, because ranks that hold parts of it are lost."""
        if self._thread is not None:
            self._hurry.set()
            self._thread.join()
            self._thread = None
        self._work, self._error, self._copying = iter(()), None, False

    def _finish(self) -> None:
        """Complete the current checkpoint in the calling thread, which has normal priority.

        Raises:
            GenerationOver: a rank was lost, so that the checkpoint cannot be completed.
        """
        if self._thread is not None:
            self._hurry.set()
            self._thread.join()
            self._thread = None
            for _ in self._work:
                if generation_is_over():
                    raise GenerationOver(
                        "checkpoint.rank_lost",
                        "the current checkpoint cannot be completed, because the shard of a lost rank is missing",
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
                "checkpoint.folder_unusable",
                "{reason}. Make the folder writable, or name another run directory.",
                reason=text,
            ) from error

    # Writing

    def _run(self) -> None:
        # This copy runs at normal priority, because `release` waits for it. At low priority, other processes could
        # delay the copy, and thereby the training.
        next(self._work, None)
        # The rest runs at the lowest priority. If every core is busy, the thread then still gets 1.5 % of a core. With
        # SCHED_IDLE it would get only 0.3 %, so that a large state would never be written.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        started = time.thread_time()
        for _ in self._work:
            if self._hurry.wait(REST * (time.thread_time() - started)):
                return
            started = time.thread_time()

    def _pieces(
        self, manifest: Manifest, entry: ShardEntry, contents: ShardContents, aliases: dict[str, str]
    ) -> Iterator[None]:
        """Copy the state, and then write the checkpoint piece by piece.

        This is a generator. `poll` raises its errors.
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
                return  # rank 0 has given up and removed the folder, and raises the error with the reason
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
        """Turn the folder into a checkpoint, once it contains the shards of all ranks."""
        receipts = yield from self._await_receipts(partial)
        for rank, receipt in enumerate(receipts):
            if (size := _size(partial / shard_name(rank))) != receipt.shard.bytes:
                raise CheckpointError(
                    "checkpoint.shard_short",
                    "{shard} has only {size:,} of the {expected:,} bytes that rank {rank} wrote",
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
        if final.exists():  # the step was trained again after a recovery or a rewind
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
                    "{ranks} of {world} sent nothing for {deadline_s:g} s. Find out what delayed these ranks, or "
                    "raise deadline_s.",
                    ranks=names,
                    world=self.world,
                    deadline_s=deadline_s,
                )
            time.sleep(_LOOK_EVERY_S if not self._hurry.is_set() else _LOOK_EVERY_S / 10)
            yield

    def _remove_old(self, step: int) -> None:
        """Delete older checkpoints, except the newest of them and the protected checkpoint.

        Checkpoints of later steps may exist if a resumed run ignored them. They are replaced when training reaches
        their steps.
        """
        older = [(s, path) for s, path in checkpoints(self.folder) if s < step]
        for s, path in older[: max(len(older) - self.keep + 1, 0)]:
            if s != self._protected:
                _remove(path)

    def _give_up(self, partial: Path, needed_bytes: int, error: Exception) -> str:
        """Remove the written files, and return the reason. All ranks except rank 0 report it to rank 0."""
        if self.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        else:
            with suppress(OSError):
                (partial / shard_name(self.rank)).unlink()
        reason = self._explain(needed_bytes, error)
        if self.rank != 0:
            # the disk may be too full for this report; rank 0 then names this rank after the deadline
            with suppress(OSError):
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
    """Delete a checkpoint. Rename it first, so that no reader finds an incomplete checkpoint."""
    if path.exists():
        doomed = path.rename(path.with_name(f".{path.name}.removed.partial"))
        shutil.rmtree(doomed)
