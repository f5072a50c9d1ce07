"""A corpus becomes a folder of tokens that loses no document, whatever interrupts the conversion."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from paceline.corpus import conversion
from paceline.corpus.conversion import tokenize
from paceline.corpus.host_files import HostFiles
from paceline.corpus.shards import Corpus
from paceline.corpus.tokenizer import Tokenizer
from paceline.corpus.tokens import document_lengths, read_about
from paceline.errors import DataError
from refusals import raises
from small_tokenizers import SENTENCES, save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def write_source(folder: Path, *shards: list[Any]) -> Path:
    folder.mkdir(exist_ok=True)
    for number, texts in enumerate(shards):
        lines = "".join(json.dumps({"text": text, "id": n}) + "\n" for n, text in enumerate(texts))
        (folder / f"{number}.jsonl").write_text(lines)
    return folder


def open_corpus(folder: Path, cache: Path) -> Corpus:
    return Corpus.open([str(folder)], cache=HostFiles(cache, 1 << 30))


def documents_in(folder: Path, cache: Path) -> list[list[int]]:
    corpus = Corpus.open([str(folder)], format="arrow", cache=HostFiles(cache, 1 << 30))
    return [corpus.row(row)["tokens"].tolist() for row in range(len(corpus))]


TEXTS = [f"{SENTENCES[n % 3]} {n}" for n in range(50)]


def test_the_folder_has_the_documents_of_the_source_in_order(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = write_source(tmp_path / "source", TEXTS[:20], ["", *TEXTS[20:], None])
    seen: list[tuple[int, int]] = []
    corpus = open_corpus(source, tmp_path / "cache")
    about = tokenize(
        corpus, "text", tokenizer, tmp_path / "out", workers=2, progress=lambda rows, found: seen.append((rows, found))
    )
    expected = [tokenizer.encode(text).tolist() for text in TEXTS]
    assert documents_in(tmp_path / "out", tmp_path / "cache") == expected
    assert np.load(tmp_path / "out" / "lengths.npy").tolist() == list(map(len, expected))
    assert (about.documents, about.tokens, about.empty) == (50, sum(map(len, expected)), 2)
    assert read_about(tmp_path / "out") == about
    assert seen[-1] == (52, about.tokens)


def test_large_files_are_divided_among_processes(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "_PART_BYTES", (500, 500))
    source = write_source(tmp_path / "source", TEXTS)
    about = tokenize(open_corpus(source, tmp_path / "cache"), "text", tokenizer, tmp_path / "out", workers=2)
    assert len(about.parts) > 5
    assert documents_in(tmp_path / "out", tmp_path / "cache") == [tokenizer.encode(text).tolist() for text in TEXTS]
    assert document_lengths(tmp_path / "out" / about.parts[0].name).sum() == about.parts[0].tokens


def test_a_second_call_converts_only_what_is_new(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source, out = write_source(tmp_path / "source", TEXTS[:9], TEXTS[9:30]), tmp_path / "out"
    tokenize(open_corpus(source, tmp_path / "cache"), "text", tokenizer, out)
    before = {file.name: file.stat().st_mtime_ns for file in out.glob("*.arrow")}
    write_source(source, TEXTS[:9], TEXTS[9:29], TEXTS[30:])
    about = tokenize(open_corpus(source, tmp_path / "cache"), "text", tokenizer, out)
    after = {file.name: file.stat().st_mtime_ns for file in out.glob("*.arrow")}
    assert [name for name in after if after[name] == before.get(name)] == [about.parts[0].name]
    assert documents_in(out, tmp_path / "cache") == [tokenizer.encode(t).tolist() for t in (*TEXTS[:29], *TEXTS[30:])]
    (source / "1.jsonl").unlink()
    tokenize(open_corpus(source, tmp_path / "cache"), "text", tokenizer, out)
    assert documents_in(out, tmp_path / "cache") == [tokenizer.encode(t).tolist() for t in (*TEXTS[:9], *TEXTS[30:])]


_KILLED = """
import sys
from pathlib import Path
from paceline.corpus import conversion
from paceline.corpus.host_files import HostFiles
from paceline.corpus.shards import Corpus
from paceline.corpus.tokenizer import Tokenizer
source, tokenizer, out, cache = map(Path, sys.argv[1:])
conversion._PART_BYTES = (10_000, 10_000)
corpus = Corpus.open([str(source)], cache=HostFiles(cache, 1 << 30))
conversion.tokenize(corpus, "text", Tokenizer.load(tokenizer), out, workers=2)
"""


def alive_in_session(session: int) -> list[int]:
    found = []
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError):
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getsid(process.pid) == session:
                found.append(process.pid)
    return found


def test_a_killed_conversion_continues_and_leaves_no_process(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source, out = write_source(tmp_path / "source", TEXTS * 400), tmp_path / "out"
    command = [sys.executable, "-c", _KILLED, str(source), str(tokenizer.path), str(out), str(tmp_path / "cache")]
    process = subprocess.Popen(command, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(list(out.glob("*.arrow"))) < 40:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    with raises(DataError, "data.tokens_unfinished", folder=out):
        read_about(out)
    kept = {file.name: file.stat().st_mtime_ns for file in out.glob("*.arrow")}
    while alive_in_session(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    subprocess.run(command, check=True, timeout=100)
    assert documents_in(out, tmp_path / "cache") == [tokenizer.encode(text).tolist() for text in TEXTS * 400]
    unchanged = [name for name, changed in kept.items() if (out / name).stat().st_mtime_ns == changed]
    assert len(unchanged) >= 20  # the last parts may be complete but not yet noted
    assert not list(out.glob(".*.arrow.*"))


def test_a_killed_worker_is_an_error_and_finished_parts_are_kept(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "_PART_BYTES", (500, 500))
    source, out = write_source(tmp_path / "source", [*TEXTS, "die here"]), tmp_path / "out"
    parent, encode = os.getpid(), Tokenizer.encode

    def dying(self: Tokenizer, text: str, *, end: bool = True) -> Any:
        if text == "die here" and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(self, text, end=end)

    monkeypatch.setattr(Tokenizer, "encode", dying)
    with raises(DataError, "data.tokenize_killed"):
        tokenize(open_corpus(source, tmp_path / "cache"), "text", tokenizer, out, workers=1)
    kept = {file.name: file.stat().st_mtime_ns for file in out.glob("*.arrow")}
    monkeypatch.undo()
    monkeypatch.setattr(conversion, "_PART_BYTES", (500, 500))
    about = tokenize(open_corpus(source, tmp_path / "cache"), "text", tokenizer, out, workers=1)
    assert len(kept) > 2
    assert kept.items() <= {file.name: file.stat().st_mtime_ns for file in out.glob("*.arrow")}.items()
    assert about.documents == 51


def test_a_folder_of_another_tokenizer_or_column_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source, out = write_source(tmp_path / "source", TEXTS), tmp_path / "out"
    tokenize(open_corpus(source, tmp_path / "cache"), "text", tokenizer, out)
    other = Tokenizer.load(save_tokenizer(tmp_path / "other", vocab=330))
    for refused, column, code in ((other, "text", "data.other_tokenizer"), (tokenizer, "id", "data.other_column")):
        with raises(DataError, code, folder=out):
            tokenize(open_corpus(source, tmp_path / "cache"), column, refused, out)
    assert len(documents_in(out, tmp_path / "cache")) == len(TEXTS)


@pytest.mark.parametrize(
    ("first", "second"),
    [("a/x", "a+x"), ("a/+x", "a+/x"), ("a~/x", "a~-x"), ("a~-x", "a+x"), (f"a/{'b' * 150}/{'c' * 150}", "a")],
)
def test_files_whose_names_look_alike_keep_all_their_documents(
    tmp_path: Path, tokenizer: Tokenizer, first: str, second: str
) -> None:
    for name, texts in ((first, TEXTS[:20]), (second, TEXTS[20:])):
        file = tmp_path / "source" / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    about = tokenize(open_corpus(tmp_path / "source", tmp_path / "cache"), "text", tokenizer, tmp_path / "out")
    found = documents_in(tmp_path / "out", tmp_path / "cache")
    assert sorted(found) == sorted(tokenizer.encode(text).tolist() for text in TEXTS)
    assert about.documents == len(TEXTS)


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = write_source(tmp_path / "source", TEXTS)
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.arrow").write_bytes(b"mine")
    with raises(DataError, "data.folder_of_others", folder=out, file="mine.arrow"):
        tokenize(open_corpus(source, tmp_path / "cache"), "text", tokenizer, out)
    assert (out / "mine.arrow").read_bytes() == b"mine"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    corpus = open_corpus(write_source(tmp_path / "source", TEXTS), tmp_path / "cache")
    for out in (tmp_path / "source" / "0.jsonl", tmp_path / "source" / "0.jsonl" / "out"):
        with raises(DataError, "data.tokens_not_written", folder=out):
            tokenize(corpus, "text", tokenizer, out)


def test_a_disk_that_gets_full_is_an_error_and_the_next_call_continues(tmp_path: Path, tokenizer: Tokenizer) -> None:
    corpus, out = open_corpus(write_source(tmp_path / "source", TEXTS * 20), tmp_path / "cache"), tmp_path / "out"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # as a full disk, but without a disk
    try:
        with raises(DataError, "data.tokens_not_written", folder=out):
            tokenize(corpus, "text", tokenizer, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    tokenize(corpus, "text", tokenizer, out)
    assert documents_in(out, tmp_path / "cache") == [tokenizer.encode(text).tolist() for text in TEXTS * 20]


def test_lost_lengths_are_made_again(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source, out = write_source(tmp_path / "source", TEXTS), tmp_path / "out"
    tokenize(open_corpus(source, tmp_path / "cache"), "text", tokenizer, out)
    content = (out / "lengths.npy").read_bytes()
    (out / "lengths.npy").unlink()
    tokenize(open_corpus(source, tmp_path / "cache"), "text", tokenizer, out)
    assert (out / "lengths.npy").read_bytes() == content


@pytest.mark.parametrize(
    ("texts", "column", "code", "row"),
    [
        (["a", "b"], "body", "data.row_without_column", 0),
        (["a", "b"], "id", "data.column_without_text", 0),
        (["a", {"b": 1}], "text", "data.column_without_text", 1),
    ],
)
def test_rows_that_are_no_text_are_named(
    tmp_path: Path, tokenizer: Tokenizer, texts: list[Any], column: str, code: str, row: int
) -> None:
    source = write_source(tmp_path / "source", texts)
    with raises(DataError, code, where=f"{source / '0.jsonl'}, row {row}"):
        tokenize(open_corpus(source, tmp_path / "cache"), column, tokenizer, tmp_path / "out", workers=1)


def test_a_source_without_text_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = write_source(tmp_path / "source", ["", None])
    with raises(DataError, "data.no_text", rows=2):
        tokenize(open_corpus(source, tmp_path / "cache"), "text", tokenizer, tmp_path / "out", workers=1)


def test_a_damaged_row_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = write_source(tmp_path / "source", TEXTS)
    content = (source / "0.jsonl").read_text().splitlines()
    content[7] = content[7][:-1]
    (source / "0.jsonl").write_text("\n".join(content))
    with raises(DataError, "data.source_damaged", shard=f"{source / '0.jsonl'}, row 7"):
        tokenize(open_corpus(source, tmp_path / "cache"), "text", tokenizer, tmp_path / "out", workers=2)


def test_two_processes_do_not_write_to_one_folder(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source, out = write_source(tmp_path / "source", TEXTS), tmp_path / "out"
    tried: list[int] = []

    def again(rows: int, found: int) -> None:
        with raises(DataError, "data.tokens_in_use", folder=out):
            tokenize(open_corpus(source, tmp_path / "cache"), "text", tokenizer, out)
        tried.append(rows)

    tokenize(open_corpus(source, tmp_path / "cache"), "text", tokenizer, out, progress=again)
    assert tried
