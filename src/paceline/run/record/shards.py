"""Record of the files that a run trains on: `shards.json` and events."""

from __future__ import annotations

import json

from paceline.corpus.shards import Corpus
from paceline.data.loader import Loader
from paceline.files import read_text, write_whole
from paceline.job.samples import in_users_data
from paceline.job.zoo.records import changed_shards
from paceline.run.record.recorder import Events
from paceline.run.record.run import Run

_FILE = "shards.json"
_MOST = 100_000  # longer lists, such as single images, are not written; one digest still detects changes


def note_shards(run: Run, loader: Loader, events: Events) -> None:
    """Write `shards.json` at the start of a run, and record left-out files."""
    corpus = _corpus(loader)
    if corpus is None:
        return
    if not (run.path / _FILE).exists() and len(corpus.shards) <= _MOST:
        write_whole(run.path / _FILE, json.dumps([shard._asdict() for shard in corpus.shards]).encode())
    if corpus.left_out:
        listed = [{"shard": name, "reason": reason} for name, reason in corpus.left_out[:20]]
        events("shards_left_out", {"shards": len(corpus.left_out), "first": listed})


def changed_files(run: Run, loader: Loader) -> str | None:
    """Describe how the files of a run have changed since it began; None if unknown."""
    corpus = _corpus(loader)
    if corpus is None or not (run.path / _FILE).exists():
        return None
    return changed_shards(json.loads(read_text(run.path / _FILE)), corpus.shards)


def _corpus(loader: Loader) -> Corpus | None:
    found = getattr(in_users_data(loader.dataset, [])[0], "corpus", None)
    return found if isinstance(found, Corpus) else None  # `kind: text` has its bytes under this name
