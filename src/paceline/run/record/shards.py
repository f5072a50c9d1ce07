"""Record of the files that a run reads: `shards.json` and events."""

from __future__ import annotations

import json

from paceline.corpus.shards import Corpus, Shard
from paceline.files import read_text, write_whole
from paceline.job.samples import DataSets, all_files_of
from paceline.job.zoo.records import changed_shards
from paceline.run.record.recorder import Events
from paceline.run.record.run import Run

_FILE = "shards.json"
_MOST = 100_000  # longer lists, such as single images, are not written; digests still detect changes


def note_shards(run: Run, data: DataSets, events: Events) -> None:
    """Write `shards.json` at the start of a run, and record left-out files."""
    corpora = _corpora(data)
    if not corpora:
        return
    if not (run.path / _FILE).exists() and sum(len(corpus.shards) for corpus in corpora) <= _MOST:
        write_whole(run.path / _FILE, json.dumps([shard._asdict() for shard in _shards(corpora)]).encode())
    if left_out := dict(each for corpus in corpora for each in corpus.left_out):
        listed = [{"shard": name, "reason": reason} for name, reason in list(left_out.items())[:20]]
        events("shards_left_out", {"shards": len(left_out), "first": listed})


def changed_files(run: Run, data: DataSets) -> str | None:
    """Describe how the files of a run have changed since it began; None if unknown."""
    corpora = _corpora(data)
    if not corpora or not (run.path / _FILE).exists():
        return None
    return changed_shards(json.loads(read_text(run.path / _FILE)), _shards(corpora))


def _corpora(data: DataSets) -> list[Corpus]:
    """Return the files of all sets, and of each source of a mixture."""
    sets = all_files_of(data.train, data.held_out, data.test)
    return list({id(corpus): corpus for files in sets for corpus in files.corpora}.values())


def _shards(corpora: list[Corpus]) -> list[Shard]:
    """Return each file once, sorted by name."""
    return sorted({shard.name: shard for corpus in corpora for shard in corpus.shards}.values())
