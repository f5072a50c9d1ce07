"""What the kernel tells of processes."""

import os
import signal
import subprocess

from paceline.elastic.failure import is_stopped, oom_kills


def test_a_stopped_process_is_told_from_a_running_one() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert is_stopped(process.pid)
        process.kill()
    assert not is_stopped(process.pid)


def test_the_count_of_kills_for_want_of_memory_is_a_number_or_unknown() -> None:
    assert (oom_kills() or 0) >= 0
