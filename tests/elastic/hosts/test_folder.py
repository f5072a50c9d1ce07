"""Files that ranks write on another host arrive whole, in order, and within the run's folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from paceline.elastic.hosts.files import WrittenFiles, parts_of, receive
from paceline.elastic.hosts.messages import CHUNK_BYTES, Put
from paceline.errors import LaunchError
from refusals import raises


@pytest.fixture
def there(tmp_path: Path) -> Path:
    (tmp_path / "there" / "steps").mkdir(parents=True)
    return tmp_path / "there"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


def ship(written: WrittenFiles, here: Path) -> list[str]:
    """Take in all that is new; the names, in the order in which they came."""
    parts = list(written.parts())
    for part in parts:
        receive(part, here)
    return [part.path for part in parts]


def test_lines_come_once_and_only_whole(there: Path, here: Path) -> None:
    written, file = WrittenFiles(there), there / "steps" / "rank-1.jsonl"
    file.write_bytes(b'{"step":1}\n{"st')
    ship(written, here)
    assert (here / "steps/rank-1.jsonl").read_bytes() == b'{"step":1}\n'
    with file.open("ab") as more:
        more.write(b'ep":2}\n')
    ship(written, here)
    ship(written, here)
    assert (here / "steps/rank-1.jsonl").read_bytes() == file.read_bytes()


def test_many_lines_come_in_messages_of_bounded_length(there: Path, here: Path) -> None:
    file = there / "steps" / "rank-1.jsonl"
    file.write_bytes(b"".join(b'{"step":%d}\n' % step for step in range(100_000)))
    assert len(ship(WrittenFiles(there), here)) > 2
    assert (here / "steps/rank-1.jsonl").read_bytes() == file.read_bytes()


def test_a_shard_comes_before_its_receipt_and_both_are_gone_then(there: Path, here: Path) -> None:
    partial = there / "checkpoints" / ".step-00000003.partial"
    partial.mkdir(parents=True)
    written = WrittenFiles(there)
    (partial / "rank-1.safetensors").write_bytes(bytes(range(256)) * (CHUNK_BYTES // 100))
    assert ship(written, here) == []  # without a receipt it may still be written
    content = (partial / "rank-1.safetensors").read_bytes()
    (partial / "rank-1.receipt.json").write_text("{}")
    names = ship(written, here)
    assert names[-1].endswith("rank-1.receipt.json")
    assert len(names) == 4
    assert (here / "checkpoints/.step-00000003.partial/rank-1.safetensors").read_bytes() == content
    assert list(partial.iterdir()) == []


def test_what_the_coordinator_sent_never_goes_back(there: Path, here: Path) -> None:
    written = WrittenFiles(there)
    (here / "job.yaml").write_text("name: small")
    for part in parts_of(here / "job.yaml", here):
        written.receive(part)
    assert (there / "job.yaml").read_text() == "name: small"
    (there / "result-1.json").write_text("[1]")
    assert ship(written, here) == ["result-1.json"]
    assert ship(written, here) == []


def test_an_empty_file_comes(there: Path, here: Path) -> None:
    (there / "empty").touch()
    assert ship(WrittenFiles(there), here) == ["empty"]
    assert (here / "empty").read_bytes() == b""


@pytest.mark.parametrize("name", ["../job.yaml", "/etc/passwd", "", "a/../../b", "link/x", "a\0b"])
def test_a_name_outside_of_the_folder_is_refused(name: str, here: Path, tmp_path: Path) -> None:
    (here / "link").symlink_to(tmp_path)
    with raises(LaunchError, "hosts.file_outside_run"):
        receive(Put(name, 0, b"bad", last=True), here)
    shutil.rmtree(here)
    assert sorted(path.name for path in tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_named(here: Path) -> None:
    (here / "steps").touch()  # no folder can be made there
    with raises(LaunchError, "hosts.file_unwritable"):
        receive(Put("steps/rank-1.jsonl", -1, b"{}\n", last=False), here)
