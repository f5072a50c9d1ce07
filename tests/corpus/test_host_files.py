"""Processes of a host share one folder of files: made once, never torn, within the limit, whoever is killed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import multiprocessing
import os
import random
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest

from paceline.corpus.host_files import FetchAhead, HostFiles, shared_folder
from paceline.errors import StorageError

KEYS, LIMIT, SIZE = 40, 100_000, 10_000
SEEDS = 4  # processes
fork = multiprocessing.get_context("fork")


def content(key: str) -> bytes:
    """The only right content of a key, of 5,000 to 10,000 bytes."""
    seed = hashlib.sha256(key.encode()).digest()
    return seed * (SIZE // 64 + seed[0] * SIZE // 64 // 256)


def write(key: str, pause_s: float = 0.0) -> Callable[[Path], None]:
    """A `make` that writes in several parts, so that a kill can come in between."""

    def make(path: Path) -> None:
        whole = content(key)
        with path.open("xb") as file:
            for start in range(0, len(whole), 1000):
                file.write(whole[start : start + 1000])
                file.flush()
                time.sleep(pause_s)

    return make


def filled(size: int, byte: bytes = b"1") -> Callable[[Path], None]:
    """A `make` of a file of one repeated byte."""

    def make(path: Path) -> None:
        path.write_bytes(byte * size)

    return make


def read_at_random(folder: Path, seed: int, seconds: float, wrong: Path) -> None:
    """Read files in two threads; note every wrong content."""
    files = HostFiles(folder, LIMIT)

    def read(seed: int) -> None:
        draw, until = random.Random(seed), time.monotonic() + seconds
        while time.monotonic() < until:
            key = f"shard {draw.randrange(KEYS)}"
            try:
                found = files.opened(key, write(key, 0.0002), Path.read_bytes)
            except BaseException as error:  # noqa: BLE001 - the test shows it
                found = repr(error).encode()
            if found != content(key):
                wrong.open("ab").write(key.encode() + b": " + found[:200] + b"\n")

    threads = [threading.Thread(target=read, args=(10 * seed + thread,)) for thread in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def size_of(folder: Path) -> int:
    """Bytes of the deletable files at one moment: no process admits or deletes one while this holds the lock."""
    with (folder / "room").open("rb") as room:
        fcntl.flock(room, fcntl.LOCK_EX)
        return sum(file.stat().st_size for file in (folder / "files").iterdir())


@contextmanager
def running(target: Callable[..., None], *arguments: object) -> Iterator[ForkProcess]:
    process = fork.Process(target=target, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def test_nothing_is_torn_leaked_or_beyond_the_limit_when_readers_are_killed(tmp_path: Path) -> None:
    folder, wrong, draw = tmp_path / "cache", tmp_path / "wrong", random.Random(1)
    HostFiles(folder, LIMIT).path("index", write("index"), keep=True)
    HostFiles(folder, LIMIT).path("shard 0", write("shard 0"))
    readers = [fork.Process(target=read_at_random, args=(folder, seed, 6.0, wrong)) for seed in range(SEEDS)]
    for reader in readers:
        reader.start()
    largest = 0
    for seed in range(SEEDS, SEEDS + 20):
        time.sleep(draw.uniform(0.05, 0.3))
        largest = max(largest, size_of(folder))
        victim = draw.randrange(SEEDS)
        readers[victim].kill()
        readers[victim].join()
        readers[victim] = fork.Process(target=read_at_random, args=(folder, seed, 2.0, wrong))
        readers[victim].start()
    for reader in readers:
        reader.join()
        assert reader.exitcode == 0
    assert not wrong.exists(), wrong.read_text(errors="replace")
    assert 0 < largest <= LIMIT
    files = HostFiles(folder, LIMIT)
    assert size_of(folder) <= LIMIT
    assert list((folder / "making").iterdir()) == []
    assert files.has("index")
    for number in range(KEYS):
        files.path(f"shard {number}", write(f"shard {number}"))
        assert size_of(folder) <= LIMIT


def test_a_key_is_made_once_however_many_ask(tmp_path: Path) -> None:
    def ask(number: int) -> None:
        def make(path: Path) -> None:
            (tmp_path / f"made by {os.getpid()} {number} {threading.get_ident()}").touch()
            write("one", 0.01)(path)

        assert HostFiles(tmp_path / "cache", LIMIT).opened("one", make, Path.read_bytes) == content("one")

    def ask_in_threads(number: int) -> None:
        threads = [threading.Thread(target=ask, args=(10 * number + one,)) for one in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    processes = [fork.Process(target=ask_in_threads, args=(number,)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(list(tmp_path.glob("made by *"))) == 1


def stop_while_making(folder: Path, key: str) -> None:
    def make(path: Path) -> None:
        path.write_bytes(b"half")
        (folder.parent / "begun").touch()
        time.sleep(60)

    HostFiles(folder, LIMIT).path(key, make)


@pytest.mark.parametrize("wanted", ["the same", "another"])
def test_a_killed_maker_blocks_no_other_process_and_leaves_no_file(tmp_path: Path, wanted: str) -> None:
    with running(stop_while_making, tmp_path / "cache", "the same"):
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
    files = HostFiles(tmp_path / "cache", LIMIT)
    assert not files.has("the same")
    assert files.opened(wanted, write(wanted), Path.read_bytes) == content(wanted)
    assert list((tmp_path / "cache" / "making").iterdir()) == []


def test_the_lock_of_a_killed_maker_does_not_live_on_in_its_forked_child(tmp_path: Path) -> None:
    def fork_while_making(path: Path) -> None:
        if (child := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        (tmp_path / "child").write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)

    def make_and_die() -> None:
        HostFiles(tmp_path / "cache", LIMIT).path("key", fork_while_making)

    with running(make_and_die) as process:
        process.join()
    child = int((tmp_path / "child").read_text())
    try:
        assert HostFiles(tmp_path / "cache", LIMIT).opened("key", write("key"), Path.read_bytes) == content("key")
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)


def test_the_least_recently_used_file_goes_first_and_an_open_one_stays_readable(tmp_path: Path) -> None:
    files = HostFiles(tmp_path / "cache", 3 * 100)
    for key in "abc":
        files.path(key, filled(100, key.encode()))
    with files.opened("b", write("b"), lambda path: path.open("rb")) as open_file:
        files.path("a", write("a"))
        files.path("d", filled(100, b"d"))
        assert [key for key in "abcd" if files.has(key)] == ["a", "b", "d"]
        files.path("e", filled(200, b"e"))
        assert [key for key in "abcde" if files.has(key)] == ["d", "e"]
        assert open_file.read() == b"b" * 100


def test_a_file_larger_than_the_limit_can_be_read_alone(tmp_path: Path) -> None:
    files = HostFiles(tmp_path / "cache", 10)
    assert files.opened("large", write("large"), Path.read_bytes) == content("large")
    files.path("small", filled(1, b"1"))
    assert not files.has("large")


def test_a_file_that_is_deleted_before_it_is_open_is_made_again(tmp_path: Path) -> None:
    files, deleted = HostFiles(tmp_path / "cache", LIMIT), list[Path]()

    def open_late(path: Path) -> bytes:
        if len(deleted) < 2:
            path.unlink()
            deleted.append(path)
        return path.read_bytes()

    assert files.opened("key", write("key"), open_late) == content("key")


def test_a_change_of_recency_keeps_the_modification_time(tmp_path: Path) -> None:
    files = HostFiles(tmp_path / "cache", LIMIT)
    before = files.path("key", write("key")).stat().st_mtime_ns
    assert files.path("key", write("key")).stat().st_mtime_ns == before


def test_an_error_of_the_maker_reaches_the_caller_and_leaves_nothing(tmp_path: Path) -> None:
    files = HostFiles(tmp_path / "cache", LIMIT)

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise ValueError("the source is broken")

    with pytest.raises(ValueError, match="the source is broken"):
        files.path("key", fail)
    assert not files.has("key")
    assert list((tmp_path / "cache" / "making").iterdir()) == []


def test_a_full_disk_is_an_error_with_a_code(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with pytest.raises(StorageError) as caught:
        HostFiles(tmp_path / "cache", LIMIT).path("key", fail)
    assert (caught.value.code, caught.value.fields["folder"]) == ("storage.disk_full", str(tmp_path / "cache"))


def test_the_folder_is_private_and_a_file_in_its_place_is_an_error_with_a_code(tmp_path: Path) -> None:
    HostFiles(tmp_path / "cache", LIMIT).path("key", write("key"))
    assert {stat.S_IMODE(one.stat().st_mode) for one in (tmp_path, *tmp_path.rglob("*")) if one.is_dir()} == {0o700}
    (tmp_path / "file").touch()
    with pytest.raises(StorageError) as caught:
        HostFiles(tmp_path / "file", LIMIT)
    assert caught.value.code == "storage.folder_unusable"


def document(folder: Path) -> None:
    """Complete a folder of one file."""
    folder.mkdir(exist_ok=True)
    (folder / "file").write_bytes(b"1" * SIZE)


def use(home: Path, key: str, opened: Any, end: Any) -> None:
    """Use a folder until the parent allows the end."""
    shared_folder(home, key, SIZE, document)
    opened.set()
    end.wait(60)


def test_a_folder_that_a_process_uses_is_kept_until_the_process_ends(tmp_path: Path) -> None:
    def folders() -> set[str]:
        return {folder.name for folder in tmp_path.iterdir() if folder.is_dir()}

    opened, end = fork.Event(), fork.Event()
    user = fork.Process(target=use, args=(tmp_path, "used", opened, end))
    user.start()
    assert opened.wait(60)
    (used,) = folders()
    for key in ("old", "new", "newest"):  # each process ends before the next one begins
        other = fork.Process(target=use, args=(tmp_path, key, opened, opened))
        other.start()
        other.join(60)
        assert other.exitcode == 0
        assert len(folders()) == 2
        assert used in folders()
    assert user.pid is not None
    os.kill(user.pid, signal.SIGKILL)
    user.join(60)
    last = shared_folder(tmp_path, "last", SIZE, document)
    assert folders() == {last.name}
    assert (last / "file").stat().st_size == SIZE
    assert len(list(tmp_path.glob("*.lock"))) == 1


def test_the_least_recently_used_folder_is_deleted(tmp_path: Path) -> None:
    def used(key: str, limit: int = 3 * SIZE) -> str:
        with fork.Pool(1) as pool:
            return str(pool.apply(shared_folder, (tmp_path, key, limit, document)))

    first, second, third = map(used, "abc")
    assert used("a") == first
    fourth = used("d")
    assert {str(folder) for folder in tmp_path.iterdir() if folder.is_dir()} == {first, third, fourth}
    assert used("b") == second


class Fetched:
    """A `fetch` that waits for permission, and fails for some shards."""

    def __init__(self, *broken: int) -> None:
        self.broken, self.began, self.allowed = broken, list[int](), threading.Semaphore(0)

    def __call__(self, shard: int) -> None:
        self.began.append(shard)
        assert self.allowed.acquire(timeout=30)
        if shard in self.broken:
            raise StorageError("storage.unreachable", "{url}", url=f"s3://bucket/{shard}", may_pass=True)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_shards_are_fetched_in_the_order_of_need_and_a_new_list_replaces_the_old_one() -> None:
    fetch = Fetched()
    ahead = FetchAhead(fetch, threads=2)
    try:
        ahead.want([7, 3, 5, 1])
        until(lambda: len(fetch.began) == 2)
        ahead.want([3, 8, 9])
        fetch.allowed.release(10)
        until(lambda: len(fetch.began) == 4)
    finally:
        fetch.allowed.release(10)
        ahead.close()
    assert (set(fetch.began[:2]), set(fetch.began[2:])) == ({7, 3}, {8, 9})


def test_an_error_of_a_fetch_is_kept_until_the_shard_is_fetched() -> None:
    fetch = Fetched(2)
    fetch.allowed.release(100)
    ahead = FetchAhead(fetch, threads=2)
    try:
        ahead.want([1, 2, 3])
        until(lambda: len(fetch.began) == 3 and set(ahead.errors) == {2})
        fetch.broken = ()
        ahead.want([2])
        until(lambda: len(fetch.began) == 4 and not ahead.errors)
    finally:
        ahead.close()


def test_close_ends_all_threads_and_a_later_wish_starts_new_ones() -> None:
    fetch = Fetched()
    fetch.allowed.release(100)
    ahead = FetchAhead(fetch)
    ahead.want(range(20))
    ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "fetch-ahead"]
    ahead.want([99])
    until(lambda: 99 in fetch.began)
    ahead.close()


def test_a_forked_child_starts_threads_of_its_own(tmp_path: Path) -> None:
    fetch = Fetched()
    ahead = FetchAhead(fetch, threads=1)

    def in_child() -> None:
        fetch.allowed = threading.Semaphore(100)
        ahead.want([5])
        until(lambda: fetch.began == [1, 5])
        ahead.close()
        (tmp_path / "fetched").touch()

    try:
        ahead.want([1])
        until(lambda: fetch.began == [1])
        with running(in_child) as child:
            child.join(60)
        assert (tmp_path / "fetched").exists()
    finally:
        fetch.allowed.release(10)
        ahead.close()
