"""Each format gives the rows that the field's own library reads, and refuses damaged files with a reason."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from corpus.mds_shards import mds_shard
from paceline.corpus.formats import FORMATS, decompress, format_of, suffix_of
from paceline.corpus.rows import Damaged
from paceline.errors import DataError
from refusals import raises


def rows_of(path: Path, name: str, scratch: Path | None = None) -> list[dict[str, Any]]:
    """Index a file and read all of its rows."""
    kind = FORMATS[name]
    if kind.prepare is not None:
        copy = (scratch or path.parent) / f"{path.name}.copy"
        copy.unlink(missing_ok=True)
        kind.prepare(path, copy, ())
        path = copy
    index = kind.index(path)
    rows = kind.open(path, None if isinstance(index, int) else index)
    try:
        assert len(rows) == (index if isinstance(index, int) else len(index) - 1)
        return [rows[n] for n in range(len(rows))]
    finally:
        rows.close()


def same(found: Any, expected: Any) -> bool:
    """Compare rows whose lists may be arrays."""
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and set(found) == set(expected)
            and all(same(found[key], expected[key]) for key in expected)
        )
    if isinstance(expected, list | np.ndarray):
        return len(found) == len(expected) and all(same(a, b) for a, b in zip(found, expected, strict=True))
    return bool(found == expected) or (found != found and expected != expected)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.dictionaries(st.text(max_size=8), JSON, max_size=4), max_size=6),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)
def test_json_lines_are_the_objects_that_python_reads(
    tmp_path_factory: pytest.TempPathFactory, objects: list[dict[str, Any]], end: str, blank: bool
) -> None:
    file = tmp_path_factory.mktemp("rows") / "a.jsonl"
    lines = (json.dumps(each, ensure_ascii=blank) for each in objects)
    file.write_bytes(((end if blank else "") + (end * (1 + blank)).join(lines)).encode())
    assert rows_of(file, "jsonl") == objects


@pytest.mark.parametrize(
    ("content", "row"),
    [
        (b'{"a": 1}\n{"a": \n', 1),
        (b'{"a": 1}\n\n{"a": "\xff"}', 1),
        (b"[1, 2]\n", 0),
        (b'{"a": 1}\n7', 1),
        (b'{"a": 1}\n{"a": 1} {"a": 2}\n', 1),
        (b"\xef\xbb\xbf{]\n", 0),
    ],
)
def test_a_line_that_is_no_json_object_is_named_with_its_row(tmp_path: Path, content: bytes, row: int) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(Damaged) as caught:
        rows_of(tmp_path / "a.jsonl", "jsonl")
    assert (caught.value.shard, caught.value.row) == (str(tmp_path / "a.jsonl"), row)


def test_long_files_of_lines_are_indexed_over_all_chunks(tmp_path: Path) -> None:
    lines = ["x" * (n * 7919 % 5000) for n in range(3000)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    assert [row["text"] for row in rows_of(tmp_path / "a.txt", "lines")] == lines


def test_a_text_file_is_one_row_or_one_row_per_line(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\n\ntwo \xc3\xa9\n")
    assert rows_of(file, "lines") == [{"text": "one"}, {"text": ""}, {"text": "two é"}]
    assert rows_of(file, "text") == [{"text": "one\r\n\ntwo é\n"}]
    file.write_bytes(b"one\n\xff")
    for name, row in (("lines", 1), ("text", 0)):
        with pytest.raises(Damaged) as caught:
            rows_of(file, name)
        assert caught.value.row == row


COLUMNS: dict[str, Any] = {
    "tokens": pa.array([[1, 2, 3], [], None, [4]], pa.list_(pa.int32())),
    "large": pa.array([[1], None, [2, 3], []], pa.large_list(pa.uint16())),
    "fixed": pa.array([[1.5, 2], [3, 4], [5, 6], [7, 8]], pa.list_(pa.float32(), 2)),
    "half": pa.array(np.arange(4, dtype=np.float16)),
    "text": ["a", None, "", "é"],
    "large_text": pa.array(["x", "yy", None, ""], pa.large_string()),
    "raw": [b"\0\1", b"", None, b"\xff"],
    "flag": [True, False, None, True],
    "number": pa.array([1, -2, None, 2**62]),
    "small": pa.array([1, 255, 0, 7], pa.uint8()),
    "nothing": pa.nulls(4),
    "nested": [[[1, 2], []], None, [], [[3]]],
    "gaps": [[1, None], [None], [], [2]],
    "words": [["a", "b"], [], None, [""]],
    "image": [{"bytes": b"1", "path": "p"}, {"bytes": None, "path": ""}, None, {"bytes": b"", "path": None}],
    "of_objects": [[{"x": 1}], [], None, [{"x": 2}, {"x": None}]],
    "day": pa.array([0, 1, None, 3], pa.date32()),
    "kind": pa.array(["u", "v", None, "u"]).dictionary_encode(),
    "view": pa.array(["short", "a string of more than twelve bytes", None, ""], pa.string_view()),
}


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("write", [pa.ipc.new_stream, pa.ipc.new_file])
def test_arrow_rows_of_every_type_are_those_of_pyarrow(tmp_path: Path, write: Callable[..., Any], rows: int) -> None:
    table = pa.table(COLUMNS)
    with write(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table, rows)
        writer.write_table(table.slice(1, 2))
    found = rows_of(tmp_path / "a.arrow", "arrow")
    expected = [*table.to_pylist(), *table.slice(1, 2).to_pylist()]
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))
    assert found[0]["tokens"].dtype == np.int32
    found[0]["tokens"][0] = 7  # a row shares no memory with its file
    assert rows_of(tmp_path / "a.arrow", "arrow")[0]["tokens"][0] == 1


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "text": st.none() | st.text(),
                "tokens": st.none() | st.lists(st.integers(0, 2**31 - 1)),
                "deep": st.none() | st.lists(st.none() | st.lists(st.none() | st.floats(allow_nan=False))),
                "raw": st.binary(),
            }
        )
    ),
    st.integers(1, 5),
)
def test_arrow_rows_survive_a_round_trip(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], batch: int
) -> None:
    schema = pa.schema(
        [
            ("text", pa.string()),
            ("tokens", pa.list_(pa.int32())),
            ("deep", pa.list_(pa.list_(pa.float64()))),
            ("raw", pa.binary()),
        ]
    )
    file = tmp_path_factory.mktemp("rows") / "a.arrow"
    with pa.ipc.new_file(str(file), schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema), batch)
    assert all(same(a, b) for a, b in zip(rows_of(file, "arrow"), rows, strict=True))


def test_parquet_is_converted_and_counted_by_its_footer(tmp_path: Path) -> None:
    table = pa.table({name: column for name, column in COLUMNS.items() if name not in ("half", "view")})
    pa.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    assert all(same(a, b) for a, b in zip(rows_of(tmp_path / "a.parquet", "parquet"), table.to_pylist(), strict=True))
    count = FORMATS["parquet"].count
    assert count is not None
    with open(tmp_path / "a.parquet", "rb") as file:
        assert count(file) == 4


def test_csv_rows_are_those_of_pyarrow(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,text,score\n1,"two\nlines, and ""quotes""",0.5\n2,é,\n')
    expected = [
        {"id": 1, "text": 'two\nlines, and "quotes"', "score": 0.5},
        {"id": 2, "text": "é", "score": None},
    ]
    assert rows_of(tmp_path / "a.csv", "csv") == expected


