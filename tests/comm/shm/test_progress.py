"""A wait ends: with the result, soon after a rank it waits for is gone, or at the deadline.

Meanwhile it leaves the cores to others.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.comm import Group
from paceline.comm.operation import Operation, Steps
from paceline.comm.shm.collectives import MAIL_BYTES
from paceline.comm.shm.segment import create
from paceline.errors import SyncError
from paceline.shared_words import futex_wait, futex_wake, publish
from ranks import Backend, RankError, Ranks

LARGE = 3_000_000


def world(deadline_s: float = 60) -> Group:
    backend = dist.new_group(backend=dist.get_backend(), timeout=timedelta(seconds=deadline_s))
    return Group(dist.get_rank(), dist.get_world_size(), backend, deadline_s=deadline_s)


def small(group: Group) -> None:
    group.all_reduce(torch.zeros(4))


def in_place(group: Group) -> None:
    if not hasattr(group, "shared"):
        group.shared = group.empty(LARGE, torch.float32)  # type: ignore[attr-defined]
    group.all_reduce(group.shared)  # type: ignore[attr-defined]


def through_slots(group: Group) -> None:
    group.all_reduce(torch.zeros(LARGE))


def from_its_root(group: Group) -> None:
    group.broadcast(torch.zeros(LARGE), root=1)


def in_the_background(group: Group) -> None:
    pending = group.start_all_reduce(torch.zeros(LARGE))
    time.sleep(0.01)
    pending.wait()


def killed_while(call: Callable[[Group], None], asleep: bool, folder: Path) -> None:
    """Rank 1 is killed while all ranks make the call repeatedly, or while the others sleep."""
    group = world()
    call(group)
    if group.rank == 1 and asleep:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank == 1:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            call(group)
    except SyncError as error:
        (folder / f"error-{group.rank}").write_text(str(error))
    try:
        group.barrier()
    except SyncError as error:
        (folder / f"again-{group.rank}").write_text(str(error))


@pytest.mark.parametrize(
    ("backend", "call", "asleep"),
    [
        *[("shm", call, False) for call in (small, in_place, through_slots, from_its_root, in_the_background)],
        # All that wait sleep in one of two places: a main thread's call, and the thread of those started.
        *[("shm", call, True) for call in (small, in_the_background)],
        ("tcp", through_slots, False),
    ],
    ids=lambda value: value.__name__ if callable(value) else value,
)
def test_a_killed_rank_is_named_by_all_others(
    ranks: Ranks, backend: Backend, call: Callable[[Group], None], asleep: bool, tmp_path: Path
) -> None:
    with pytest.raises(RankError, match=r"rank 1 .* was killed by SIGKILL"):  # and the others came to an end
        ranks(3, killed_while, call, asleep, tmp_path, backend=backend)
    for rank in (0, 2):
        error = (tmp_path / f"error-{rank}").read_text()
        assert re.search(rf"rank {rank} waited|its host answers rank [02] ", error), error
        assert re.search(r"rank 1 \(pid \d+\) has ended|rank 1 \(host .+, 127.0.0.1\) is gone \(pid \d+\)", error), (
            error
        )
        assert (
            "this group cannot be used any more, because of an earlier error: "
            in (tmp_path / f"again-{rank}").read_text()
        )


def lost_messages(direction: str, folder: Path) -> None:
    """Rank 1 is killed before or while it sends, or before it receives."""
    if dist.get_rank() == 1:
        if direction == "middle":
            dist.isend(torch.zeros(5 * MAIL_BYTES), 0)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if direction == "to it":
            dist.send(torch.zeros(2 * MAIL_BYTES), 1)
        elif direction == "from any":
            dist.recv(torch.zeros(1))
        else:
            if direction == "middle":
                time.sleep(0.8)
            dist.recv(torch.zeros(5 * MAIL_BYTES), 1)
    except RuntimeError as error:
        (folder / "error").write_text(str(error))


@pytest.mark.parametrize("direction", ["from it", "middle", "to it", "from any"])
def test_a_killed_rank_is_named_by_who_waits_for_a_message(ranks: Ranks, direction: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 1 .* was killed by SIGKILL"):
        ranks(2, lost_messages, direction, tmp_path, backend="shm")
    assert re.search(r"rank 1 \(pid \d+\) has ended", (tmp_path / "error").read_text())


def left(folder: Path) -> None:
    group = world()
    if group.rank == 1:
        os._exit(0)
    try:
        group.barrier()
    except SyncError as error:
        (folder / f"error-{group.rank}").write_text(str(error))


def test_a_rank_that_ends_well_but_too_early_is_named(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1 ended with exit code 0 before it returned a result"):
        ranks(3, left, tmp_path, backend="shm")
    for rank in (0, 2):
        assert re.search(r"rank 1 \(pid \d+\) has ended", (tmp_path / f"error-{rank}").read_text())


def stopped() -> str:
    """Rank 1 is stopped; rank 0 lets it go on after the error."""
    group = world(deadline_s=1)
    pids = group.gather_json(os.getpid())
    error = ""
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        try:
            small(group)
        except SyncError as caught:
            error = str(caught)
    if group.rank == 0:
        os.kill(pids[1], signal.SIGCONT)
    dist.barrier()
    return error


def test_a_stopped_rank_is_named_at_the_deadline(ranks: Ranks) -> None:
    first, _, third = ranks(3, stopped, backend="shm")
    for error in (first, third):
        assert re.search(r"timeout after \d+\.\d s, waiting: rank 1 \(pid \d+\)", error), error
        assert "raise deadline_s" in error


def cpu_times(wait_s: float) -> float:
    """The processor time that this rank took while one of them let the others wait."""
    group = world()
    group.barrier()
    before = time.process_time()
    if group.rank == 0:
        time.sleep(wait_s)
    group.barrier()
    return time.process_time() - before


def test_ranks_that_wait_leave_their_cores_to_others(ranks: Ranks) -> None:
    for rank, used_s in enumerate(ranks(4, cpu_times, 2.0, backend="shm")):
        assert used_s < 0.2 * 2.0, f"rank {rank} burnt {used_s:.2f} s while it waited for 2 s"


def with_many_open_files() -> float:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    group = world()
    if group.rank == 0:
        time.sleep(0.5)  # the other looks whether this one lives
    tensor = torch.ones(1)
    group.all_reduce(tensor)
    for file in files:
        os.close(file)
    return tensor.item()


def test_a_process_with_more_than_a_thousand_open_files_can_wait(ranks: Ranks) -> None:
    assert ranks(2, with_many_open_files, backend="shm") == [2.0, 2.0]


def test_a_call_that_is_interrupted_is_no_result() -> None:
    """Ctrl-C in the middle of it; who catches that must not take the tensor for the sum."""

    def steps() -> Steps:
        raise KeyboardInterrupt
        yield

    operation = Operation("all_reduce", steps(), 10, list)
    with pytest.raises(KeyboardInterrupt):
        operation.advance()
    assert operation.advance()
    assert "all_reduce was interrupted by KeyboardInterrupt" in str(operation.error)


LEAVES = """
import sys, torch, torch.distributed as dist
import paceline.comm.shm

