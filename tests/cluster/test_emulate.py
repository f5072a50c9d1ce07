"""Emulated hosts are a network while they are up, and leave nothing afterwards."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from commands import words_of
from hosts import namespaces_of
from paceline.cluster.emulate import EmulatedHost, Emulation, enter_host
from paceline.cluster.host import Emulate
from paceline.cluster.network import inside
from paceline.errors import ClusterError
from refusals import raises

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_iproute2]
LAUNCHER = """
import sys
from paceline.cluster.host import Emulate
from paceline.cluster.emulate import Emulation
with Emulation(Emulate(hosts=2, cpu=0.5, delay_ms=1)) as emulation:
    print(emulation.hosts[0].group, flush=True)
    sys.stdin.read()
"""


@contextmanager
def connection(emulation: Emulation, source: int, target: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A TCP connection from one host to another: both ends, which wait for 10 s at most."""
    at = emulation.hosts[target]
    with inside(at.namespace, lambda: socket.create_server((at.address, 0))) as server:
        start = inside(
            emulation.hosts[source].namespace, lambda: socket.create_connection(server.getsockname(), timeout=10)
        )
        end, _ = server.accept()
        end.settimeout(10)
        with start, end:
            yield start, end


def receive(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := end.recv(size - len(data))):
        data += more
    return data


