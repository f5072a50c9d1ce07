"""The commands of paceline: called in the process of a test, or run as a person does, with a deadline."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
import yaml

from forked import Forked, can_be_forked, share_forkserver
from paceline.cli import commands, main
from paceline.cluster.cgroup import remove_group
from paceline.errors import PacelineError
from refusals import assert_problem

BIN = Path(sys.executable).parent
DEADLINE_S = 100.0  # ten times what any of them takes on a busy machine of two cores


def parsed(words: list[str]) -> dict[str, Any]:
    """Values of the options and arguments of a command line after `paceline`, without running the command."""
    found, (name, *arguments) = commands(), words
    while arguments and arguments[0] in vars(found[name]).get("commands", {}):
        found, (name, *arguments) = found[name].commands, arguments
    values: dict[str, Any] = found[name].make_context(name, arguments).params
    return values


@dataclass(frozen=True)
class Outcome:
    """How a command ended; `cause` is the error of one that was called in the process of the test."""

    code: int
    out: str
    err: str
    cause: PacelineError | None = None

    def says(self, *texts: str) -> bool:
        """Whether all these texts are on the screen; fails with the screen otherwise."""
        missing = [text for text in texts if text not in self.err + self.out]
        assert not missing, f"{missing} not in:\n{self.err}{self.out}"
        return True

    @property
    def error(self) -> str:
        """The one error, without what went before it on the screen."""
        assert self.code not in (0, None), self.err + self.out
        before, mark, error = self.err.partition("paceline: ")
        assert mark, self.err
        assert "Traceback" not in before, self.err
        assert "paceline: " not in error, self.err
        return error

    @property
    def codes(self) -> list[str]:
        """Codes of all problems of the one error, as the screen shows them."""
        return re.findall(r"  \[([a-z0-9_]+(?:\.[a-z0-9_]+)+)\]$", self.error, re.MULTILINE)

    def fails_with(self, code: str, /, **fields: Any) -> str:
        """Assert that the command ended with one error, of this code and these fields; return the error's text.

        Args:
            fields: as for `raises`; only if the command was called in the process of the test.
        """
        assert code in self.codes, f"{code} is not in the error: {self.error}"
        if fields:
            assert self.cause is not None, "the fields of an error of another process are not known"
            assert_problem(self.cause, code, **fields)
        return self.error


def paceline(*arguments: object, folder: Path, columns: int | None = None) -> Outcome:
    """Call the command `paceline ARGUMENTS…` in this process, in `folder`, to its end.

    Its ranks are forked from the tests' forkserver. What only a process of its own shows, `in_a_process` does.

    Args:
        columns: width of the terminal for the errors of the command line.
    """
    with ExitStack() as stack:
        out, err = (stack.enter_context(tempfile.TemporaryFile("w+", buffering=1)) for _ in range(2))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
        if columns is not None:
            patch.setenv("COLUMNS", str(columns))
        share_forkserver()
        with _streams_to(out, err):
            code, cause = _end_of_main()
        shown, errors = (os.pread(file.fileno(), 2**24, 0).decode() for file in (out, err))
        return Outcome(code, shown, errors, cause)


def _end_of_main() -> tuple[int, PacelineError | None]:
    """Exit code of the command, and the error that it showed."""
    try:
        main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        return code, ended.__context__ if isinstance(ended.__context__, PacelineError) else None
    return 0, None


@contextmanager
def _streams_to(out: IO[str], err: IO[str]) -> Iterator[None]:
    """Within, this process and the ranks that it starts write into these files."""
    before, kept = (sys.stdout, sys.stderr), (os.dup(1), os.dup(2))
    sys.stdout, sys.stderr = out, err
    try:
        for number, file in enumerate((out, err), start=1):
            os.dup2(file.fileno(), number)
        yield
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before
        for number, copy in enumerate(kept, start=1):
            os.dup2(copy, number)
            os.close(copy)


def in_a_process(*arguments: object, folder: Path, **environment: str) -> Outcome:
    """Run the command `paceline ARGUMENTS…` in `folder` to its end, in a process of its own."""
    with started("paceline", *arguments, folder=folder, environment=environment) as process:
        return ended(process)


@contextmanager
def started(
    program: str,
    *arguments: object,
    folder: Path,
    screen: int = subprocess.PIPE,
    environment: Mapping[str, str] = {},
    network: str | None = None,
    hidden: Path | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """A program of this Python's environment, under way.

    Killed with all that it started where the test leaves it running. The command `paceline` is forked from a process
    that has imported it, unless it is to have an environment that imports read.

    Args:
        screen: what it writes to, instead of pipes that `ended` reads.
        network: path of a network namespace, for the program to be in. Needs root, as the next.
        hidden: a folder that it finds empty.
    """
    # What a killed process leaves in the temporary folder is not the test's.
    place = {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    variables = {**os.environ, **place, **environment}
    words = [str(BIN / program), *map(str, arguments)]
    settings: dict[str, Any] = {
        "cwd": folder,
        "env": variables,
        "stdin": subprocess.DEVNULL,
        "stdout": screen,
        "stderr": screen,
        "text": True,
    }
    if program == "paceline" and can_be_forked(variables):
        process: subprocess.Popen[str] = Forked(words, network, hidden, **settings)
    else:
        process = subprocess.Popen([*_way_into(network, hidden), *words], **settings)
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()


def _way_into(network: str | None, hidden: Path | None) -> list[str]:
    """Words before a command's that put it there."""
    words = ["/usr/bin/nsenter", f"--net={network}"] if network else []
    if hidden:
        hide = f'mount -t tmpfs none {hidden} && exec "$@"'
        words += ["/usr/bin/unshare", "-m", "sh", "-c", hide, "sh"]
    return words


