"""A run of a system as real processes: it ends, fails, hangs or is stopped, and nothing of it is left."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from paceline.cluster.discover import discover
from paceline.errors import RunError
from paceline_lab.systems import started
from paceline_lab.systems.started import MARK, run
from paceline_lab.systems.system import Command, Start, Steps, System, Task
from refusals import raises

LEAVES = """
import json, pathlib, sys, time
path = pathlib.Path(sys.argv[1], "rank-0.json")
path.write_text(json.dumps({"losses": [2.0, 1.0], "ended_s": [1.0, 2.0]}))
"""
DAEMON = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
"""


def start(folder: Path, *programs: str) -> Start:
    """Programs of Python as a system; a second one serves."""

    def commands(start: Start) -> list[Command]:
        words = [[sys.executable, "-c", program, str(start.folder)] for program in programs]
        return [Command(each, serves=number > 0) for number, each in enumerate(words)]

    system = System(name="programs", title="Programs", documentation="", commands=commands)
    return Start(system, Path(sys.executable), folder, Task(1, 1, 2), discover(), (), 0, folder)


def processes_of(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK, "").endswith(str(folder)) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_run_gives_its_steps_and_ends_what_serves_and_what_became_a_daemon(tmp_path: Path) -> None:
    finished = run(start(tmp_path, LEAVES + DAEMON, "import time; time.sleep(600)"), {}, deadline_s=60)
    assert finished.steps == Steps([2.0, 1.0], [1.0, 2.0])
    assert processes_of(tmp_path) == []


def test_a_failed_run_says_the_first_error_and_where_all_of_it_is(tmp_path: Path) -> None:
    with raises(RunError, "compare.failed", exit_status=1, system="Programs") as told:
        run(start(tmp_path, "1 / 0"), {}, deadline_s=60)
    assert str(tmp_path / "log") in str(told.value)


def test_a_server_that_ends_while_others_train_is_a_failure(tmp_path: Path) -> None:
    with raises(RunError, "compare.failed", exit_status=0):
        run(start(tmp_path, "import time; time.sleep(600)", "pass"), {}, deadline_s=60)
    assert processes_of(tmp_path) == []


def test_a_run_that_hangs_is_killed_with_its_children_even_if_they_ignore_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(started, "END_S", 1.0)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + DAEMON + "time.sleep(600)"
    with raises(RunError, "compare.hung", system="Programs"):
        run(start(tmp_path, stubborn), {}, deadline_s=1.0)
    assert processes_of(tmp_path) == []


def test_a_run_that_leaves_no_record_is_told(tmp_path: Path) -> None:
    with raises(RunError, "compare.no_record", system="Programs"):
        run(start(tmp_path, "print('nothing')"), {}, deadline_s=60)


def test_a_stopped_run_ends_at_once(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(start(tmp_path, "import time; time.sleep(600)"), {}, deadline_s=60, stopped=lambda: True)
    assert processes_of(tmp_path) == []