def run_inside(host: EmulatedHost, *command: str) -> list[str]:
    """Lines that a process prints that has entered the host before it ran the command."""
    done = subprocess.run(
        command,
        preexec_fn=lambda: enter_host(host.entry),
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.splitlines()


def shown(namespace: str, *command: str) -> Any:
    """What a command of iproute2 prints in a namespace, as JSON."""
    inside = ["nsenter", f"--net={namespace}", *command]
    return json.loads(subprocess.run(inside, check=True, capture_output=True).stdout)


def queues_in(namespace: str) -> list[Any]:
    """The queues that limit a rate, as `tc` describes them."""
    return [queue for queue in shown(namespace, "tc", "-j", "qdisc", "show") if queue["kind"] == "tbf"]


def wait_until(condition: Callable[[], object], deadline_s: float = 30) -> None:
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


# The network


def test_what_one_host_sends_another_is_counted_on_their_links_and_on_no_other() -> None:
    with Emulation(Emulate(hosts=3)) as emulation, connection(emulation, 0, 1) as (start, end):
        payload = os.urandom(200_000)
        start.sendall(payload)
        assert receive(end, len(payload)) == payload
        carried = emulation.carried()
    assert list(carried) == ["host-0", "host-1", "host-2"]
    assert 1 < carried["host-0"].sent_bytes / len(payload) < 1.1, "the headers of Ethernet, IP and TCP are 5 %"
    assert carried["host-1"].received_bytes == carried["host-0"].sent_bytes
    assert carried["host-0"].received_bytes == carried["host-1"].sent_bytes > 0, "acknowledgements"
    assert carried["host-2"].sent_bytes == carried["host-2"].received_bytes == 0


def test_every_link_has_its_rate_both_ways() -> None:
    with Emulation(Emulate(hosts=3, rate=("25mbit", "1gbit", "100mbit"))) as emulation:
        bridge, hosts = emulation.hosts[0].bridge, emulation.hosts
        downwards = {q["dev"]: q["options"]["rate"] for q in queues_in(bridge)}
        upwards = [q["options"]["rate"] for host in hosts for q in queues_in(host.namespace)]
        assert namespaces_of(os.getpid()) == [bridge, *(host.namespace for host in hosts)]
    bytes_per_s = [25e6 / 8, 1e9 / 8, 100e6 / 8]
    assert upwards == bytes_per_s
    assert downwards == dict(zip(("host-0", "host-1", "host-2"), bytes_per_s, strict=True))


@pytest.mark.parametrize("delay_ms", [None, 1])
def test_a_link_that_is_cut_drops_silently_and_connections_go_on_once_it_is_mended(delay_ms: float | None) -> None:
    with Emulation(Emulate(hosts=2, delay_ms=delay_ms)) as emulation, connection(emulation, 0, 1) as (start, end):
        emulation.cut(1)
        start.sendall(b"lost and sent again")
        end.settimeout(0.3)
        with pytest.raises(TimeoutError):
            end.recv(1)
        emulation.mend(1)
        end.settimeout(10)
        assert receive(end, 19) == b"lost and sent again"


def test_a_cut_is_made_once_its_order_returns_however_late_the_relay_is() -> None:
    with Emulation(Emulate(hosts=2, delay_ms=1)) as emulation:
        [keeper] = [child for child in psutil.Process().children() if "paceline.cluster.emulate" in words_of(child)]
        order = threading.Thread(target=emulation.cut, args=(1,))
        keeper.suspend()
        try:
            order.start()
            order.join(0.3)
            assert order.is_alive(), "it does not wait for the relay"
        finally:
            keeper.resume()
        order.join(10)
        assert not order.is_alive()


def test_a_relay_that_died_cuts_nothing_and_says_so() -> None:
    with Emulation(Emulate(hosts=2, delay_ms=1)) as emulation:
        [keeper] = [child for child in psutil.Process().children() if "paceline.cluster.emulate" in words_of(child)]
        keeper.kill()
        with raises(ClusterError, "emulate.link_failed", action="cut", host=1, reason="the relay died"):
            emulation.cut(1)


def test_an_answer_comes_after_twice_the_delay_and_all_of_what_was_sent_arrives_in_order() -> None:
    with (
        Emulation(Emulate(hosts=3, rate="1gbit", delay_ms=30)) as emulation,
        connection(emulation, 2, 0) as (start, end),
    ):
        started = time.monotonic()
        start.sendall(b"?")
        assert receive(end, 1) == b"?"
        end.sendall(b"!")
        assert receive(start, 1) == b"!"
        assert time.monotonic() - started >= 0.06
        payload = os.urandom(1_000_000)
        sender = threading.Thread(target=start.sendall, args=(payload,))
        sender.start()
        assert receive(end, len(payload)) == payload
        sender.join()
        carried = emulation.carried()
    assert 1 < carried["host-0"].received_bytes / len(payload) < 1.1
    assert carried["host-1"].received_bytes == 0


def test_where_packets_cannot_be_delayed_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cluster.emulate.build", lambda *_, **__: None)
    with (
        raises(ClusterError, "emulate.delay_failed"),
        Emulation(Emulate(hosts=2, delay_ms=1)),
    ):
        pass


def test_nothing_of_it_is_in_the_machines_own_network() -> None:
    before = socket.if_nameindex()
    with Emulation(Emulate(hosts=2)):
        assert socket.if_nameindex() == before


def test_two_emulations_at_once_have_nothing_in_common() -> None:
    with Emulation(Emulate(hosts=2, cpu=1)) as one, Emulation(Emulate(hosts=2, cpu=1)) as other:
        assert {h.namespace for h in one.hosts}.isdisjoint(h.namespace for h in other.hosts)
        assert {h.group for h in one.hosts}.isdisjoint(h.group for h in other.hosts)
        with connection(one, 0, 1) as (start, end):
            start.sendall(b"x")
            assert receive(end, 1) == b"x"
        assert other.carried()["host-1"].received_bytes == 0


def test_the_kernel_takes_the_slowest_and_the_fastest_rate_that_a_cluster_file_may_name() -> None:
    with Emulation(Emulate(hosts=2, rate=("10kbit", "400gbit"))) as emulation:
        rates = [q["options"]["rate"] for host in emulation.hosts for q in queues_in(host.namespace)]
    assert rates == [10_000 / 8, 400e9 / 8]


def test_neighbours_need_not_be_asked_for_so_that_only_what_ranks_send_is_on_a_link() -> None:
    with Emulation(Emulate(hosts=3)) as emulation:
        for host in emulation.hosts:
            known = {neighbour["dst"]: neighbour["state"] for neighbour in shown(host.namespace, "ip", "-j", "neigh")}
            assert known == {other.address: ["PERMANENT"] for other in emulation.hosts if other is not host}


# The hosts


def test_a_process_that_enters_a_host_has_its_network_and_its_cores_and_so_has_what_it_starts() -> None:
    with Emulation(Emulate(hosts=2, cpu=(1, 0.5))) as emulation:
        for host in emulation.hosts:
            child = "stat -L -c %i /proc/self/ns/net; cat /proc/self/cgroup"
            namespace, *groups = run_inside(host, "sh", "-c", f"sh -c '{child}'; true")
            assert int(namespace) == os.stat(host.namespace).st_ino
            assert host.group is not None
            assert any(group.endswith(f"/{host.group.name}") for group in groups)


def test_a_host_that_is_gone_cannot_be_entered() -> None:
    with Emulation(Emulate(hosts=1)) as emulation:
        host = emulation.hosts[0]
    with raises(ClusterError, "emulate.namespace_not_entered", path=host.namespace):
        enter_host(host.entry)


# The end


def visit(namespace: str, for_s: float = 1000) -> subprocess.Popen[bytes]:
    """Somebody looks around in a host."""
    visitor = subprocess.Popen(["nsenter", f"--net={namespace}", "sleep", str(for_s)])
    wait_until(lambda: Path(f"/proc/{visitor.pid}/comm").read_text() == "sleep\n")
    return visitor


def there_is(namespace: int) -> bool:
    """True if a process of this machine is in a network namespace or holds it, by its number."""
    for pid in psutil.pids():
        with suppress(OSError):
            held = Path(f"/proc/{pid}/ns/net"), *Path(f"/proc/{pid}/fd").iterdir()
            if any(os.readlink(link) == f"net:[{namespace}]" for link in held if os.path.lexists(link)):
                return True
    return False


def test_nothing_is_left_after_the_end_and_whoever_is_still_inside_is_ended() -> None:
    with Emulation(Emulate(hosts=2, cpu=1)) as emulation:
        numbers = [os.stat(path).st_ino for path in namespaces_of(os.getpid())]
        groups = [host.group for host in emulation.hosts]
        assert len(numbers) == 3, "2 hosts and a bridge"
        assert all(map(there_is, numbers))
        assert all(group is not None and group.exists() for group in groups)
        visitor = visit(emulation.hosts[1].namespace)
    assert visitor.wait(10) == -signal.SIGTERM
    assert not any(map(there_is, numbers))
    assert not any(group is None or group.exists() for group in groups)


def test_nothing_is_left_after_an_error() -> None:
    def fail() -> None:
        with Emulation(Emulate(hosts=2, cpu=1)) as emulation:
            groups.append(emulation.hosts[0].group)
            raise ValueError("in between")

    groups: list[Path | None] = []
    with pytest.raises(ValueError, match="in between"):
        fail()
    assert namespaces_of(os.getpid()) == []
    assert not any(group is None or group.exists() for group in groups)


def test_a_group_that_the_kernel_does_not_limit_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def refused(folder: Path, cores: float) -> Path:
        folder.mkdir()
        made.append(folder)
        raise ClusterError("test.planted", "cpu {cores:g} is refused", cores=cores)

    monkeypatch.setattr("paceline.cluster.cgroup.make_group", refused)
    with pytest.raises(ClusterError, match="cpu 1 is refused"), Emulation(Emulate(hosts=1, cpu=1)):
        pass
    assert len(made) == 1
    assert not made[0].exists()


@dataclass(frozen=True)
class Launcher:
    """A process that keeps emulated hosts: its keeper, namespaces and control groups."""

    process: subprocess.Popen[str]
    keeper: psutil.Process
    namespaces: list[str]
    groups: list[Path]


@contextmanager
def launcher() -> Iterator[Launcher]:
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            group = Path(process.stdout.readline().strip())
            [keeper] = psutil.Process(process.pid).children()
            groups = [group, group.with_name(group.name[:-1] + "1")]
            assert all(group.exists() for group in groups)
            yield Launcher(process, keeper, namespaces_of(process.pid), groups)
        finally:
            process.kill()


def test_a_launcher_that_is_killed_leaves_nothing_once_its_keeper_has_seen_it() -> None:
    with launcher() as it:
        visitor = visit(it.namespaces[1], for_s=1)
        it.process.kill()
    it.keeper.wait(30)
    assert not any(group.exists() for group in it.groups)
    assert visitor.wait(10) == 0, "it had its time to end by itself"


def test_what_a_killed_launcher_and_its_killed_keeper_left_is_empty_groups_which_the_next_start_removes() -> None:
    with launcher() as it:
        numbers = [os.stat(path).st_ino for path in it.namespaces]
        it.keeper.kill()
        it.process.kill()
    it.keeper.wait(30)
    assert not any(map(there_is, numbers))
    for group in it.groups:
        os.utime(group, (0, 0))  # old enough not to be one that is just being made
    with Emulation(Emulate(hosts=1, cpu=0.5)):
        assert not any(group.exists() for group in it.groups)


def test_hosts_whose_launcher_lives_are_left_alone_also_without_a_keeper() -> None:
    with launcher() as it:
        it.keeper.kill()
        for group in it.groups:
            os.utime(group, (0, 0))
        with Emulation(Emulate(hosts=1, cpu=0.5)):
            assert all(group.exists() for group in it.groups)
        it.process.communicate("")
        assert it.process.returncode == 0
    assert not any(group.exists() for group in it.groups)


# Where hosts cannot be emulated


def test_without_root_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with raises(ClusterError, "emulate.needs_root"), Emulation(Emulate(hosts=2)):
        pass


def test_without_iproute2_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        raises(ClusterError, "emulate.command_missing", missing="ip and tc and bridge"),
        Emulation(Emulate(hosts=2)),
    ):
        pass


def test_where_the_kernel_refuses_its_words_are_told_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in ("ip", "tc", "bridge"):
        (tmp_path / command).write_text("#!/bin/sh\necho 'Operation not permitted' >&2\nexit 1\n")
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with (
        raises(ClusterError, "emulate.command_failed", command="ip -batch -", reason="Operation not permitted"),
        Emulation(Emulate(hosts=2)),
    ):
        pass


def test_a_bad_line_among_many_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cluster.network.shape", lambda _: "no-such-queue")
    with raises(ClusterError, "emulate.command_failed"), Emulation(Emulate(hosts=2)):
        pass