def ended(process: subprocess.Popen[str], deadline_s: float = DEADLINE_S) -> Outcome:
    """Wait for the end of a started program."""
    out, err = process.communicate(timeout=deadline_s)
    return Outcome(process.returncode, out or "", err or "")


def ended_well(process: subprocess.Popen[str], deadline_s: float = DEADLINE_S) -> Outcome:
    """Wait for the end of a started program, whose exit code has to be 0."""
    return _well(ended(process, deadline_s))


def losses_of(job: Path, plan: str = "dp=1", run: str = "undisturbed", *options: object) -> dict[int, float]:
    """Train a job beside its file to the end, and return its losses."""
    _well(paceline("train", job, "--plan", plan, "--run", run, *options, folder=job.parent))
    return losses(job.parent / run)


def _well(outcome: Outcome) -> Outcome:
    assert outcome.code == 0, outcome.err
    return outcome


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Wait until the condition is met by what `process` does."""
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.005)


@contextmanager
def training(job: Path, folder: Path, plan: str, *options: object) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run of a job under way, and its folder."""
    with started("paceline", "train", job, "--plan", plan, "--run", "run", *options, folder=folder) as process:
        yield process, folder / "run"


def wait_for_events(run: Path, kind: str, count: int, process: subprocess.Popen[str]) -> None:
    """Wait until the run that `process` trains has so many events of a kind."""
    wait_for(lambda: len(events(run, kind)) >= count, process)


def wait_for_step(step: int, run: Path, process: subprocess.Popen[str]) -> None:
    """Wait until the run that `process` trains has recorded so many steps."""
    wait_for(lambda: len(losses(run)) >= step, process)


def processes_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """All that it has started."""
    return psutil.Process(launcher.pid).children(recursive=True)


def words_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process; empty if the process has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def rank_of(process: psutil.Process) -> int | None:
    """The rank that a process is, by its title where it was forked, else by its environment; None where it is none."""
    try:
        title = " ".join(process.cmdline())
        if title.startswith("paceline rank "):
            return int(title.split()[2])
        rank = process.environ().get("RANK")
    except psutil.Error:  # it has ended
        return None
    return None if rank is None else int(rank)


def kill_rank(rank: int, launcher: subprocess.Popen[str]) -> None:
    """`kill -9` of one rank."""
    [process] = [p for p in processes_of(launcher) if rank_of(p) == rank]
    process.send_signal(signal.SIGKILL)


