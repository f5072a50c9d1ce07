"""What the kernel tells of processes."""

import os
import signal
import subprocess

from paceline.elastic.failure import oom_kills, state_of


def test_a_stopped_process_is_told_from_a_running_one() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert state_of(process.pid) != "T"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert state_of(process.pid) == "T"
        process.kill()
    assert state_of(process.pid) != "T"


def test_the_count_of_kills_for_want_of_memory_is_a_number_or_unknown() -> None:
    assert (oom_kills() or 0) >= 0