def write_arrow(path: Path, compression: str | None = None) -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(str(path), pa.schema([("t", pa.list_(pa.int64()))]), options=options) as writer:
        writer.write_batch(pa.record_batch({"t": [list(range(1000))] * 10}))


@pytest.mark.parametrize(("suffix", "left"), [*product(["arrow", "parquet"], [0, 0.5, 0.99]), ("csv", 0)])
def test_tables_that_are_cut_off_are_damaged(tmp_path: Path, suffix: str, left: float) -> None:
    file = tmp_path / f"a.{suffix}"
    if suffix == "arrow":
        write_arrow(file)
    elif suffix == "parquet":
        pa.parquet.write_table(pa.table({"t": list(range(10_000))}), file)
    else:
        file.write_text('a,b\n1,"' + "x" * 1000)
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * left)])
    with pytest.raises(Damaged):
        rows_of(file, suffix)


def test_a_compressed_arrow_file_is_refused_with_a_reason(tmp_path: Path) -> None:
    write_arrow(tmp_path / "a.arrow", "zstd")
    with pytest.raises(Damaged, match="compress"):
        rows_of(tmp_path / "a.arrow", "arrow")


def write_tar(path: Path, members: dict[str, bytes], **how: Any) -> None:
    with tarfile.open(path, "w", **how) as tar:
        for name, content in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))


