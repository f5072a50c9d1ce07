"""Copies of a run from its URL: the record and the newest whole checkpoint."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import CheckpointError, RunError, StorageError
from paceline.files import LINES_LIMIT, private_folder, scratch_folder
from paceline.run.object_store.lease import LEASE
from paceline.run.object_store.upload import CHECKPOINTS, JOB, step_of
from paceline.state.manifest import MANIFEST, Manifest, shard_name
from paceline.storage.store import Entry, Store

Say = Callable[[str], object]


@contextmanager
def copy_of(url: str, say: Say, *, checkpoint: bool) -> Iterator[Path]:
    """A temporary copy of the run at a URL, with or without its newest checkpoint.

    Raises:
        RunError: there is no run.
        StorageError: the store cannot be used.
    """
    store, listed = _run_at(url)
    with scratch_folder() as folder:
        # Where --layout hf looks for it, too.
        run = folder / store.url.rpartition("/")[2]
        fetch_run(store, listed, run, say, checkpoint=checkpoint)
        yield run


def record_at(url: str) -> Path:
    """Record of the run at a URL, without checkpoints, in a new temporary folder.

    Raises:
        RunError: there is no run.
        StorageError: the store cannot be used.
    """
    store, listed = _run_at(url)
    folder = Path(tempfile.mkdtemp(prefix="paceline-run-"))
    try:
        fetch_run(store, listed, folder / "run", lambda _: None, checkpoint=False)
    except BaseException:
        shutil.rmtree(folder)
        raise
    return folder / "run"


def _run_at(url: str) -> tuple[Store, dict[str, Entry]]:
    store = Store(url)
    listed = store.list()
    if JOB not in listed:
        raise RunError(f"{store.url} is not a run: it has no {JOB}")
    return store, listed


def fetch_run(store: Store, listed: dict[str, Entry], into: Path, say: Say, *, checkpoint: bool) -> None:
    """Copy a run into a new folder, which gets its name at the end."""
    partial = into.with_name(f".{into.name}.fetching")
    shutil.rmtree(partial, ignore_errors=True)
    private_folder(partial)
    for name in listed:
        if name != LEASE and not name.startswith(f"{CHECKPOINTS}/") and is_plain(name):
            _fetch(store, name, partial / name)
    (partial / CHECKPOINTS).mkdir(mode=0o700)
    if checkpoint:
        _fetch_newest(store, listed, partial, say)
    partial.rename(into)


def goes_on_from(store: Store, folder: Path, lines: str) -> bool:
    """True if a file of lines here begins with all of the store's."""
    try:
        here = (folder / lines).read_bytes()
    except FileNotFoundError:
        here = b""
    return here.startswith(store.read(lines, LINES_LIMIT) or b"")


def is_plain(name: str) -> bool:
    """True if an object's name is a relative path inside its folder, with nothing hidden."""
    return all(part and not part.startswith(".") and part.isprintable() for part in name.split("/"))


def _fetch_newest(store: Store, listed: dict[str, Entry], run: Path, say: Say) -> None:
    """Fetch the newest checkpoint whose files have the lengths and sums of its manifest."""
    folders = {
        name.rpartition("/")[0] for name in listed if name.endswith(f"/{MANIFEST}") and step_of(name) is not None
    }
    for folder in sorted(folders, key=lambda name: step_of(f"{name}/") or 0, reverse=True):
        try:
            size = _fetch_checkpoint(store, listed, folder, run / folder)
        except (StorageError, CheckpointError) as error:
            if isinstance(error, StorageError) and (error.may_pass or error.denied):
                raise
            shutil.rmtree(run / folder, ignore_errors=True)
            say(f"{store.url}/{folder} is left out: {error}")
            continue
        say(f"fetched the checkpoint of step {step_of(f'{folder}/')} from {store.url} ({size / 1e6:,.1f} MB)")
        return


def _fetch_checkpoint(store: Store, listed: dict[str, Entry], name: str, into: Path) -> int:
    private_folder(into)
    store.fetch(f"{name}/{MANIFEST}", into / MANIFEST)
    shards = Manifest.read(into).shards
    for rank, shard in enumerate(shards):
        file = f"{name}/{shard_name(rank)}"
        if file not in listed or listed[file].size != shard.bytes:
            raise CheckpointError(f"{shard_name(rank)} is not there, or not of the length that the manifest names")
        store.fetch(file, into / shard_name(rank), sha256=shard.sha256)
    return sum(shard.bytes for shard in shards)


def _fetch(store: Store, name: str, into: Path) -> None:
    into.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        store.fetch(name, into)
    except OSError as error:
        raise RunError(f"{store.url}/{name} cannot be kept in {into.parent}: {error.strerror or error}") from error
