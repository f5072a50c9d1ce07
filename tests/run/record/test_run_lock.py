"""A run directory has one training at a time, and who wants it as well is told who has it."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from paceline.elastic.leadership import LOCK, Holder, RunLock
from paceline.errors import RunError
from refusals import raises


@contextmanager
def held_by_a_child(run: Path, *, heir: bool = False) -> Iterator[int]:
    """The lock is held by a forked process.

    With `heir`, by a child of it that inherited the descriptor after it was killed.
    """
    ready, tell = os.pipe()
    go, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        RunLock(run)
        if heir and os.fork():
            signal.pause()
        os.write(tell, b"x")
        os.read(go, 1)
        os._exit(0)
    os.close(go)
    try:
        assert os.read(ready, 1) == b"x"
        if heir:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        yield child
    finally:
        for fd in (end, ready, tell):
            os.close(fd)
        os.waitpid(-1 if heir else child, 0)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunLock, "beat_s", 0.02)
    monkeypatch.setattr(RunLock, "stale_s", 0.5)
    monkeypatch.setattr(RunLock, "fence_s", 0.5)


def of_another_host(run: Path, **changes: Any) -> Holder:
    """Write the lock as a process of another host would have."""
    other = replace(Holder.this_process(), host="elsewhere", machine="another boot", pid=77, **changes)
    fd = os.open(run / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, os.pwrite(fd, json.dumps(asdict(other)).encode(), 0))  # never empty, as a lock is written
    os.close(fd)
    return other


def test_a_run_that_a_living_process_has_is_refused_and_its_holder_named(tmp_path: Path) -> None:
    with (
        held_by_a_child(tmp_path) as child,
        raises(RunError, "run.in_use"),
    ):
        RunLock(tmp_path)
    said: list[str] = []
    with RunLock(tmp_path, said.append):
        assert f"held by process {child}" in said[0]
        assert "taken over" in said[0]


def test_a_run_is_free_again_after_its_end_without_a_word(tmp_path: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        with RunLock(tmp_path, said.append), raises(RunError, "run.in_use"):
            RunLock(tmp_path)
    assert not said


def test_ranks_that_outlive_a_killed_launcher_still_have_its_run(tmp_path: Path) -> None:
    with (
        held_by_a_child(tmp_path, heir=True),
        raises(RunError, "run.in_use"),
    ):
        RunLock(tmp_path)


@pytest.mark.usefixtures("fast")
def test_a_holder_on_another_host_is_dead_when_its_heart_no_longer_beats(tmp_path: Path) -> None:
    of_another_host(tmp_path)
    said: list[str] = []
    with RunLock(tmp_path, said.append) as lock:
        assert "held by process 77 on host elsewhere" in said[0]
        assert "taken over" in said[1]
        assert Holder.parse((tmp_path / LOCK).read_bytes()) == lock.own


def test_a_lost_holder_on_another_host_is_not_waited_for_once_its_kernel_says_that_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunLock, "fence_s", 1e6)
    monkeypatch.setattr(RunLock, "give_up_s", 1e6)
    of_another_host(tmp_path)
    with RunLock(tmp_path, succeeds=True, has_ended=lambda: True) as lock:
        assert Holder.parse((tmp_path / LOCK).read_bytes()) == lock.own


@pytest.mark.usefixtures("fast")
def test_a_holder_on_another_host_whose_heart_beats_is_refused(tmp_path: Path) -> None:
    of_another_host(tmp_path)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.01):
            os.utime(tmp_path / LOCK)

    heart = threading.Thread(target=beat)
    heart.start()
    try:
        with raises(RunError, "run.in_use"):
            RunLock(tmp_path)
    finally:
        ended.set()
        heart.join()


@pytest.mark.usefixtures("fast")
def test_a_process_whose_run_was_taken_over_learns_of_it_and_leaves_the_new_holder_alone(tmp_path: Path) -> None:
    lost = threading.Event()
    with RunLock(tmp_path, on_lost=lambda error: lost.set()) as lock:
        lock.check()
        other = of_another_host(tmp_path)
        assert lost.wait(20)
        with raises(RunError, "run.taken_over"):
            lock.check()
    assert Holder.parse((tmp_path / LOCK).read_bytes()) == other


class Heartless(RunLock):
    """A lock whose holder learns only by `check` of what happens to it."""

    def _keep_alive(self) -> None:
        return


@pytest.mark.usefixtures("fast")
def test_hosts_that_have_lost_a_stopped_holder_take_its_run_and_it_learns_that_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        heartless = Heartless(tmp_path)
        os.write(tell, b"x")
        while heartless.lost is None:
            with suppress(RunError):
                heartless.check()
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"x"
        os.kill(child, signal.SIGSTOP)
        monkeypatch.setattr(RunLock, "beat_s", 60.0)  # the kernel's lock, once free, is not taken within this test
        said: list[str] = []
        with RunLock(tmp_path, said.append, succeeds=True) as lock:
            assert f"held by process {child}" in said[0]
            os.kill(child, signal.SIGCONT)
            assert os.waitpid(child, 0)[1] == 0
            lock.check()  # still this process's: a third one finds its name, and the kernel's lock free
            with raises(RunError, "run.in_use"):
                RunLock(tmp_path)
    finally:
        for fd in (ready, tell):
            os.close(fd)


@pytest.mark.usefixtures("fast")
def test_a_lost_holder_that_lives_keeps_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunLock, "give_up_s", 0.5)
    monkeypatch.setattr(RunLock, "fence_s", 20.0)
    with (
        held_by_a_child(tmp_path) as child,
        raises(RunError, "run.in_use", holder=re.compile(f"^process {child} ")),
    ):
        RunLock(tmp_path, succeeds=True)


@pytest.mark.usefixtures("fast")
def test_the_run_of_a_lost_holder_waits_for_the_ranks_that_still_save(tmp_path: Path) -> None:
    with held_by_a_child(tmp_path, heir=True):
        taken = threading.Thread(target=lambda: RunLock(tmp_path, succeeds=True).release())
        taken.start()
        taken.join(1.0)  # longer than without a sign of life from a holder
        assert taken.is_alive()
    taken.join(20)
    assert not taken.is_alive()


@pytest.mark.parametrize("content", [b"", b"\x00\xff", b"[]", b'{"host": 3}', b"[" * 3000, b'{"pid": 1}'])
def test_what_is_no_lock_holds_nobody_out(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOCK).write_bytes(content)
    with RunLock(tmp_path):
        pass


def test_the_lock_of_a_run_is_never_taken_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / LOCK).symlink_to("mine")
    with raises(RunError, "run.directory_unwritable"):
        RunLock(tmp_path)
    assert (tmp_path / "mine").read_text() == "mine"
