"""A Slurm of this test's own: every daemon on 127.0.0.1, nothing of the system's touched."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
_CONFIGURATION = """\
ClusterName=paceline
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={here}/munge.socket,cred_expire=5
SlurmctldPort={ports[0]}
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool.%n
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/slurmd.%n.pid
SlurmctldLogFile={here}/slurmctld.log
SlurmdLogFile={here}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,batch_sched_delay=0,bf_interval=5
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=60
MinJobAge=600
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_NODE = "NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=4000\n"


def is_installed() -> bool:
    """Whether Slurm's daemons and commands are there, and may be started."""
    return os.geteuid() == 0 and all(map(shutil.which, NEEDED))


@dataclass(frozen=True)
class SlurmCluster:
    """A cluster under way; `environment` is for commands."""

    environment: dict[str, str]

    @property
    def idle_nodes(self) -> int | None:
        """How many nodes wait for work; None before there is a controller to ask."""
        try:
            return int(self.ask("sinfo", "--noheader", "--states=idle", "--format=%D") or 0)
        except subprocess.CalledProcessError:
            return None

    def ask(self, *command: str) -> str:
        """Output of a command of Slurm."""
        environment = os.environ | self.environment
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()


@contextmanager
def slurm_cluster(here: Path, nodes: int) -> Iterator[SlurmCluster]:
    """A cluster of so many nodes, ended with all that runs on it."""
    host, ports = socket.gethostname().partition(".")[0], _free_ports(nodes + 1)
    lines = [_NODE.format(i=i, host=host, port=port) for i, port in enumerate(ports[1:])]
    (here / "state").mkdir()
    (here / "slurm.conf").write_text(_CONFIGURATION.format(here=here, host=host, ports=ports) + "".join(lines))
    (here / "munge.key").write_bytes(secrets.token_bytes(128))
    (here / "munge.key").chmod(0o600)
    here.chmod(0o755)
    cluster = SlurmCluster({"SLURM_CONF": str(here / "slurm.conf")})
    files = ("--socket", "--key-file", "--pid-file", "--log-file", "--seed-file")
    names = ("munge.socket", "munge.key", "munged.pid", "munged.log", "munge.seed")
    places = [f"{option}={here / name}" for option, name in zip(files, names, strict=True)]
    with ExitStack() as started:
        started.enter_context(_daemon(cluster, "munged", "--foreground", "--force", *places))
        _wait(here / "munged.log", (here / "munge.socket").exists)
        started.enter_context(_daemon(cluster, "slurmctld", "-D", "-c"))
        # A node that comes too early for the controller is not asked again for minutes.
        _wait(here / "slurmctld.log", lambda: cluster.idle_nodes is not None)
        for i in range(nodes):
            started.enter_context(_daemon(cluster, "slurmd", "-D", "-N", f"n{i}"))
        _wait(here / "slurmctld.log", lambda: cluster.idle_nodes == nodes)
        yield cluster


@contextmanager
def _daemon(cluster: SlurmCluster, *command: str) -> Iterator[None]:
    """A daemon, ended with all that it started; it ends with this process, too, as where Ctrl-C ends the tests."""
    environment = os.environ | cluster.environment
    with subprocess.Popen(
        ["setpriv", "--pdeathsig", "TERM", *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            yield
        finally:
            children = psutil.Process(process.pid).children(recursive=True)
            for child in children:
                child.kill()
            process.kill()
            psutil.wait_procs(children, 5)


def _wait(log: Path, is_ready: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not is_ready():
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
