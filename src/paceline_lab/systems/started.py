"""One run of a system, in a virtual environment that is installed once."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import psutil

from paceline.cluster.emulate import enter_host
from paceline.errors import RunError
from paceline.files import made_cache_folder, write_whole
from paceline_lab.systems.compared import TakenRun
from paceline_lab.systems.system import Command, Start, Steps, System

MARK = "PACELINE_COMPARED"  # environment variable that marks every process of a run, including daemons
END_S = 10.0  # seconds to wait for processes to end after each signal
_POLL_S, _MEMORY_S = 0.05, 2.0
_TAIL = 6  # number of final output lines that the error of a failed run shows
_ERROR = re.compile(r"^(\[rank\d+\]: |\[[\w.,]+\]<stderr>: ?)?[\w.]*(Error|Exception|Interrupt): ")


@dataclass(frozen=True)
class Finished:
    """Result of a run that completed all its steps.

    Attributes:
        began: time at which the command started, in Unix seconds.
        memory_bytes: peak of the total memory of all processes; pages that processes share count once.
    """

    steps: Steps
    began: float
    memory_bytes: int


def run(
    start: Start,
    environment: dict[str, str],
    *,
    deadline_s: float,
    stopped: Callable[[], bool] = lambda: False,
    kill: Kill | None = None,
) -> Finished:
    """Run a system once.

    Args:
        environment: additional environment variables for all processes of the run.
        deadline_s: seconds after which the run counts as hanging and is killed.
        stopped: function that is polled during the run; if it returns True, the run ends.
        kill: fault that kills one rank during the run; None for a run without faults.

    Raises:
        RunError: the run failed or hung; the error includes part of the run's output.
        KeyboardInterrupt: `stopped` returned True.
    """
    system, marked = start.system, f"{os.getpid()}:{start.folder}"
    processes: list[tuple[Command, subprocess.Popen[bytes]]] = []
    began, most = time.time(), 0
    try:
        with open(start.folder / "log", "ab") as log:
            for command in system.commands(start):
                variables = {**_own_environment(), **_network(command), **environment, **command.environment}
                started = subprocess.Popen(
                    list(command.words),
                    env={**variables, "TMPDIR": str(start.scratch), MARK: marked},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=partial(enter_host, command.host.entry if command.host else None),
                )
                processes.append((command, started))
        most = _wait(system, start.folder, processes, marked, began + deadline_s, stopped, kill)
    finally:
        _end(marked, [process for _, process in processes])
    try:
        return Finished(system.steps(start), began, most)
    except (OSError, KeyError, ValueError) as error:
        raise RunError(
            "compare.no_record",
            "{system} recorded no steps: {error}\n{output}",
            system=system.title,
            error=error,
            output=_said(start.folder),
        ) from error


def _wait(
    system: System,
    folder: Path,
    processes: list[tuple[Command, subprocess.Popen[bytes]]],
    marked: str,
    until: float,
    stopped: Callable[[], bool],
    kill: Kill | None,
) -> int:
    """Wait until all processes except servers have ended. Return the peak memory in bytes."""
    # early, so that a short run is sampled at least once
    began, most, look = time.time(), 0, time.monotonic() + _MEMORY_S / 2
    while True:
        codes = [(process.poll(), command.serves) for command, process in processes]
        if failed := [code for code, serves in codes if code or (serves and code is not None)]:
            raise RunError(
                "compare.failed",
                "{system} failed with exit status {exit_status}\n{output}",
                system=system.title,
                exit_status=failed[0],
                output=_said(folder),
            )
        if all(serves or code == 0 for code, serves in codes):
            return most
        if stopped():
            raise KeyboardInterrupt
        if kill is not None:
            kill.due(began, partial(_marked, marked))
        if time.time() > until:
            raise RunError(
                "compare.hung", "{system} hung and was killed\n{output}", system=system.title, output=_said(folder)
            )
        if time.monotonic() > look:
            most, look = max(most, sum(map(_proportional_bytes, _marked(marked)))), time.monotonic() + _MEMORY_S
        time.sleep(_POLL_S)


def _own_environment() -> dict[str, str]:
    """Return this process's environment variables, without those by which torchrun identifies a rank."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in ranks}