@contextmanager
def no_new_processes(process: psutil.Process) -> Iterator[None]:
    """Make the system refuse any fork of the process: by a control group for root, else by its limit."""
    if os.geteuid() != 0:
        before = process.rlimit(psutil.RLIMIT_NPROC)
        process.rlimit(psutil.RLIMIT_NPROC, (0, before[1]))
        yield
        with suppress(psutil.NoSuchProcess):
            process.rlimit(psutil.RLIMIT_NPROC, before)
        return
    parent = Path("/sys/fs/cgroup/pids" if Path("/sys/fs/cgroup/pids").exists() else "/sys/fs/cgroup")
    group = parent / f"no-forks-{process.pid}"
    try:
        group.mkdir()
        (group / "pids.max").write_text("1")
    except OSError as error:
        pytest.skip(f"no control group can limit processes here: {error}")
    try:
        (group / "cgroup.procs").write_text(str(process.pid))
        yield
    finally:
        with suppress(ProcessLookupError):
            (parent / "cgroup.procs").write_text(str(process.pid))
        remove_group(group)


def losses(run: Path) -> dict[int, float]:
    """The newest loss of every step that the run's record has."""
    file = run / "steps" / "rank-0.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return {record["step"]: record["loss"] for record in records}


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """The run's events of a kind."""
    return [
        event for event in map(json.loads, (run / "events.jsonl").read_text().splitlines()) if event["event"] == kind
    ]


def checkpoints(run: Path) -> list[str]:
    """The names of what lies in the run's folder of checkpoints."""
    return sorted(os.listdir(run / "checkpoints"))


LATE = """
import pathlib, time
from torch.nn.functional import cross_entropy
here = pathlib.Path(__file__).parent
(here / "importing").touch()
until = time.monotonic() + 300
while not (here / "go").exists() and time.monotonic() < until:
    time.sleep(0.02)
"""


def write_late_job(folder: Path, **changes: Any) -> Path:
    """A job whose loss makes the file `importing` while it is imported, and goes on once there is a file `go`."""
    (folder / "late.py").write_text(LATE)
    return write_job(folder / "job.yaml", **{"loss": "late.py:cross_entropy", **changes})


def write_job(file: Path, **changes: Any) -> Path:
    """A small job in a YAML file: 48 points in batches of 16, so 3 steps an epoch; 6 steps of SGD."""
    job: dict[str, Any] = {
        "name": "small",
        "model": {"zoo": "mlp", "args": {"hidden": 8}},
        "data": {"kind": "synthetic", "samples": 48, "held_out": 0},
        "loss": "cross_entropy",
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        "global_batch": 16,
        "stop": {"steps": 6},
    }
    file.write_text(yaml.safe_dump(job | changes, sort_keys=False))
    return file


def points(held_out: float = 0, **args: object) -> dict[str, Any]:
    """The data set that goes wrong as its arguments say (`faults/what_goes_wrong.py`)."""
    return {"kind": "dataset", "factory": f"{POINTS}:Points", "held_out": held_out, "args": args}


def write_long_job(folder: Path, *, until: Path) -> Path:
    """A small job, in `job.yaml`, of 600 steps that take 20 ms or more until there is a file `until`."""
    model, data = {"factory": f"{POINTS}:net"}, points(sleep_s=0.003, until=str(until))
    return write_job(folder / "job.yaml", model=model, data=data, stop={"steps": 600}, checkpoint={"every_steps": 50})


POINTS = Path(__file__).parent / "faults" / "what_goes_wrong.py"


def write_slow_job(folder: Path, **changes: Any) -> Path:
    """A small job, in `job.yaml`, whose model takes 30 ms longer on rank 1; its code is `slow.py` beside it."""
    (folder / "slow.py").write_text(_SLOW)
    data = {"kind": "synthetic", "samples": 480, "held_out": 0, "shape": [6], "classes": 3}
    return write_job(folder / "job.yaml", model="slow:Slow", data=data, **changes)


_SLOW = """
import os
import time

from torch import nn


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        time.sleep(0.03 if os.environ.get("RANK") == "1" and self.training else 0)
        return self.layer(x)
"""
