"""Rows of files in a real S3 server: what is downloaded, when, and what a change of an object does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.servers import S3, fronted, reached_over, serving

PREPARED = """
import gzip, io, json, os, sys
from pathlib import Path
import pyarrow as pa, pyarrow.parquet as pq
from paceline.corpus.host_files import HostFiles
from paceline.corpus.rows import Damaged
from paceline.corpus.shards import Corpus
from paceline.errors import PacelineError
from paceline.storage.store import Store
store = Store("s3://bucket/data")
cache = HostFiles(Path(sys.argv[1], "cache"), 1 << 30)

def lines(*words):
    return b"".join(json.dumps({"text": word}).encode() + b"\\n" for word in words)

def parquet(*words):
    file = io.BytesIO()
    pq.write_table(pa.table({"text": list(words)}), file)
    return file.getvalue()

def texts(corpus):
    return [corpus.row(n)["text"] for n in range(len(corpus))]

def opened(*paths, **more):
    return Corpus.open([f"s3://bucket/data/{path}" for path in paths], cache=cache, **more)
"""

LINES = """
store.write("lines/a.jsonl", lines("a", "b"))
store.write("lines/deep/b.jsonl", lines("c"))
store.write("lines/.hidden.jsonl", lines("x"))
store.write("lines/README.md", b"")
store.write("packed/a.jsonl.gz", gzip.compress(lines("d", "e")))
store.write("parts/07.jsonl", lines("x"))
for n in range(8, 12):
    store.write(f"parts/{n:02}.jsonl", lines(str(n)))
names = ["lines/deep/b.jsonl", "lines/a.jsonl"]
for paths in (["lines"], ["lines/*.jsonl"], ["lines/**/*.jsonl"], names, ["packed"], ["parts/{08..11}.jsonl"]):
    print(texts(opened(*paths)))
corpus = opened("lines")
print([(shard.name, shard.rows) for shard in corpus.shards], corpus.digest == opened("lines").digest)
for paths in (["gone"], ["lines/*.tar"]):
    try:
        opened(*paths)
    except PacelineError as error:
        print(error.code)
"""

FOOTERS = """
store.write("tables/a.parquet", parquet("a", "b"))
store.write("tables/b.parquet", parquet("c"))
corpus = opened("tables")
print(corpus.starts.tolist(), [corpus.is_local(shard) for shard in range(2)])
corpus.fetch(1)
print([corpus.is_local(shard) for shard in range(2)])
child = os.fork()
if not child:
    os._exit(0 if texts(corpus.apart()) == ["a", "b", "c"] else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), texts(corpus))
"""

CHANGED = """
for name in ("a", "b", "c"):
    store.write(f"tables/{name}.parquet", parquet(name))
corpus = opened("tables")
store.write("tables/b.parquet", parquet("x"))
store.delete(["tables/c.parquet"])
for row in range(3):
    try:
        print(corpus.row(row)["text"])
    except Damaged as error:
        print(error.shard, error.row)
print(texts(opened("tables")), opened("tables").digest == corpus.digest)
"""

IMAGES = """
for place in ("dog/a.png", "cat/a.png"):
    store.write(f"photos/{place}", b"pixels")
before = opened("photos").shards
store.write("photos/dog/a.png", b"PIXELS")
after = opened("photos").shards
print([(one.size, one.digest == other.digest) for one, other in zip(before, after)])
print(opened("photos").digest == opened("photos").digest)
"""


LARGE = """
for folder, files in (("one", 1), ("four", 4)):
    for n in range(files):
        store.write(f"{folder}/{n}.parquet", parquet(*(os.urandom(300).hex() for _ in range(2000))))
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3]:
    with serving(tmp_path) as server:
        yield server


def printed(program: str, tmp_path: Path, environment: dict[str, str]) -> list[str]:
    """Run a program, whose process keeps fsspec's thread; return the lines that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", PREPARED + program, str(tmp_path)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_folders_patterns_and_objects_are_read(server: S3, tmp_path: Path) -> None:
    assert printed(LINES, tmp_path, server.environment) == [
        "['a', 'b', 'c']",
        "['a', 'b']",
        "['a', 'b', 'c']",
        "['a', 'b', 'c']",
        "['d', 'e']",
        "['8', '9', '10', '11']",
        "[('s3://bucket/data/lines/a.jsonl', 2), ('s3://bucket/data/lines/deep/b.jsonl', 1)] True",
        "data.source_missing",
        "data.pattern_unmatched",
    ]


def test_parquet_is_counted_without_a_download_and_read_in_a_forked_process(server: S3, tmp_path: Path) -> None:
    assert printed(FOOTERS, tmp_path, server.environment) == [
        "[0, 2, 3] [False, False]",
        "[False, True]",
        "0 ['a', 'b', 'c']",
    ]


def test_two_requests_index_a_large_parquet_file(server: S3, tmp_path: Path) -> None:
    printed(LARGE, tmp_path, server.environment)
    requests = {}
    for folder, rows in (("one", 2000), ("four", 8000)):
        with fronted(server, failing=0.0, latency_s=0.0) as front:
            program = f"print(len(opened('{folder}')))"
            assert printed(program, tmp_path, reached_over(front, server)) == [str(rows)]
            requests[folder] = front.requests
    assert requests["four"] - requests["one"] == 2 * 3


def test_objects_that_change_after_the_start_are_damaged(server: S3, tmp_path: Path) -> None:
    assert printed(CHANGED, tmp_path, server.environment) == [
        "a",
        "s3://bucket/data/tables/b.parquet None",
        "s3://bucket/data/tables/c.parquet None",
        "['a', 'x'] False",
    ]


def test_requests_that_fail_in_passing_are_repeated(server: S3, tmp_path: Path) -> None:
    with fronted(server, failing=0.1, latency_s=0.01) as front:
        assert printed(FOOTERS, tmp_path, reached_over(front, server))[-1] == "0 ['a', 'b', 'c']"


def test_a_remote_image_that_is_replaced_by_one_of_equal_size_changes_its_digest(server: S3, tmp_path: Path) -> None:
    assert printed(IMAGES, tmp_path, server.environment) == ["[(6, True), (6, False)]", "True"]
