"""Host processes of one machine: the command `paceline` started once per host, as an engine does."""

from __future__ import annotations

import secrets
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from commands import (
    POINTS,
    Outcome,
    checkpoints,
    ended,
    losses,
    points,
    processes_of,
    started,
    wait_for_step,
    words_of,
    write_job,
)
from hosts import EmulatedHosts
from paceline.cluster.launch_engines import HostPlace
from paceline.elastic.hosts.gather import joining_of
from paceline.elastic.hosts.messages import ToHost
from paceline.wire.connection import Connection, connect
from paceline.wire.key import RunKey, write_key

PORT = 29611
SLOW_STEPS = 300


def folders(root: Path, count: int = 2) -> list[Path]:
    """A folder of its own for every host."""
    made = [root / f"host-{number}" for number in range(count)]
    for folder in made:
        folder.mkdir()
    return made


@contextmanager
def on_emulated_hosts(
    job: Path, hosts: int, plan: str, *options: object, from_step: int = 10, environment: Mapping[str, str] = {}
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run on emulated hosts, in the job's folder, once it has taken some steps."""
    folder, run = job.parent, job.parent / "run"
    (folder / "cluster.yaml").write_text(f"emulate: {{hosts: {hosts}}}\n")
    where = ("--cluster", "cluster.yaml", "--plan", plan, "--run", "run", *options)
    with started("paceline", "train", job, *where, folder=folder, environment=environment) as process:
        wait_for_step(from_step, run, process)
        yield process, run


def emulated_host_processes(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """Those of hosts 1, 2, …, without ones that have ended."""
    living = [process for process in processes_of(launcher) if is_alive(process)]
    return [process for process in living if words_of(process)[:1] == ["paceline host process"]]


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def joining_host(place: HostPlace, key: RunKey, **changes: object) -> Connection:
    """A connection on which a host has said who it is, with other values than its own."""
    connection = connect((place.coordinator, place.port), key, ToHost, deadline_s=30)
    connection.send(msgspec.structs.replace(joining_of(place, connection), **changes))
    return connection


def own_address() -> str:
    """An address of this machine that no other test takes at the same time, whatever seed it has set."""
    return ".".join(["127", *(str(1 + secrets.randbelow(250)) for _ in range(3))])


def variables(number: int, count: int, address: str, key: Path) -> dict[str, str]:
    """The environment of host `number`, which has one device."""
    return {
        "PACELINE_HOSTS": str(count),
        "PACELINE_HOST_NUMBER": str(number),
        "PACELINE_COORDINATOR": f"{address}:{PORT}",
        "PACELINE_KEY_FILE": str(key),
        "PACELINE_HOST_DEVICES": "1",
        "PACELINE_HOSTS_WAIT_S": "60",
    }


class HostProcesses(list[subprocess.Popen[str]]):
    """Host processes by number, and the variables that each was started with."""

    def __init__(
        self, start: Callable[[int], subprocess.Popen[str]], count: int, environments: dict[int, dict[str, str]]
    ) -> None:
        super().__init__(map(start, range(count)))
        self._start, self.environments = start, environments

    def start_again(self, number: int) -> None:
        """Start one with the same command, in the place of the one before."""
        self[number] = self._start(number)


@contextmanager
def host_processes(
    *arguments: object,
    folders: Sequence[Path],
    environment: Mapping[str, str] = {},
    apart: bool = False,
    emulated: EmulatedHosts | None = None,
    later: int = 0,
) -> Iterator[HostProcesses]:
    """The command as host 0, 1, …, each in its folder.

    Args:
        apart: the others do not see the folder of host 0. Needs root.
        emulated: hosts in whose networks the processes run.
        later: so many more may come.
    """
    address, key = emulated.emulation.hosts[0].address if emulated else own_address(), RunKey.make()
    environments: dict[int, dict[str, str]] = {}
    with ExitStack() as stack:

        def start(number: int) -> subprocess.Popen[str]:
            folder = folders[number]
            write_key(key, file := folder / f"key-{secrets.token_hex(4)}")
            own = {**variables(number, len(folders), address, file), **environment}
            if later:
                own["PACELINE_HOSTS"] = f"{len(folders)}..{len(folders) + later}"
            environments[number] = own
            network = emulated.emulation.hosts[number].namespace if emulated else None
            hidden = folders[0] if apart and number else None
            command = started("paceline", *arguments, folder=folder, environment=own, network=network, hidden=hidden)
            return stack.enter_context(command)

        yield HostProcesses(start, len(folders), environments)


def slow_job(folder: Path, sleep_s: float = 0.002) -> Path:
    """300 steps, each of 16 samples that take so long, until there is a file `fast` beside the job."""
    data = points(sleep_s=sleep_s, until=str(folder / "fast"))
    model, stop = {"factory": f"{POINTS}:net"}, {"steps": SLOW_STEPS}
    return write_job(folder / "job.yaml", model=model, data=data, stop=stop, checkpoint={"every_steps": 20})


@contextmanager
def slow_training_on(
    folder: Path,
    count: int,
    plan: str,
    *,
    sleep_s: float = 0.002,
    from_step: int = 50,
    environment: Mapping[str, str] = {},
    emulated: EmulatedHosts | None = None,
) -> Iterator[tuple[HostProcesses, Path]]:
    """Host processes of a run of `slow_job` that has taken some steps."""
    run, where = folder / "run", folders(folder, count)
    arguments = ("train", slow_job(folder, sleep_s), "--plan", plan, "--run", run)
    with host_processes(*arguments, folders=where, environment=environment, emulated=emulated) as hosts:
        wait_for_step(from_step, run, hosts[0])
        yield hosts, run


def assert_whole(run: Path, undisturbed: dict[int, float], told: Outcome) -> None:
    """All steps of `slow_job` are in the record, with the losses of an undisturbed run."""
    assert sorted(losses(run)) == list(range(1, SLOW_STEPS + 1)), told.err
    assert losses(run) == pytest.approx(undisturbed, rel=1e-4, abs=1e-6)
    assert checkpoints(run)[-1] == f"step-{SLOW_STEPS:08d}"


def stop_all(processes: Sequence[subprocess.Popen[str]]) -> None:
    """SIGTERM to the command on every host, as a scheduler sends it to end a run."""
    for process in processes:
        process.send_signal(signal.SIGTERM)


def outcomes(processes: Sequence[subprocess.Popen[str]]) -> list[Outcome]:
    """How each ended, host 0 first."""
    return [ended(process, 200) for process in processes]


def run_on(*arguments: object, folders: Sequence[Path]) -> list[Outcome]:
    """Run the command as hosts 0, 1, … to its end."""
    with host_processes(*arguments, folders=folders) as processes:
        return outcomes(processes)


def ports_in(network: str) -> set[tuple[str, int]]:
    """Addresses and ports on which anything listens in a network."""
    told = subprocess.run(["nsenter", f"--net={network}", "ss", "-Hltn"], capture_output=True, text=True, check=True)
    places = [line.split()[3].rpartition(":") for line in told.stdout.splitlines()]
    return {(address, int(port)) for address, _, port in places}