def _network(command: Command) -> dict[str, str]:
    """Return variables that select an emulated host's network interface for gloo and hide all GPUs."""
    if command.host is None:
        return {}
    return {"GLOO_SOCKET_IFNAME": command.host.interface, "CUDA_VISIBLE_DEVICES": ""}


def _marked(marked: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == marked:
                yield process


def _proportional_bytes(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return int(process.memory_full_info().pss)
    return 0


def _end(marked: str, processes: list[subprocess.Popen[bytes]]) -> None:
    """End every process of the run with SIGTERM, then with SIGKILL."""
    for number, patience_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, END_S), (signal.SIGKILL, END_S)):
        there = list(_marked(marked))
        for process in there:
            with suppress(psutil.Error):
                process.send_signal(number)
        psutil.wait_procs(there, patience_s if there else 0)
    for started in processes:
        started.wait()


def _said(folder: Path) -> str:
    """Return the first error in a run's log, or the last lines without an error."""
    text = (folder / "log").read_text(errors="replace") if (folder / "log").exists() else ""
    told = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in told if _ERROR.search(line)]
    return "\n".join(errors[:1] or told[-_TAIL:]) + f"\n(all of it: {folder / 'log'})"


RANK = 1  # rank that is killed
LEAST_S = 8.0  # minimum total duration of all steps, so that enough of them lie before and after the kill
MOST_STEPS = 2000


@dataclass
class Kill:
    """Fault that sends SIGKILL to one rank at a given time.

    Attributes:
        after_s: seconds between the start of the command and the kill.
        time: time at which the rank was killed, in Unix seconds; None before the kill.
    """

    after_s: float
    time: float | None = None
    _looked: float = field(default=0.0, repr=False)

    @classmethod
    def within(cls, runs: Iterable[TakenRun]) -> tuple[Kill, int]:
        """Return a kill at the middle of a run, and the run's number of steps.

        Both are computed from the times of earlier runs.
        """
        runs = list(runs)
        step_s = statistics.median(run.step_s for run in runs)
        steps = min(MOST_STEPS, max(len(runs[0].losses), round(LEAST_S / step_s)))
        return cls(max(run.first_step_s for run in runs) + step_s * steps / 2), steps

    def due(self, began: float, processes: Callable[[], Iterable[psutil.Process]]) -> None:
        """Kill the rank if its time is reached and the rank still runs."""
        now = time.time()
        if self.time is not None or now < began + self.after_s or now < self._looked + 0.3:
            return
        self._looked = now
        for process in processes():
            with suppress(psutil.Error, IndexError, ValueError):
                if _is_rank(process):
                    process.send_signal(signal.SIGKILL)
                    self.time = time.time()
                    return

    def pause_s(self, ended_s: list[float]) -> float:
        """Return the longest step time around the kill, minus the median step time."""
        assert self.time is not None
        gaps = [after - before for before, after in pairwise(ended_s)]
        around = [
            gap for gap, (before, after) in zip(gaps, pairwise(ended_s), strict=True) if after > self.time > before - 60
        ]
        return max(around, default=0.0) - statistics.median(gaps)


def _is_rank(process: psutil.Process) -> bool:
    variables = process.environ()
    if process.cmdline()[0].startswith(f"paceline rank {RANK} of"):
        return True
    if variables.get("TORCHELASTIC_RUN_ID"):  # in torchft, every rank is a replica group of its own
        return int(variables.get("REPLICA_GROUP_ID", variables.get("RANK", "-1"))) == RANK
    if "TF_CONFIG" in variables:
        task = json.loads(variables["TF_CONFIG"])["task"]
        return bool(task["type"] == "worker" and task["index"] == RANK)
    return variables.get("HOROVOD_RANK") == str(RANK)


