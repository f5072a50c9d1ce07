"""A forked process is as good as an interpreter, where it is one at all."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from forked import Forked, python

PIPES: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
TELL = """
import os, sys
print(os.getcwd(), os.environ.get("PACELINE_OF_THIS_TEST"), os.getppid(), "torch" in sys.modules)
print("an error", file=sys.stderr)
sys.exit(3)
"""


def test_a_fork_is_a_child_with_the_folder_the_environment_and_the_descriptors_that_it_is_given(tmp_path: Path) -> None:
    with python(TELL, {"PACELINE_OF_THIS_TEST": "yes"}, cwd=tmp_path, **PIPES) as process:
        out, err = process.communicate(timeout=100)
    assert isinstance(process, Forked)
    assert out.split() == [str(tmp_path), "yes", str(os.getpid()), "True"]
    assert (err, process.returncode) == ("an error\n", 3)


def test_a_fork_shows_an_exception_and_dies_of_a_signal(tmp_path: Path) -> None:
    with python("raise ValueError('wrong')", cwd=tmp_path, **PIPES) as process:
        _, err = process.communicate(timeout=100)
    assert (err.splitlines()[-1], process.returncode) == ("ValueError: wrong", 1)
    with python("import signal; print(flush=True); signal.pause()", cwd=tmp_path, **PIPES) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        assert process.wait(100) == -signal.SIGTERM


def test_with_another_variable_that_imports_read_it_is_an_interpreter(tmp_path: Path) -> None:
    with python(TELL, {"TORCH_LOGS": "aot"}, cwd=tmp_path, **PIPES) as process:
        out, _ = process.communicate(timeout=100)
    assert not isinstance(process, Forked)
    assert out.split()[1:] == ["None", str(os.getpid()), "False"]