rank = int(sys.argv[1])
dist.init_process_group("shm", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
works = [dist.all_reduce(torch.zeros(300_000), async_op=True) for _ in range(50)]
works[0].wait()
"""


def test_a_process_that_ends_with_calls_under_way_ends_well(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEAVES]
    started = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE) for rank in range(2)
    ]
    errors = [process.communicate(timeout=60)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], errors


def test_a_word_that_has_changed_already_is_not_waited_for() -> None:
    own = create(64, "test")
    try:
        own.segment.words()[0] = 7
        futex_wait(own.segment.address, 6, timeout_s=60)  # else pytest's own deadline ends it
    finally:
        own.close_descriptor()


def test_a_sleep_ends_with_its_time() -> None:
    own = create(64, "test")
    try:
        futex_wait(own.segment.address, 0, timeout_s=0.01)
    finally:
        own.close_descriptor()


def test_another_process_wakes_a_sleeper() -> None:
    own = create(64, "test")
    try:
        words = own.segment.words()
        child = os.fork()
        if child == 0:  # a bare process: no Python cleanup, no test
            while words[1] == 0:
                os.sched_yield()
            publish(words, 0, 1)
            futex_wake(own.segment.address)
            os._exit(0)
        sleeper = threading.Thread(target=futex_wait, args=(own.segment.address, 0, 60.0))
        sleeper.start()
        words[1] = 1
        sleeper.join(30)
        woken = not sleeper.is_alive()
        os.waitpid(child, 0)
        assert woken
    finally:
        own.close_descriptor()
