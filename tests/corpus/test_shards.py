"""The files of a data set become one list of rows, which is the same on each host and at each start."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import resource
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from corpus.mds_shards import mds_shard
from paceline.corpus.formats import FORMATS
from paceline.corpus.host_files import HostFiles
from paceline.corpus.rows import Damaged
from paceline.corpus.shard_files import ShardFiles
from paceline.corpus.shards import Corpus
from paceline.errors import DataError
from refusals import raises


@pytest.fixture
def cache(tmp_path: Path) -> HostFiles:
    return HostFiles(tmp_path / "cache", 1 << 30)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def texts(corpus: Corpus) -> list[Any]:
    return [corpus.row(n)["text"] for n in range(len(corpus))]


def write_lines(file: Path, *words: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in words))


def write_arrow(file: Path, *words: str) -> None:
    with pa.ipc.new_stream(str(file), pa.schema([("text", pa.string())])) as writer:
        writer.write_batch(pa.record_batch({"text": list(words)}))


def write_tar(file: Path, *words: str) -> None:
    with tarfile.open(file, "w") as tar:
        for n, text in enumerate(words):
            about = tarfile.TarInfo(f"{n}.text")
            about.size = len(text)
            tar.addfile(about, io.BytesIO(text.encode()))


def write_compressed(file: Path, *words: str) -> None:
    write_lines(file.with_suffix(""), *words)
    file.write_bytes(gzip.compress(file.with_suffix("").read_bytes()))
    file.with_suffix("").unlink()


WRITERS: dict[str, Callable[..., None]] = {
    "jsonl": write_lines,
    "jsonl.gz": write_compressed,
    "arrow": write_arrow,
    "tar": write_tar,
    "parquet": lambda file, *words: pa.parquet.write_table(pa.table({"text": list(words)}), file),
    "csv": lambda file, *words: file.write_text("\n".join(["text", *words])),
}


@pytest.mark.parametrize("suffix", WRITERS)
def test_rows_are_numbered_over_all_files_in_the_order_of_their_names(
    folder: Path, cache: HostFiles, suffix: str
) -> None:
    for name, words in (("b", "cde"), ("a", "ab"), ("c", "f")):
        WRITERS[suffix](folder / f"{name}.{suffix}", *words)
    corpus = Corpus.open([str(folder)], cache=cache)
    assert texts(corpus) == list("abcdef")
    assert corpus.starts.tolist() == [0, 2, 5, 6]
    assert [Path(shard.name).name for shard in corpus.shards] == [f"{name}.{suffix}" for name in "abc"]
    assert [(shard.rows, shard.size) for shard in corpus.shards] == [
        (rows, (folder / f"{name}.{suffix}").stat().st_size) for name, rows in zip("abc", (2, 3, 1), strict=True)
    ]
    assert [corpus.shard_of(row) for row in range(6)] == [0, 0, 1, 1, 1, 2]
    for row in (-1, 6):
        with pytest.raises(IndexError):
            corpus.row(row)
    again = Corpus.open([str(folder / "*")], cache=cache)
    assert (again.digest, texts(again.apart())) == (corpus.digest, list("abcdef"))


def test_files_that_need_a_copy_are_local_once_they_are_fetched(folder: Path, tmp_path: Path, cache: HostFiles) -> None:
    WRITERS["parquet"](folder / "a.parquet", "a")
    corpus = Corpus.open([str(folder)], cache=cache)
    assert not corpus.is_local(0)
    corpus.fetch(0)
    assert corpus.is_local(0)
    assert texts(corpus) == ["a"]
    write_lines(folder / "plain" / "b.jsonl", "b")
    assert Corpus.open([str(folder / "plain")], cache=cache).is_local(0)


def test_an_unchanged_corpus_is_not_scanned_again(
    folder: Path, cache: HostFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        write_lines(folder / f"{name}.jsonl", name)
    Corpus.open([str(folder)], cache=cache)
    scanned: list[str] = []
    original = FORMATS["jsonl"]

    def index(path: Path) -> Any:
        scanned.append(path.name)
        return original.index(path)

    monkeypatch.setitem(FORMATS, "jsonl", replace(original, index=index))
    Corpus.open([str(folder)], cache=cache)
    assert scanned == []
    write_lines(folder / "b.jsonl", "b", "b")
    assert len(Corpus.open([str(folder)], cache=cache)) == 4
    assert scanned == ["b.jsonl"]


def test_many_files_are_read_at_random_with_few_open(folder: Path, cache: HostFiles) -> None:
    for n in range(300):
        write_lines(folder / f"{n:03}.jsonl", f"{n}a", f"{n}b")
    corpus = Corpus.open([str(folder)], cache=cache)
    rows = list(range(600))
    random.Random(0).shuffle(rows)
    assert [corpus.row(row)["text"] for row in rows] == [f"{row // 2}{'ab'[row % 2]}" for row in rows]
    assert len(os.listdir("/proc/self/fd")) < 290
    corpus.close()


@pytest.mark.parametrize("suffix", ["jsonl", "arrow", "tar", "parquet"])
def test_a_file_that_changes_after_the_start_is_damaged(folder: Path, cache: HostFiles, suffix: str) -> None:
    file = folder / f"a.{suffix}"
    WRITERS[suffix](file, "one", "two")
    corpus = Corpus.open([str(folder)], cache=cache)
    before = file.read_bytes()
    for change in (lambda: os.utime(file, ns=(0, 0)), lambda: file.write_bytes(before[:-1])):
        change()
        with pytest.raises(Damaged) as caught:
            corpus.row(0)
        assert caught.value.shard == str(file)
    file.unlink()
    with pytest.raises(Damaged) as caught:
        corpus.row(0)
    assert (caught.value.shard, caught.value.row) == (str(file), None)


def test_a_file_that_is_cut_while_it_is_open_is_damaged(folder: Path, cache: HostFiles) -> None:
    write_lines(folder / "a.jsonl", "one", "two")
    corpus = Corpus.open([str(folder)], cache=cache)
    assert corpus.row(0) == {"text": "one"}
    os.truncate(folder / "a.jsonl", 20)
    with pytest.raises(Damaged) as caught:
        corpus.row(1)
    assert (caught.value.shard, caught.value.row) == (str(folder / "a.jsonl"), 1)


def test_the_digest_changes_with_the_content_and_not_with_the_place(folder: Path, cache: HostFiles) -> None:
    write_lines(folder / "x" / "a.jsonl", "one", "two")
    write_lines(folder / "y" / "a.jsonl", "one", "two")
    write_lines(folder / "z" / "a.jsonl", "one", "tow")
    digests = [Corpus.open([str(folder / name)], cache=cache).digest for name in "xyz"]
    assert digests[0] == digests[1] != digests[2]


def test_damaged_files_stop_the_start_or_are_left_out_with_a_reason(folder: Path, cache: HostFiles) -> None:
    write_tar(folder / "a.tar", "one")
    write_tar(folder / "c.tar", "two")
    (folder / "b.tar").write_bytes((folder / "a.tar").read_bytes()[:700] + b"x" * 9000)
    for _ in range(2):
        with raises(DataError, "data.shard_damaged", shard=str(folder / "b.tar"), count=1, total=3):
            Corpus.open([str(folder)], cache=cache)
        corpus = Corpus.open([str(folder)], cache=cache, on_bad_shard="skip")
        assert texts(corpus) == ["one", "two"]
        assert [name for name, _ in corpus.left_out] == [str(folder / "b.tar")]
    write_tar(folder / "b.tar", "mended")
    assert texts(Corpus.open([str(folder)], cache=cache)) == ["one", "mended", "two"]


def test_a_file_that_could_not_be_read_is_tried_again_at_the_next_start(
    folder: Path, cache: HostFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(folder / "a.jsonl", "one")
    write_lines(folder / "b.jsonl", "two")
    read = ShardFiles.index

    def fails(files: ShardFiles, shard: int) -> Any:
        if shard:
            raise Damaged("b.jsonl", None, "the file cannot be read: Input/output error")
        return read(files, shard)

    with monkeypatch.context() as patch:
        patch.setattr(ShardFiles, "index", fails)
        assert texts(Corpus.open([str(folder)], cache=cache, on_bad_shard="skip")) == ["one"]
    assert texts(Corpus.open([str(folder)], cache=cache, on_bad_shard="skip")) == ["one", "two"]


def test_a_lack_of_descriptors_is_no_damage(folder: Path, cache: HostFiles) -> None:
    write_lines(folder / "a.jsonl", "one")
    corpus = Corpus.open([str(folder)], cache=cache)
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, allowed[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            corpus.row(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
    assert texts(corpus) == ["one"]


def test_sources_without_rows_are_refused(folder: Path, cache: HostFiles) -> None:
    (folder / "a.jsonl").touch()
    (folder / "empty").mkdir()
    with raises(DataError, "data.no_rows", source=str(folder)):
        Corpus.open([str(folder)], cache=cache)
    for paths, code in (
        ([], "data.no_source"),
        ([str(folder / "gone")], "data.source_missing"),
        ([str(folder / "*.tar")], "data.pattern_unmatched"),
        ([str(folder / "empty")], "data.format_unrecognized"),
    ):
        with raises(DataError, code):
            Corpus.open(paths, cache=cache)
    with raises(DataError, "data.folder_without_files", suffixes=".tar"):
        Corpus.open([str(folder)], format="tar", cache=cache)
    with raises(DataError, "data.format_unknown", name="jsonlines"):
        Corpus.open([str(folder)], format="jsonlines", cache=cache)


def test_folders_of_several_formats_need_a_format(folder: Path, cache: HostFiles) -> None:
    write_lines(folder / "a.jsonl", "one")
    write_tar(folder / "a.tar", "two")
    (folder / "README.md").write_text("no data")
    (folder / ".hidden.csv").write_text("no data")
    with raises(DataError, "data.formats_mixed", source=str(folder)):
        Corpus.open([str(folder)], cache=cache)
    assert texts(Corpus.open([str(folder)], format="tar", cache=cache)) == ["two"]
    (folder / "rows").write_text('{"text": "three"}')
    with raises(DataError, "data.format_unrecognized"):
        Corpus.open([str(folder / "rows")], cache=cache)
    with raises(DataError, "data.suffix_unknown", file=str(folder / "rows")):
        Corpus.open([str(folder / "*.jsonl"), str(folder / "rows")], cache=cache)
    both = [str(folder / "*.jsonl"), f"file://{folder}/rows", str(folder / "a.jsonl")]
    assert texts(Corpus.open(both, format="jsonl", cache=cache)) == ["one", "three"]


def test_ranges_in_braces_are_files(folder: Path, cache: HostFiles) -> None:
    for n in range(8, 12):
        write_lines(folder / f"{n % 2}" / f"{n:03}.jsonl", str(n))
    found = Corpus.open([f"{folder}/0/{{008..008}}.jsonl", f"{folder}/{{1..1}}/*"], cache=cache)
    assert texts(found) == ["8", "9", "11"]
    with raises(DataError, "data.source_missing", path=str(folder / "0" / "009.jsonl")):
        Corpus.open([f"{folder}/{{0..1}}/{{008..011}}.jsonl"], cache=cache)


def test_a_folder_saved_by_datasets_is_read_by_its_description(folder: Path, cache: HostFiles) -> None:
    write_arrow(folder / "data-00000-of-00001.arrow", "one")
    write_arrow(folder / "cache-1234.arrow", "no part of it")
    (folder / "dataset_info.json").write_text("{}")
    state: dict[str, Any] = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
    (folder / "state.json").write_text(json.dumps(state))
    assert texts(Corpus.open([str(folder)], cache=cache)) == ["one"]
    (folder / "state.json").write_text(json.dumps(state | {"_indices_data_files": [{"filename": "indices.arrow"}]}))
    with raises(DataError, "data.rows_selected", folder=str(folder)):
        Corpus.open([str(folder)], cache=cache)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "gone.arrow"}]}))
    with raises(DataError, "data.shard_missing", name="gone.arrow"):
        Corpus.open([str(folder)], cache=cache)
    (folder / "state.json").write_text("{")
    with raises(DataError, "data.description_invalid", file=str(folder / "state.json")):
        Corpus.open([str(folder)], cache=cache)
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with raises(DataError, "data.split_unnamed", first="train"):
        Corpus.open([str(folder)], cache=cache)


def test_a_folder_of_mds_shards_is_read_by_its_index(folder: Path, cache: HostFiles) -> None:
    shards = []
    for n, words in enumerate((["a", "b"], ["c"], ["d"])):
        content = mds_shard([("text", "str", None)], [[word.encode()] for word in words])
        raw, packed = f"shard.{n:05}.mds", f"shard.{n:05}.mds.gz"
        if n != 1:
            (folder / raw).write_bytes(content)
        if n != 2:
            (folder / packed).write_bytes(gzip.compress(content))
        shards.append({"raw_data": {"basename": raw}, "zip_data": {"basename": packed}, "samples": len(words)})
    (folder / "shard.00009.mds").write_bytes(b"no part of it")
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    corpus = Corpus.open([str(folder)], cache=cache)
    assert texts(corpus) == list("abcd")
    assert [Path(shard.name).suffix for shard in corpus.shards] == [".mds", ".gz", ".mds"]
    shards[0]["samples"] = 3
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    with pytest.raises(Damaged):
        Corpus.open([str(folder)], cache=cache).row(0)
    (folder / "shard.00002.mds").unlink()
    with raises(DataError, "data.shard_missing", folder=str(folder)):
        Corpus.open([str(folder)], cache=cache)


def test_the_folders_of_images_are_the_classes(folder: Path, cache: HostFiles) -> None:
    for name, content in (("dog/a.png", b"1"), ("cat/deep/b.JPG", b"2"), ("cat/a.jpg", b"3")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    corpus = Corpus.open([str(folder)], cache=cache)
    assert corpus.classes == ("cat", "dog")
    assert [corpus.row(n) for n in range(3)] == [
        {"image": b"3", "label": 0},
        {"image": b"2", "label": 0},
        {"image": b"1", "label": 1},
    ]
    (folder / "dog/a.png").write_bytes(b"changed")
    with pytest.raises(Damaged):
        corpus.apart().row(2)
    (folder / "c.png").touch()
    with raises(DataError, "data.image_without_class", file=str(folder / "c.png")):
        Corpus.open([str(folder)], cache=cache)


def test_a_forked_process_reads_through_a_corpus_of_its_parent(folder: Path, cache: HostFiles) -> None:
    write_lines(folder / "a.jsonl", "one", "two")
    corpus = Corpus.open([str(folder)], cache=cache)
    assert corpus.row(0) == {"text": "one"}
    child = os.fork()
    if not child:
        os._exit(0 if texts(corpus) == ["one", "two"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert texts(corpus) == ["one", "two"]


def test_an_image_that_is_replaced_by_one_of_equal_size_changes_the_digest(folder: Path, cache: HostFiles) -> None:
    content = {place: bytes(range(256)) * 100 for place in ("x/dog/a.png", "x/cat/a.png", "y/dog/a.png", "y/cat/a.png")}
    for place, pixels in content.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_bytes(pixels)
    os.utime(folder / "y/dog/a.png", (1, 1))
    before, copy = (Corpus.open([str(folder / name)], cache=cache) for name in "xy")
    assert before.digest == copy.digest, "modification times do not count"
    changed = content["y/dog/a.png"][:-1] + b"!"
    (folder / "y/dog/a.png").write_bytes(changed)
    after = Corpus.open([str(folder / "y")], cache=cache)
    assert after.digest != copy.digest
    same = [shard.digest == now.digest for shard, now in zip(copy.shards, after.shards, strict=True)]
    assert same == [True, False]


@pytest.mark.parametrize("suffix", ["parquet", "csv", "csv.gz"])
def test_only_the_columns_that_samples_need_are_converted(suffix: str, folder: Path, tmp_path: Path) -> None:
    table = pa.table({f"c{n}": [float(n + row) for row in range(1000)] for n in range(50)})
    file = folder / f"a.{suffix}"
    if suffix == "parquet":
        pa.parquet.write_table(table, file)
    else:
        with pa.output_stream(file) as out:
            pyarrow.csv.write_csv(table, out)
    sizes: dict[tuple[str, ...], tuple[int, int]] = {}
    for columns in ((), ("c7", "c3"), ("c7",), ("c7", "absent")):
        cache = HostFiles(tmp_path / str(len(sizes)), 1 << 30)
        corpus = Corpus.open([str(folder)], cache=cache, columns=columns)
        row = corpus.row(5)
        assert row["c7"] == 12.0
        sizes[columns] = len(row), sum(each.stat().st_size for each in cache.folder.rglob("files/*"))
    assert [number for number, _ in sizes.values()] == [50, 2, 1, 50]
    assert sizes["c7", "c3"][1] < sizes[()][1] / 10


def test_jobs_that_need_different_columns_have_copies_of_their_own(folder: Path, cache: HostFiles) -> None:
    pa.parquet.write_table(pa.table({"a": [1, 2], "b": [3, 4]}), folder / "a.parquet")
    rows = [Corpus.open([str(folder)], cache=cache, columns=columns).row(1) for columns in (("a",), ("b",), ())]
    assert rows == [{"a": 2}, {"b": 4}, {"a": 2, "b": 4}]
