"""Ranks are forked from a process that has imported all; they are as good as interpreters of their own."""

import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.device import VISIBLE
from paceline.elastic.attempt import launch
from paceline.elastic.forkserver import Forkserver, forkserver_for, shared_pids, warm_up, why_not
from paceline.elastic.place import on_this_machine
from paceline.elastic.ranks import Setting
from paceline.errors import LaunchError
from paceline.rank_environment import RankEnvironment
from refusals import raises

WHAT = Path(__file__).with_name("what_ranks_do.py")


def run(what: str, folder: Path, ranks: int = 2, threads: int = 1, **settings: Any) -> dict[str, dict[str, Any]]:
    """Launch a function of what_ranks_do.py; what the ranks wrote, by attempt and rank."""
    launch(Setting([f"{WHAT}:{what}", str(folder)], on_this_machine(ranks), threads=threads), **settings)
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("fork-*"))}


def test_a_fork_has_threads_random_numbers_and_a_session_of_its_own(tmp_path: Path) -> None:
    first, second = run("tell_of_the_fork", tmp_path, threads=2).values()
    assert first["threads"] == second["threads"] == 2
    assert first["threads_of_a_product"] == 2  # which is right, as the fork has seen
    assert first["random"][0] != second["random"][0]
    assert first["random"][1] != second["random"][1]
    assert first["torch_seed"] == second["torch_seed"]
    assert first["title"] == "paceline rank 0 of 2"
    assert first["session"]
    assert second["session"]


def test_a_fork_holds_no_socket_of_another_rank_or_of_the_launcher(tmp_path: Path) -> None:
    first, second = run("tell_of_the_fork", tmp_path).values()
    assert (first["sockets"], second["sockets"]) == (0, 0)


def test_ranks_of_all_attempts_and_launches_are_forked_from_one_process(tmp_path: Path) -> None:
    warm_up()
    forkserver = shared_pids()[-1]
    told = run("tell_of_the_fork_and_fail_once", tmp_path, restarts=1)
    assert {"fork-1-0", "fork-1-1"} <= told.keys()
    assert {one["parent"] for one in told.values()} == {forkserver} == {shared_pids()[-1]}


def test_a_fork_has_the_folder_and_the_limits_that_its_launcher_has_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up()
    monkeypatch.chdir(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, before[1]))
    try:
        [told] = run("tell_of_the_fork", tmp_path, ranks=1).values()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (told["files"], told["folder"]) == (500, str(tmp_path))
    assert str(tmp_path) in told["path"]


def test_ranks_are_stopped_and_started_again_where_their_forkserver_is_killed(tmp_path: Path) -> None:
    with raises(LaunchError, "launch.forkserver_killed"):
        run("kill_the_parent", tmp_path)
    assert len(run("tell_of_the_fork", tmp_path)) == 2


def test_a_forkserver_outlives_the_question_after_a_process_that_is_not_its_own() -> None:
    forkserver = forkserver_for(os.environ)
    with pytest.raises(LaunchError):
        forkserver.ask({"do": "wait", "pid": os.getpid()})
    assert not forkserver.lost


def test_an_answer_that_comes_after_its_time_out_is_not_taken_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.elastic.forkserver._ANSWER_S", 0.5)
    forkserver = Forkserver(os.environ)
    try:
        assert forkserver.wait_until_ready(60) is None
        os.kill(forkserver.pid, signal.SIGSTOP)
        with pytest.raises(LaunchError):
            forkserver.fork(["time:sleep", "60"], os.environ, RankEnvironment(0, 1, "127.0.0.1", 0), None)
        os.kill(forkserver.pid, signal.SIGCONT)
        with raises(LaunchError, "launch.forkserver_refused"):
            forkserver.ask({"do": "wait", "pid": 1})
        assert psutil.Process(forkserver.pid).children() == [], "a rank that was forked too late has ended"
    finally:
        forkserver.end()


def test_a_scheduler_that_signals_every_process_ends_no_forkserver_and_ranks_alone_are_ended(tmp_path: Path) -> None:
    assert len(run("tell_of_the_fork", tmp_path)) == 2
    forkserver = shared_pids()[-1]
    os.kill(forkserver, signal.SIGTERM)
    told = run("tell_of_the_fork", tmp_path)
    assert {one["parent"] for one in told.values()} == {forkserver}
    assert {one["on_sigterm"] for one in told.values()} == {signal.SIG_DFL}


def test_every_rank_is_an_interpreter_where_that_is_asked_for_or_a_fork_would_be_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why_not({"PACELINE_FORK": "0"}) == "PACELINE_FORK=0"
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    assert why_not() == "OMP_PROC_BIND is set"
    [told] = run("tell_of_the_fork", tmp_path, ranks=1).values()
    assert "paceline.elastic.rank" in told["title"]


@pytest.mark.parametrize(
    ("what_it_starts", "forked"),
    [
        ("threading.Thread(target=time.sleep, args=[60], daemon=True).start()", False),
        pytest.param("weakref.finalize(threading.Lock, open, 'finalized', 'w')", True, marks=pytest.mark.slow),
    ],
    ids=["a_thread", "a_finalizer"],
)
def test_what_an_import_starts_is_not_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what_it_starts: str, forked: bool
) -> None:
    (tmp_path / "starts.py").write_text(f"import threading, time, weakref\n{what_it_starts}\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    monkeypatch.chdir(tmp_path)
    warm_up("starts")
    [told] = run("tell_of_the_fork", tmp_path, ranks=1).values()
    assert (told["parent"] == shared_pids()[-1]) == forked
    assert not (tmp_path / "finalized").exists()


def test_another_environment_is_that_of_a_new_forkserver(monkeypatch: pytest.MonkeyPatch) -> None:
    before = forkserver_for(os.environ)
    changed = {**dict.fromkeys(VISIBLE, "1"), "PACELINE_DEVICE": "cpu", "OMP_NUM_THREADS": "9", "RANK": "7"}
    assert forkserver_for({**os.environ, **changed}) is before
    after = forkserver_for({**os.environ, "TORCH_LOGS": "dynamo"})  # read when torch is imported
    assert after is not before
    assert forkserver_for(os.environ) is before
    third = forkserver_for({**os.environ, "TORCH_LOGS": "aot"})
    assert after.lost
    assert shared_pids() == [before.pid, third.pid]


def test_a_signal_while_the_forkserver_imports_ends_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_LOGS", "+dynamo")  # so that a new one is needed
    events: list[str] = []

    def interrupt() -> None:
        if not events:
            os.kill(os.getpid(), signal.SIGTERM)

    settings: dict[str, Any] = {"on_tick": interrupt, "on_event": lambda kind, _: events.append(kind)}
    with raises(LaunchError, "launch.stopped_by_signal", signal="SIGTERM", what="rank 0 was ready to train"):
        launch(Setting(["os:getpid"], on_this_machine(1)), **settings)
    assert events == ["stop"]