REQUIREMENTS = Path(__file__).with_name("requirements")
_DONE = "made"
_LEAST_ROOM = 3 * 2**30  # minimum free disk space in bytes
_INSTALL_S = 1800.0


def python_of(system: System, say: Callable[[str], None]) -> Path:
    """Return the Python interpreter of a system's environment; create the environment if it is missing.

    Raises:
        RunError: the environment cannot be created. If pip failed, the error includes pip's message.
    """
    if not system.requirements:
        return Path(sys.executable)
    files = [REQUIREMENTS / name for name in system.requirements]
    try:
        cache = made_cache_folder("systems")
    except OSError as error:
        raise RunError(
            "compare.no_environment",
            "{system} is not installed: its environment needs the folder {folder}, which cannot be used ({reason}). "
            "Set XDG_CACHE_HOME to a writable folder.",
            system=system.title,
            folder=error.filename,
            reason=error.strerror,
        ) from error
    folder = cache / f"{files[-1].stem}-{_key(files, apart=system.apart)}"
    python = folder / "bin" / "python"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # only one of two concurrent benchmarks creates the environment
        if not (folder / _DONE).exists():
            say(f"{system.title}: its environment is made in {folder}, once …")
            shutil.rmtree(folder, ignore_errors=True)
            _make(system, folder, files)
            write_whole(folder / _DONE, "")
    return python


def _key(files: list[Path], *, apart: bool) -> str:
    """Return a hash of the pinned packages and the versions of Python and torch."""
    seen = [sys.version, sys.prefix, "" if apart else version("torch"), *(file.read_text() for file in files)]
    return hashlib.sha256("\0".join(seen).encode()).hexdigest()[:12]


def _make(system: System, folder: Path, files: list[Path]) -> None:
    if shutil.disk_usage(folder.parent).free < _LEAST_ROOM:
        raise RunError(
            "compare.no_room",
            "{system} is not installed: {folder} has less than 3 GiB of free space",
            system=system.title,
            folder=folder.parent,
        )
    try:
        venv.EnvBuilder(with_pip=True, symlinks=True).create(folder)
    except (OSError, subprocess.CalledProcessError) as error:
        raise RunError(
            "compare.no_venv",
            "{system} is not installed: python cannot create a virtual environment ({error}). On Debian and "
            "Ubuntu: apt install python3-venv",
            system=system.title,
            error=error,
        ) from error
    if not system.apart:
        inside = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
        ours = [path for path in sys.path if path.endswith("site-packages")]
        source = str(Path(__file__).parents[2])  # source folder of paceline, which may not be installed as a package
        write_whole(Path(inside) / "paceline-and-torch.pth", "\n".join([*ours, source]) + "\n")
    for file in files:
        _install(system, folder, file)


def _install(system: System, folder: Path, file: Path) -> None:
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    options = ["--quiet", "--require-hashes", "--no-deps", "--no-build-isolation", "-r", str(file)]
    environment = {**os.environ, **system.build_environment, "PIP_ROOT_USER_ACTION": "ignore"}
    try:
        done = subprocess.run([*pip, *options], env=environment, capture_output=True, text=True, timeout=_INSTALL_S)
    except subprocess.TimeoutExpired:
        raise RunError(
            "compare.install_timeout",
            "{system} is not installed: pip took more than {deadline_s:.0f} s",
            system=system.title,
            deadline_s=_INSTALL_S,
        ) from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        told = next(
            (line for line in reversed(lines) if "ERROR" in line or "error" in line), lines[-1] if lines else ""
        )
        write_whole(Path(f"{folder}.log"), done.stdout + done.stderr)
        raise RunError(
            "compare.install_failed",
            "{system} is not installed: {reason} (full log: {folder}.log)",
            system=system.title,
            reason=told.strip(),
            folder=folder,
        )
