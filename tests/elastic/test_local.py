"""Ranks are started, watched and ended as real processes."""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from forked import python
from paceline.elastic import membership
from paceline.elastic.attempt import Launched, launch
from paceline.elastic.failure import state_of
from paceline.elastic.place import on_this_machine
from paceline.elastic.rank import Launcher
from paceline.elastic.ranks import Setting
from paceline.errors import LaunchError

WHAT = Path(__file__).with_name("what_ranks_do.py")


def run(what: str, *arguments: object, ranks: int = 2, deadline_s: float = 60, **settings: Any) -> Launched:
    """Launch a function of what_ranks_do.py."""
    watched = {name: settings.pop(name) for name in ("restarts", "on_tick", "on_event") if name in settings}
    places = on_this_machine(ranks)
    return launch(
        Setting([f"{WHAT}:{what}", *map(str, arguments)], places, deadline_s=deadline_s, **settings), **watched
    )


def failure(what: str, *arguments: object, **settings: Any) -> str:
    """The text of the failure that launching the function ends with."""
    with pytest.raises(LaunchError) as caught:
        run(what, *arguments, **settings)
    return str(caught.value)


LAUNCHER = """
import sys
from paceline.errors import LaunchError
from paceline.elastic.attempt import launch
from paceline.elastic.place import on_this_machine
from paceline.elastic.ranks import Setting
try:
    {call}
except LaunchError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


@contextmanager
def launcher(
    what: str, folder: Path, stderr: int = subprocess.PIPE, *, fork: bool = True
) -> Iterator[subprocess.Popen[str]]:
    """A process that launches two ranks of the function, once both have said that they are ready."""
    call = f"launch(Setting([{f'{WHAT}:{what}'!r}, {str(folder)!r}], on_this_machine(2)))"
    code = LAUNCHER.format(call=call)
    environment = {"TMPDIR": str(folder), "PACELINE_FORK": str(int(fork))}
    with python(code, environment, stderr=stderr) as process:
        try:
            wait_until(lambda: all((folder / f"ready-{rank}").exists() for rank in range(2)))
            yield process
        finally:
            process.kill()


def wait_until(condition: Callable[[], bool], deadline_s: float = 30) -> None:
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def are_gone(folder: Path) -> bool:
    """Whether the ranks that were ready have ended."""
    pids = [int(file.read_text()) for file in folder.glob("ready-*")]
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


# A launch that succeeds


def test_every_rank_finds_its_place_its_threads_and_the_rendezvous_in_its_environment(tmp_path: Path) -> None:
    assert run("tell", tmp_path, ranks=3, threads=5, env={"PACELINE_DEVICE": "cpu"}) == Launched(
        attempts=1, stopped_by=None
    )
    told = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(3)]
    for rank, environment in enumerate(t["environment"] for t in told):
        assert (environment["RANK"], environment["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (environment["WORLD_SIZE"], environment["LOCAL_WORLD_SIZE"]) == ("3", "3")
        assert (environment["OMP_NUM_THREADS"], environment["MKL_NUM_THREADS"]) == ("5", "5")
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert environment["PACELINE_DEVICE"] == "cpu"
        assert environment["MASTER_PORT"] == "0", "no port is opened"
    assert len({t["environment"]["PACELINE_STORE"] for t in told}) == 1


def test_a_port_that_was_asked_for_is_rank_0s_for_torchs_own_store(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    run("tell", tmp_path, port=port)
    told = [json.loads((tmp_path / f"rank-{rank}.json").read_text())["environment"] for rank in range(2)]
    assert [environment["MASTER_PORT"] for environment in told] == [str(port)] * 2
    assert ["PACELINE_STORE_FD" in environment for environment in told] == [True, False]


def test_a_rank_keeps_the_memory_that_it_frees_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_FORK", "0")  # a forkserver of this environment would cost more
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "4096")
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    for own in (None, "glibc.malloc.arena_max=2"):
        if own:
            monkeypatch.setenv("GLIBC_TUNABLES", own)
        run("tell", tmp_path, ranks=1)
        environment = json.loads((tmp_path / "rank-0.json").read_text())["environment"]
        assert environment["MALLOC_TRIM_THRESHOLD_"] == "4096"
        assert int(environment["MALLOC_MMAP_THRESHOLD_"]) >= 2**20
        assert environment["GLIBC_TUNABLES"] == (own or "glibc.malloc.hugetlb=1")


def test_a_rank_that_is_an_interpreter_runs_on_its_own_cores_before_torch_could_count_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_FORK", "0")
    core = min(os.sched_getaffinity(0))
    run("tell", tmp_path, ranks=1, pin_cores=[[core]])
    told = json.loads((tmp_path / "rank-0.json").read_text())
    assert told["cores"] == [core]
    assert not told["torch"]


def test_cores_that_do_not_exist_are_an_error_that_lists_those_there_are() -> None:
    text = failure("vanish_with_code_5", ranks=1, pin_cores=[[4095]])
    assert "rank 0 cannot be pinned to cores 4095" in text
    assert str(min(os.sched_getaffinity(0))) in text


def test_ranks_of_one_machine_listen_on_no_port(tmp_path: Path) -> None:
    run("list_listeners", tmp_path)
    assert [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)] == [[], []]


def test_it_ticks_while_the_ranks_run_and_changes_no_signal_for_good(tmp_path: Path) -> None:
    ticks: list[None] = []
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run("tell", tmp_path, on_tick=lambda: ticks.append(None))
    assert ticks
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_it_can_be_called_outside_the_main_thread(tmp_path: Path) -> None:
    thread = threading.Thread(target=run, args=("tell", tmp_path))
    thread.start()
    thread.join(60)
    assert (tmp_path / "rank-1.json").exists()


def test_what_a_rank_started_ends_with_it(tmp_path: Path) -> None:
    run("leave_a_child_behind", tmp_path, ranks=1)
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def test_no_file_stays_open_after_an_attempt(tmp_path: Path) -> None:
    run("tell", tmp_path)
    before = sorted(os.listdir("/proc/self/fd"))
    run("tell", tmp_path)
    failure("vanish_with_code_5", restarts=1)
    with pytest.raises(LaunchError):
        run("tell", tmp_path, port=70_000)
    assert sorted(os.listdir("/proc/self/fd")) == before


# A rank that fails


def test_the_first_traceback_is_shown_and_the_others_are_stopped() -> None:
    text = failure("raise_on_rank_1")
    first, *rest = text.splitlines()
    assert first.startswith(f"rank 1 (host {socket.gethostname()}, pid ")
    assert first.endswith(") raised and the other ranks were stopped: ValueError: expected labels in 0..9, found 11")
    assert "what_ranks_do.py" in "".join(rest)
    assert "elastic/rank.py" not in text


@pytest.mark.parametrize(
    ("what", "ranks", "told"),
    [
        ("lose_rank_1_in_an_all_reduce", 2, ("rank 1 ", "ValueError: bad sample")),
        ("raise_while_a_thread_runs", 1, ("rank 0 ", "ValueError: first")),
        ("leave_with_code_3", 2, ("rank 1 ", "SystemExit: 3", "leave_with_code_3")),
        ("vanish_with_code_5", 1, ("rank 0 ", "ended with exit code 5 in start-up and reported no error")),
        ("leave_early", 2, ("rank 1 ", "ended with exit code 0 in start-up, before the others", "call exit()?")),
        ("be_killed_on_rank_1", 2, ("rank 1 ", "was killed by SIGKILL in compute of step 37")),
        ("crash", 1, ("rank 0 ", "was killed by SIGSEGV", "in crash")),
        ("no_such_function", 1, ("", "has no 'no_such_function'")),
    ],
)
def test_the_rank_that_failed_first_is_named_with_what_happened(what: str, ranks: int, told: tuple[str, ...]) -> None:
    text = failure(what, ranks=ranks)
    assert text.startswith(told[0])
    assert all(words in text for words in told), text


def test_an_error_that_explains_itself_is_shown_alone_and_is_not_tried_again(tmp_path: Path) -> None:
    assert failure("raise_a_job_error", tmp_path, restarts=2) == "the data has 0 samples: name another folder"
    assert not list(tmp_path.glob("attempt-1-*"))


def test_a_link_that_stays_away_is_named_with_both_hosts_also_where_its_ranks_cannot_leave() -> None:
    text = failure("fail_and_never_leave", deadline_s=1)
    assert "(host a0) for rank 1 (host a1): no answer" in text or "(host a1) for rank 0 (host a0): no answer" in text
    assert "waited for one another" not in text


def test_too_few_open_files_for_all_ranks_is_an_error_and_ends_those_started() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 12, limits[1]))
    try:
        text = failure("stand_still", *["compute"] * 30, ranks=30)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert re.match(r"rank \d+ of 30 could not be started: .*Too many open files", text)


def test_an_error_of_the_caller_s_own_ends_the_ranks(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("the disk of the display is full")

    with pytest.raises(RuntimeError, match="display"):
        run("ignore_sigterm", tmp_path, on_tick=fail)


# A rank that hangs


def test_a_rank_that_hangs_is_named_with_its_step_its_stack_and_who_waits() -> None:
    text = failure("stand_still", "sync", "compute", deadline_s=1)
    assert text.startswith("rank 1 ")
    hung = re.search(r"has been in compute of step 37 for (\d+) s while rank 0 waits for it", text)
    assert hung
    assert int(hung[1]) >= 1, "told before its deadline"
    assert "in stand_still" in text
    assert "elastic/rank.py" not in text


def test_the_stack_of_a_hung_rank_is_read_when_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.elastic.ranks._ANSWER_S", 30.0)
    text = failure("stand_still_beside_threads", ranks=1, deadline_s=1)
    assert "in stand_still_beside_threads" in text  # of the main thread, which is written last


def test_a_stopped_rank_is_named_as_stopped() -> None:
    text = failure("stand_still", "sync", "stopped", deadline_s=1)
    assert text.startswith("rank 1 ")
    assert "is stopped (SIGSTOP) in compute of step 37" in text


def test_ranks_that_only_wait_for_one_another_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.elastic.watchdog._OWN_ERROR_S", 2.0)
    text = failure("stand_still", "sync", "sync", deadline_s=1)
    hung = re.search(r"have waited for one another in sync for (\d+) s \(rank 0 in step 37, rank 1 in step 37\)", text)
    assert hung
    assert int(hung[1]) >= 3, "told before the transport itself could say who is missing"


def test_a_rank_that_never_starts_is_named_after_a_deadline_of_its_own() -> None:
    assert "has been in start-up for" in failure("stand_still", "starting", "sync", start_deadline_s=2)


# The port


def test_a_port_in_use_is_named_with_the_process_that_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text = failure("vanish_with_code_5", port=port)
    assert f"port {port} on 127.0.0.1 is in use by" in text
    assert f"(pid {os.getpid()})" in text


@pytest.mark.parametrize("port", [70_000, -1])
def test_a_port_that_cannot_be_is_an_error(port: int) -> None:
    assert "ports are numbered from 1 to 65535" in failure("vanish_with_code_5", port=port)


# Restarts


def test_a_restart_has_a_rendezvous_of_its_own(tmp_path: Path) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    launched = run(
        "fail_in_the_first_attempt", tmp_path, ranks=1, restarts=3, on_event=lambda *event: events.append(event)
    )
    assert launched.attempts == 2
    assert (tmp_path / "store-0").read_text() != (tmp_path / "store-1").read_text()
    [(kind, event)] = events
    assert kind == "restart"
    assert event["attempt"] == 1
    assert "SIGKILL" in event["reason"]


def test_restarts_are_not_without_end(tmp_path: Path) -> None:
    events: list[str] = []
    assert "exit code 5" in failure(
        "vanish_with_code_5", ranks=1, restarts=2, on_event=lambda kind, _: events.append(kind)
    )
    assert events == ["restart", "restart"]


def test_restarts_of_more_than_an_hour_ago_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def an_hour_passes_twice(kind: str, _: dict[str, Any]) -> None:
        events.append(kind)
        if len(events) == 3:
            monkeypatch.undo()

    monkeypatch.setattr(membership, "WITHIN_S", 0.0)
    failure("vanish_with_code_5", ranks=1, restarts=1, on_event=an_hour_passes_twice)
    assert events == ["restart"] * 3


# Signals


def test_sigterm_lets_ranks_that_are_interpreters_save_and_ends_well(tmp_path: Path) -> None:
    with launcher("save_on_sigterm", tmp_path, fork=False) as process:
        process.terminate()
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "SIGTERM: the ranks save a checkpoint and end" in errors
    assert len(list(tmp_path.glob("saved-*"))) == 2


def test_a_second_ctrl_c_kills_the_ranks(tmp_path: Path) -> None:
    with launcher("ignore_sigterm", tmp_path) as process:
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        process.stderr.readline()  # it has said that the ranks are told
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130
    assert are_gone(tmp_path)


def test_a_signal_before_the_ranks_can_save_says_so(tmp_path: Path) -> None:
    with launcher("never_be_ready", tmp_path) as process:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert re.search(r"SIGTERM stopped the run before rank [01] was ready to train", errors)
    assert process.returncode == 143


@pytest.mark.parametrize("fork", [True, False])
def test_a_killed_launcher_leaves_no_process_and_nothing_in_the_temporary_folder(tmp_path: Path, fork: bool) -> None:
    with launcher("save_on_sigterm", tmp_path, fork=fork) as process:
        assert list(tmp_path.glob("paceline-*"))
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) == 2 + fork
        process.kill()
        process.wait(30)
        wait_until(lambda: are_gone(tmp_path))
        wait_until(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in started))
    assert len(list(tmp_path.glob("saved-*"))) == 2
    assert not list(tmp_path.glob("paceline-*"))


DIES_THREAD_BY_THREAD = """
import ctypes, os, threading, time
threading.Thread(target=lambda: (time.sleep(1), os._exit(0))).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_launcher_whose_threads_end_one_by_one_leaves_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", DIES_THREAD_BY_THREAD]) as launcher:
        pidfd = os.pidfd_open(launcher.pid)
        wait_until(lambda: state_of(launcher.pid) == "Z")
        Launcher(pidfd, launcher.pid, folder).clean_up()
        os.close(pidfd)
    assert not folder.exists()


def test_ctrl_c_lets_the_ranks_save_and_the_terminal_gets_its_cursor_back(tmp_path: Path) -> None:
    ours, terminal = os.openpty()
    with launcher("save_on_sigterm", tmp_path, stderr=terminal) as process:
        process.send_signal(signal.SIGINT)
        process.wait(30)
    os.close(terminal)
    shown = os.read(ours, 10_000)
    os.close(ours)
    assert process.returncode == 0
    assert b"SIGINT: the ranks save a checkpoint and end" in shown
    assert len(list(tmp_path.glob("saved-*"))) == 2
    assert shown.endswith(b"\x1b[?25h")