@pytest.mark.parametrize("layout", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_with_one_key_are_a_row(tmp_path: Path, layout: int) -> None:
    folder = "a/very/long/folder/" * (5 if layout == tarfile.USTAR_FORMAT else 12)
    array = io.BytesIO()
    np.save(array, np.arange(6).reshape(2, 3))
    members = {
        "__meta__/x.txt": b"no data",
        "without_suffix": b"no data",
        f"{folder}é.JPG": b"\xff\xd8" * 700,
        f"{folder}é.cls": b"3\n",
        "b.seg.png": b"",
        "b.json": b'{"x": [1, "\xc3\xa9"]}',
        "b.txt": "é".encode(),
        "b.npy": array.getvalue(),
        "b.pkl": b"1",
        "dir.with.dots/c.cls": b"0",
    }
    write_tar(tmp_path / "a.tar", members, format=layout)
    with tarfile.open(tmp_path / "a.tar", "a", format=layout) as tar:
        tar.addfile(tarfile.TarInfo("d.txt"))
        link = tarfile.TarInfo("e.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "d.txt"
        tar.addfile(link)
    rows = rows_of(tmp_path / "a.tar", "tar")
    expected: list[dict[str, Any]] = [
        {"__key__": f"{folder}é", "jpg": b"\xff\xd8" * 700, "cls": 3},
        {
            "__key__": "b",
            "seg.png": b"",
            "json": {"x": [1, "é"]},
            "txt": "é",
            "npy": [[0, 1, 2], [3, 4, 5]],
            "pkl": b"1",
        },
        {"__key__": "dir.with.dots/c", "cls": 0},
        {"__key__": "d", "txt": ""},
    ]
    assert all(same(a, b) for a, b in zip(rows, expected, strict=True))


def test_an_empty_tar_has_no_rows(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {})
    assert rows_of(tmp_path / "a.tar", "tar") == []


@pytest.mark.parametrize(
    ("members", "row"),
    [
        ({"a.txt": b"1", "b.txt": b"\xff"}, 1),
        ({"a.cls": b"1", "b.cls": b"two"}, 1),
        ({"a.json": b"{"}, 0),
        ({"a.TXT": b"1", "a.txt": b"1"}, 0),
        ({"a.npy": b"\x93NUMPY\1\0"}, 0),
    ],
)
def test_a_member_that_cannot_be_decoded_is_named_with_its_row(
    tmp_path: Path, members: dict[str, bytes], row: int
) -> None:
    write_tar(tmp_path / "a.tar", members)
    with pytest.raises(Damaged) as caught:
        rows_of(tmp_path / "a.tar", "tar")
    assert caught.value.row == row


def test_a_tar_that_is_cut_off_or_overwritten_is_damaged(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"a.jpg": b"1" * 600, "b.jpg": b"2" * 600})
    whole = (tmp_path / "a.tar").read_bytes()
    for content in (whole[:2500], whole[:1600], b"x" * 600 + whole[600:], whole[:1536] + b"x" * 512 + whole[2048:]):
        (tmp_path / "a.tar").write_bytes(content)
        with pytest.raises(Damaged):
            rows_of(tmp_path / "a.tar", "tar")


def test_mds_columns_of_every_encoding_are_decoded(tmp_path: Path) -> None:
    picture = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(2, 2, 3))
    raw = np.array([2, 2, 3], np.uint32).tobytes() + b"RGB" + picture.tobytes()
    cells: list[tuple[str, int | None, bytes, Any]] = [
        ("bytes", None, b"\0\1", b"\0\1"),
        ("str", None, "é".encode(), "é"),
        ("int", 8, np.int64(-5).tobytes(), -5),
        *((name, np.dtype(name).itemsize, np.dtype(name).type(3).tobytes(), 3) for name in ("int8", "uint16", "int64")),
        *((name, np.dtype(name).itemsize, np.dtype(name).type(0.5).tobytes(), 0.5) for name in ("float16", "float64")),
        ("str_int", None, b"123", 123),
        ("str_float", None, b"1.5", 1.5),
        ("json", None, b'{"a": [1]}', {"a": [1]}),
        ("jpeg", None, b"\xff\xd8", b"\xff\xd8"),
        ("png", None, b"\x89PNG", b"\x89PNG"),
        ("pil", None, raw, np.asarray(picture)),
        ("ndarray", None, bytes([33, 2 << 2, 1, 2]) + np.array([[7, 8]], np.int32).tobytes(), [[7, 8]]),
        (
            "ndarray:int16",
            None,
            bytes([1 << 2 | 1]) + np.uint16(2).tobytes() + np.array([7, 8], np.int16).tobytes(),
            [7, 8],
        ),
        ("ndarray:float32:2,1", 8, np.array([[1], [2]], np.float32).tobytes(), [[1], [2]]),
    ]
    columns = [(f"{n:02} {encoding}", encoding, size) for n, (encoding, size, _, _) in enumerate(cells)]
    (tmp_path / "shard.00000.mds").write_bytes(mds_shard(columns, [[cell[2] for cell in cells]] * 3))
    rows = rows_of(tmp_path / "shard.00000.mds", "mds")
    assert len(rows) == 3
    expected = {name: cell[3] for (name, _, _), cell in zip(columns, cells, strict=True)}
    assert all(same(row, expected) for row in rows)
    count = FORMATS["mds"].count
    assert count is not None
    with open(tmp_path / "shard.00000.mds", "rb") as file:
        assert count(file) == 3


