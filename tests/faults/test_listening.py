"""Every socket of a run listens where it is meant to, and nowhere else.

On loopback, or at the address of its (emulated) host.

The sockets are those that the kernel shows of every process of a run that trains. Who could connect from another
network could read and overwrite the rendezvous, or sit in the middle of a sum.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path

import psutil
import pytest

from commands import BIN, ended, processes_of, rank_of, started, wait_for_step, write_job

LISTENING = "0A"


def listening(process: psutil.Process) -> set[str]:
    """The addresses on which a process listens, as its own network namespace has them."""
    folder, held = Path(f"/proc/{process.pid}"), set()
    for fd in (folder / "fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            held.add(os.readlink(fd))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in (folder / "net" / table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENING and f"socket:[{words[9]}]" in held:
                found.add(readable(words[1].partition(":")[0]))
    return found


def readable(kernels: str) -> str:
    """The address that the kernel writes as words of 32 bits in the machine's order."""
    packed = b"".join(bytes.fromhex(kernels[i : i + 8])[::-1] for i in range(0, len(kernels), 8))
    address = ip_address(packed)
    return str(address.ipv4_mapped if isinstance(address, IPv6Address) and address.ipv4_mapped else address)


def ranks_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """The ranks among the processes of a launch, in their order."""
    ranks = {}
    for process in processes_of(launcher):
        with suppress(psutil.Error):
            if (rank := rank_of(process)) is not None:
                ranks[process.pid] = rank
    return [psutil.Process(pid) for pid in sorted(ranks, key=lambda pid: ranks[pid])]


def seen(launcher: subprocess.Popen[str], *, without: Iterable[psutil.Process] = ()) -> dict[str, set[str]]:
    """Where the processes of a launch listen, by what they are."""
    ranks, found = ranks_of(launcher), {}
    for process in [psutil.Process(launcher.pid), *processes_of(launcher)]:
        if process in without:
            continue
        name = f"rank {ranks.index(process)}" if process in ranks else f"{process.name()} {process.pid}"
        with suppress(psutil.Error, FileNotFoundError):  # ended meanwhile, as the compilers that torch starts do
            found[name] = listening(process)
    return found


def endless_job(folder: Path) -> Path:
    return write_job(folder / "job.yaml", stop={"steps": 10**6})


def end(process: subprocess.Popen[str]) -> None:
    """As Ctrl-C does, so that emulated hosts are taken down at once."""
    process.send_signal(signal.SIGINT)
    ended(process)


def test_the_walk_sees_sockets_that_listen_everywhere() -> None:
    everywhere = (
        "import socket, sys; s = socket.create_server(('', 0)); t = socket.create_server(('::', 0), "
        "family=socket.AF_INET6); "
        "print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", everywhere], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = listening(psutil.Process(process.pid))
        process.communicate()
    assert found == {"0.0.0.0", "::"}


@pytest.mark.parametrize("transport", [pytest.param("shm", marks=pytest.mark.slow), "gloo"])
def test_on_one_host_everything_listens_on_loopback(transport: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = [endless_job(tmp_path), "--plan", f"dp=2 transport={transport}", "--run", run]
    with started("paceline", "train", *arguments, folder=tmp_path) as process:
        wait_for_step(2, run, process)
        found = seen(process)
        end(process)
    assert set().union(*found.values()) == ({"127.0.0.1"} if transport == "gloo" else set()), found


@pytest.mark.slow
@pytest.mark.needs_root
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_the_ranks_of_a_torchrun_listen_where_its_master_is_whatever_the_hosts_name_stands_for(
    transport: str, tmp_path: Path
) -> None:
    """The store of torchrun's agent listens on every interface; the ranks are ours.

    It is torch's own (docs/how-to/secure_the_network.md says so).
    """
    run, hosts = tmp_path / "run", tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{outer_address()} {socket.gethostname()}\n")
    torchrun = [
        BIN / "torchrun",
        "--nnodes",
        1,
        "--nproc-per-node",
        2,
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        free_port(),
    ]
    train = [
        "--no-python",
        BIN / "paceline",
        "train",
        endless_job(tmp_path),
        "--plan",
        f"dp=2 transport={transport}",
        "--run-dir",
        run,
    ]
    command = shlex.join(map(str, [*torchrun, *train]))
    inside = ["--mount", "sh", "-c", f"mount --bind {hosts} /etc/hosts && exec {command}"]
    with started(str(shutil.which("unshare")), *inside, folder=tmp_path) as process:
        wait_for_step(2, run, process)
        found = seen(process, without=[psutil.Process(process.pid)])
        end(process)
    assert set().union(*found.values()) <= {"127.0.0.1"}, found
    assert bool(found["rank 1"]) == (transport != "shm")


def outer_address() -> str:
    """An address of this machine that is not on loopback; skips where it has none."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not ip_address(address.address).is_loopback:
                return address.address
    pytest.skip("this machine has no address but loopback's")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.needs_root
@pytest.mark.needs_iproute2
@pytest.mark.parametrize("transport", [pytest.param("gloo", marks=pytest.mark.slow), "tcp"])
def test_on_emulated_hosts_everything_listens_at_the_hosts_own_address(transport: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "cluster.yaml").write_text("emulate: {hosts: 2, rate: 1gbit}\n")
    arguments = [
        endless_job(tmp_path),
        "--cluster",
        "cluster.yaml",
        "--plan",
        f"dp=2 transport={transport}",
        "--run",
        run,
    ]
    with started("paceline", "train", *arguments, folder=tmp_path) as process:
        wait_for_step(2, run, process)
        found = seen(process)
        end(process)
    for rank, address in enumerate(["10.77.0.1", "10.77.0.2"]):
        assert found.pop(f"rank {rank}") == {address}
    assert not any(found.values()), f"nobody but the ranks listens: {found}"
