"""Data files that a job names by URL: fetched whole, once for each version, into a private cache."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from commands import paceline, write_job
from paceline.errors import DataError, JobError, StorageError
from paceline.files import cache_folder
from paceline.job.data import Arrays, Text
from paceline.job.job import Job
from paceline.storage import store as data
from paceline.storage.store import Store
from paceline.storage.url import DATA_VERSIONS
from refusals import raises


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is treated as an object store elsewhere: its files are fetched."""
    monkeypatch.setattr(data, "local_path", lambda url: None)
    monkeypatch.setattr("paceline.job.data.local_path", lambda url: None)
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


def test_a_jobs_url_is_recorded_and_its_copy_is_read(bucket: Path, tmp_path: Path) -> None:
    np.savez(bucket / "points.npz", x=np.arange(40.0).reshape(20, 2), y=np.arange(20) % 2)
    url = f"file://{bucket}/points.npz"
    job = Job.load(write_job(tmp_path / "job.yaml", data={"kind": "arrays", "path": url}))
    assert job.model_dump(mode="json")["data"]["path"] == url
    (tmp_path / "again.yaml").write_text(job.to_yaml())
    assert Job.load(tmp_path / "again.yaml") == job
    job.data.fetch()
    (bucket / "points.npz").unlink()
    assert len(job.data.build(input_shape=None, seed=0).train) == 18  # type: ignore[arg-type]
    with raises(DataError, "storage.absent", url=url):
        job.data.fetch()