def test_damaged_and_pickled_mds_shards_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.mds"
    good = mds_shard([("s", "str", None)], [[b"one"], [b"two"]])
    pickled = mds_shard([("s", "pkl", None)], [[b"one"]])
    broken = good.replace(b"\x03\0\0\0two", b"\x02\0\0\0two")
    assert broken != good
    for content in (b"", good[:10], good[:-1], good + b"x", pickled, broken, good.replace(b"two", b"\xff\xff\xff")):
        file.write_bytes(content)
        with pytest.raises(Damaged):
            rows_of(file, "mds")
    file.write_bytes(good)
    assert rows_of(file, "mds") == [{"s": "one"}, {"s": "two"}]


def zstandard(content: bytes) -> bytes:
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, "zstd") as stream:
        stream.write(content)
    return bytes(out.getvalue().to_pybytes())


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard,
}


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_compressed_files_of_several_parts_are_decompressed_and_damaged_ones_refused(
    tmp_path: Path, suffix: str
) -> None:
    content = b"".join(b"%d\n" % n for n in range(100_000))
    file = tmp_path / f"a.txt{suffix}"
    packed = COMPRESSIONS[suffix](content)
    file.write_bytes(packed + packed)
    decompress(file, file.name, tmp_path / "plain")
    assert (tmp_path / "plain").read_bytes() == content + content
    for nth, broken in enumerate((packed[: len(packed) // 2], b"no such file")):
        file.write_bytes(broken)
        with pytest.raises(Damaged):
            decompress(file, file.name, tmp_path / f"broken{nth}")


def test_the_suffix_chooses_the_format() -> None:
    names = {"a/b.JSONL.gz": "jsonl", "x.v1.tar": "tar", "x.tgz": "tar", "a.mds.zstd": "mds", "p.parquet": "parquet"}
    assert {name: format_of([name, "README.md", "LICENSE"], "folder").name for name in names} == names
    assert suffix_of("folder.jsonl/README") == ""
    with raises(DataError, "data.formats_mixed"):
        format_of(["a.jsonl", "b.tar"], "folder")
    with raises(DataError, "data.formats_mixed", formats="text and lines"):
        format_of(["a.txt"], "folder")
    with raises(DataError, "data.format_unrecognized", source="folder"):
        format_of(["a.data"], "folder")
