"""A run at a URL: mirrored while it trains, resumed on another machine, held by one training at a time."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path

import pytest

from commands import losses, paceline, write_job
from paceline.elastic.leadership import LOCK, Lease
from paceline.errors import RunError, StorageError
from paceline.run import object_store as upload
from paceline.run.object_store import RemoteRun, Uploader, copy_of, is_plain
from paceline.run.record.run import Run
from paceline.storage.store import Store
from refusals import raises

Lines = list[str]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket/run"


def other_machine(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """From here on the cache is another one, and with it all that this machine knows of runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


def test_a_run_is_whole_at_its_url_and_resumes_on_another_machine(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_job(tmp_path / "job.yaml")
    begun = paceline("train", job, "--plan", "dp=1", "--run", url, folder=tmp_path)
    assert begun.code == 0, begun.err
    assert begun.says(f"run          {url}")
    there = tmp_path / "bucket" / "run"
    assert (there / "checkpoints" / "step-00000006" / "manifest.json").is_file()
    assert sorted(losses(there)) == list(range(1, 7))
    assert not (there / LOCK).exists()
    assert there.stat().st_mode & 0o777 == 0o700

    again = paceline("train", job, "--plan", "dp=1", "--run", url, folder=tmp_path)
    assert "[run.url_in_use]" in again.error

    other_machine(monkeypatch, tmp_path / "other")
    more = write_job(tmp_path / "more.yaml", stop={"steps": 9})
    resumed = paceline("train", more, "--plan", "dp=1", "--run", url, "--resume", folder=tmp_path)
    assert resumed.says("fetched the checkpoint of step 6")
    assert sorted(losses(there)) == list(range(1, 10))
    assert paceline("export", url, "model.safetensors", folder=tmp_path).code == 0
    assert (tmp_path / "model.safetensors").stat().st_size > 0
    record = Run(url)
    assert sorted(record.losses) == sorted(losses(there).values())
    assert (record.url, record.job.name, record.reason) == (url, "small", "steps: 9 done")
    assert (copy := record.path).is_dir()
    del record
    assert not copy.parent.exists()


def test_what_is_no_run_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    with raises(RunError, "run.url_without_job", file="job.yaml"):
        Run(f"file://{tmp_path}/bucket")
    assert not any((tmp_path / "temporary").iterdir())


def test_what_was_set_aside_here_goes_once_the_run_has_ended_and_is_in_the_store(url: str) -> None:
    def fail() -> None:
        with RemoteRun(url, said.append, resume=False):
            raise ValueError

    said: Lines = []
    here = RemoteRun(url, said.append, resume=False).path
    old = here.with_name(f"{here.name}.old")
    here.mkdir(mode=0o700)  # by an older attempt
    with pytest.raises(ValueError):
        fail()
    assert old.is_dir()
    with RemoteRun(url, said.append, resume=False):
        assert old.is_dir()
    assert not old.exists()


class TestMirror:
    """The working directory and its mirror, without a training."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "working"
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "job.yaml").write_text("name: x\n")
        (folder / "events.jsonl").write_text('{"event": "start"}\n{"event": "cut')
        return folder

    def test_a_checkpoint_gets_its_manifest_last_and_older_ones_go_after_it(
        self, folder: Path, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        order: Lines = []
        monkeypatch.setattr(Store, "upload", noting(order, Store.upload))
        store = Store(url)
        checkpoint(folder, 1)
        assert mirrored(folder, store) == []
        shutil.rmtree(checkpoint(folder, 1))
        checkpoint(folder, 2)
        order.clear()
        assert mirrored(folder, store) == []
        assert order[-2:] == [f"checkpoints/step-00000002/{name}" for name in ("rank-0.safetensors", "manifest.json")]
        assert {name for name in store.list() if "step-00000001" in name} == set()
        assert store.read("events.jsonl", 1000) == b'{"event": "start"}\n', "no half line is sent"

    def test_a_lost_store_is_told_once_and_told_when_it_is_back(
        self, folder: Path, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(upload, "_FIRST_PAUSE_S", 0.01)
        failures, original = iter(range(3)), Store.upload

        def fails_three_times(store: Store, file: Path, name: str) -> None:
            if next(failures, None) is not None:
                raise StorageError("test.planted", "s3://x cannot be reached: no route", may_pass=True)
            original(store, file, name)

        monkeypatch.setattr(Store, "upload", fails_three_times)
        lost, back = mirrored(folder, Store(url))
        assert lost.startswith("upload: s3://x cannot be reached: no route. Training goes on;")
        assert back.startswith(f"{url} can be reached again")

    def test_what_could_not_be_sent_is_said_with_the_command_that_sends_it(
        self, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(upload, "_FIRST_PAUSE_S", 0.01)

        def fails(store: Store, file: Path, name: str) -> None:
            raise StorageError("test.planted", "gone", may_pass=True)

        with monkeypatch.context() as patch:
            patch.setattr(Store, "upload", fails)
            patch.setattr("paceline.run.object_store.PATIENCE_S", 0.2)
            run = RemoteRun(url, lambda line: None, resume=False).__enter__()
            run.path.mkdir()
            (run.path / "job.yaml").write_text("name: x\n")
            with raises(RunError, "run.files_not_uploaded"):
                run.__exit__(None, None, None)
            for thread in threading.enumerate():
                if thread.name == "run-upload":
                    thread.join(30)
        with raises(RunError, "run.not_uploaded"), RemoteRun(url, print, resume=False):
            pass
        with RemoteRun(url, lambda line: None, resume=True) as run:
            pass
        assert Store(url).read("job.yaml", 100) == b"name: x\n"

    def test_what_another_machine_has_added_replaces_what_this_one_has(
        self, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said: Lines = []
        with RemoteRun(url, said.append, resume=False) as run:
            run.path.mkdir()
            (run.path / "job.yaml").write_text("name: x\n")
            (run.path / "events.jsonl").write_text('{"event": 1}\n')
        with RemoteRun(url, said.append, resume=True):
            assert said == [], "this machine has all of it"
        Store(url).write("events.jsonl", b'{"event": 1}\n{"event": 2}\n')
        with RemoteRun(url, said.append, resume=True):
            assert (run.path / "events.jsonl").read_text().count("\n") == 2
        assert said == [f"fetching the run from {url}"]


class TestCopy:
    """Copies of what a stranger may have put at a URL."""

    @pytest.mark.slow
    def test_a_half_or_altered_checkpoint_is_left_out_and_the_one_before_is_taken(
        self, tmp_path: Path, url: str
    ) -> None:
        job = write_job(tmp_path / "job.yaml", checkpoint={"every_steps": 2})
        assert paceline("train", job, "--plan", "dp=1", "--run", "mine", folder=tmp_path).code == 0
        there = tmp_path / "bucket" / "run"
        shutil.copytree(tmp_path / "mine", there)
        shard = there / "checkpoints" / "step-00000006" / "rank-0.safetensors"
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
        (there / "checkpoints" / "step-00000008").mkdir()
        said: Lines = []
        with copy_of(url, said.append, checkpoint="newest") as run:
            assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000004"]
        assert "was altered" in said[0]

    @pytest.mark.parametrize("name", ["../x", "a/../../x", "/x", ".hidden", "a//b", "a/\x1b", ""])
    def test_a_name_that_leaves_the_folder_is_not_fetched(self, name: str) -> None:
        assert not is_plain(name)


class TestLease:
    """The right to write to a URL."""

    @pytest.fixture(autouse=True)
    def _quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Lease, "beat_s", 0.05)
        monkeypatch.setattr(Lease, "look_s", 0.05)

    def test_a_second_training_is_refused_and_told_who_trains(self, tmp_path: Path, url: str) -> None:
        store = Store(url)
        store.make()
        first = Lease(store, tmp_path / "a", print)
        with raises(RunError, "run.in_use"):
            Lease(store, tmp_path / "a", print)
        said: Lines = []
        with raises(RunError, "run.in_use"):  # another machine's, which sees it beat
            Lease(store, tmp_path / "b", said.append)
        assert "waiting up to 60 s for a sign of life" in said[0]
        first.release()
        Lease(store, tmp_path / "b", print).release()

    def test_a_dead_holder_is_replaced_at_once_on_its_host_and_after_a_while_elsewhere(
        self, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Lease, "stale_s", 0.3)
        store = Store(url)
        said: Lines = []
        store.make()
        dead = Lease(store, tmp_path / "a", print)
        content = store.read(LOCK, 4096) or b""
        dead.release()
        store.write(LOCK, content)
        (tmp_path / "a").write_bytes(content)
        Lease(store, tmp_path / "a", said.append).release()
        assert [line.split(",")[0][:20] for line in said] == ["the run was held by "]
        store.write(LOCK, content)
        said.clear()
        Lease(store, tmp_path / "b", said.append).release()
        assert [line[:20] for line in said] == ["the run is held by p", "the run was held by "]

    def test_a_training_that_was_replaced_learns_of_it_and_leaves_the_other_alone(
        self, tmp_path: Path, url: str
    ) -> None:
        store = Store(url)
        store.make()
        first = Lease(store, tmp_path / "a", print)
        taken = json.loads(store.read(LOCK, 4096) or b"") | {"token": "other", "host": "elsewhere"}
        while first.lost is None:  # it may beat just when the other writes
            store.write(LOCK, json.dumps(taken).encode())
            time.sleep(0.1)
        with raises(RunError, "run.taken_over"):
            first.check()
        first.release()
        assert b"elsewhere" in (store.read(LOCK, 4096) or b"")


def checkpoint(folder: Path, step: int) -> Path:
    """A folder that looks like a checkpoint."""
    made = folder / "checkpoints" / f"step-{step:08d}"
    made.mkdir(exist_ok=True)
    (made / "manifest.json").write_text(f"{step}")
    (made / "rank-0.safetensors").write_bytes(b"x" * 100)
    return made


def mirrored(folder: Path, store: Store) -> Lines:
    """Send all of a folder; what was said meanwhile."""
    said: Lines = []
    uploader = Uploader(folder, store, said.append)
    uploader.start()
    assert uploader.finish(60, lambda line: None).files == 0
    return said


def noting(order: Lines, upload_: object) -> object:
    """`Store.upload` that also notes the names."""

    def noted(store: Store, file: Path, name: str) -> None:
        order.append(name)
        upload_(store, file, name)  # type: ignore[operator]

    return noted