def test_a_job_at_a_url_takes_relative_paths_from_the_current_folder(
    bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.job.job.local_path", lambda url: None)
    monkeypatch.chdir(tmp_path)
    write_job(bucket / "job.yaml", data={"kind": "text", "path": "corpus.txt"})
    job = Job.load(f"file://{bucket}/job.yaml")
    assert job.data.path == (tmp_path / "corpus.txt",)  # type: ignore[union-attr]
    write_job(bucket / "wrong.yaml", seeed=1)
    with raises(JobError, "file.unknown_key", key="seeed"):
        Job.load(f"file://{bucket}/wrong.yaml")
    with raises(StorageError, "storage.absent"):
        Job.load(f"file://{bucket}/none.yaml")


def test_weights_at_a_url_are_fetched_and_their_version_is_kept(bucket: Path, tmp_path: Path) -> None:
    url = f"file://{bucket}/weights.safetensors"
    job = Job.load(write_job(tmp_path / "job.yaml", model={"zoo": "mlp", "weights": url}))
    assert job.model_dump(mode="json")["model"]["weights"] == url
    with raises(JobError, "model.weights_invalid"):
        job.fetch()
    (bucket / "weights.safetensors").write_bytes(b"weights")
    assert url in job.fetch()[DATA_VERSIONS]
    assert data.at_hand(url).read_bytes() == b"weights"


def test_commands_that_read_files_alone_say_so_of_a_url(tmp_path: Path) -> None:
    for command in (["plan"], ["submit", "--on", "slurm"]):
        told = paceline(command[0], "s3://bucket/job.yaml", *command[1:], folder=tmp_path, columns=200)
        assert told.says("a job at a URL is read by train, check and bench alone")


def test_a_folder_is_fetched_whole_and_a_changed_one_anew(bucket: Path) -> None:
    said: list[str] = []
    for name in ("a.txt", "below/b.txt"):
        (bucket / name).parent.mkdir(exist_ok=True)
        (bucket / name).write_text(name)
    first = data.fetched(f"file://{bucket}", said.append)
    assert sorted(path.name for path in first.rglob("*.txt")) == ["a.txt", "b.txt"]
    assert data.fetched(f"file://{bucket}", said.append) == first
    assert sum(line.endswith("MB)") for line in said) == 1, "nothing is fetched twice"
    (bucket / "a.txt").write_text("other")
    second = data.fetched(f"file://{bucket}", said.append)
    assert (second / "a.txt").read_text() == "other"
    assert (first / "a.txt").read_text() == "a.txt", "a run that reads it goes on"
    assert data.at_hand(f"file://{bucket}") == second
    assert cache_folder().stat().st_mode & 0o777 == 0o700


def test_versions_that_no_run_began_with_for_a_month_go_when_a_new_one_is_fetched(bucket: Path) -> None:
    copies = []
    for name in ("unused", "used"):
        (bucket / "a.txt").write_text(name)
        copies.append(data.fetched(f"file://{bucket}", lambda line: None).parent)
    half = copies[0].with_name(f".{copies[0].name}")
    half.mkdir()
    for folder in (*copies, half):
        os.utime(folder, (0, 0))
    data.at_hand(f"file://{bucket}")
    (bucket / "a.txt").write_text("a third one")
    data.fetched(f"file://{bucket}", lambda line: None)
    assert [folder.exists() for folder in (*copies, half)] == [False, True, False]


def test_a_download_that_was_cut_short_does_not_count_and_is_gone_on_with(
    bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (bucket / name).write_text(name)
    original = Store.fetch

    def is_cut(store: Store, name: str, into: Path, *arguments: object, **options: object) -> object:
        if name == "b":
            into.write_text("half")
            raise StorageError("test.planted", "cut", may_pass=True)
        return original(store, name, into, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(data, "_AT_ONCE", 1)
    monkeypatch.setattr(Store, "fetch", is_cut)
    with raises(StorageError, "test.planted"):
        data.fetched(f"file://{bucket}", lambda line: None)
    fetched: list[str] = []

    def noted(store: Store, name: str, into: Path, *arguments: object, **options: object) -> object:
        fetched.append(name)
        return original(store, name, into, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "fetch", noted)
    place = data.at_hand(f"file://{bucket}", lambda line: None)
    assert (place / "b").read_text() == "b"
    assert fetched == ["b"]


def test_a_host_that_would_read_another_version_than_the_run_began_with_refuses_it(
    bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bucket / "a.txt").write_text("a" * 1000)
    text = Text(kind="text", path=[f"file://{bucket}/a.txt"])
    for name, version in text.fetch().items():
        monkeypatch.setenv(name, version)
    (bucket / "a.txt").write_text("b" * 1000)
    data.fetched(f"file://{bucket}/a.txt")  # another run of this host
    assert text.build(input_shape=None, seed=0).train[0][0][0] == ord("a")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other host"))
    with raises(DataError, "storage.changed_since_start"):
        text.build(input_shape=None, seed=0)


def test_ranks_that_ask_at_once_fetch_once(bucket: Path) -> None:
    (bucket / "a").write_text("a")
    said: list[str] = []
    asking = [threading.Thread(target=data.fetched, args=(f"file://{bucket}/a", said.append)) for _ in range(4)]
    for one in asking:
        one.start()
    for one in asking:
        one.join(60)
    assert sum(line.endswith("MB)") for line in said) == 1


def test_a_file_that_changes_under_the_download_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("before")

    def change(_: int) -> None:
        (tmp_path / "a").write_text("after it was asked for")

    with raises(StorageError, "storage.object_changed"):
        Store(f"file://{tmp_path}").fetch("a", tmp_path / "copy", change)
    assert not (tmp_path / "copy").exists()


def test_a_disk_that_is_too_small_is_told_before_the_download(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bucket / "a").write_text("a" * 100)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with raises(StorageError, "storage.no_room"):
        data.fetched(f"file://{bucket}/a", lambda line: None)


def test_a_local_url_is_read_where_it_is(tmp_path: Path) -> None:
    assert Arrays(kind="arrays", path=f"file://{tmp_path}/x.npz").path == tmp_path / "x.npz"


def test_a_url_with_a_secret_is_refused_with_its_line(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", data={"kind": "text", "path": ["s3://key:secret@bucket/x"]})
    outcome = paceline("train", job, folder=tmp_path)
    assert "line 9: data.path[0]: s3://bucket/x: " in outcome.error
    assert "[storage.url_with_user]" in outcome.error
    assert "secret@" not in outcome.error


def test_several_urls_of_one_job_are_each_fetched(bucket: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (bucket / name).write_text(name * 1000)
    text = Text(kind="text", path=[f"file://{bucket}/a.txt", f"file://{bucket}/b.txt"])
    assert text.build(input_shape=None, seed=0).train is not None
