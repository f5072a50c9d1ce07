"""Network of emulated hosts, which iproute2 sets up: namespaces and a bridge.

There is one namespace for each host, and another for the bridge. The machine's own namespace is not changed. Neighbours
and ports are configured statically, and IPv6 is off, so that a link carries only the traffic of the ranks.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from paceline.errors import ClusterError

INTERFACE = "eth0"  # name of the interface of every host
OTHER_SIDE = "apart"  # bridge of the hosts on one side of a network partition
_MTU = 1500
_FRAME = 14  # size of the Ethernet header in bytes
_BURST_S = 0.002
_QUEUE_S = 0.05


@dataclass(frozen=True)
class Wire:
    """The link of one host, from its interface to a port of the bridge.

    Attributes:
        namespace: path of the host's network namespace, in which the interface is `INTERFACE`.
        host: name of the host and of its port on the bridge.
        rate_bps: rate in bits/s per direction, including headers; None if unlimited.
    """

    namespace: str
    host: str
    address: str
    mac: str
    rate_bps: int | None


def wires(namespaces: Sequence[str], rates_bps: Sequence[int | None]) -> list[Wire]:
    """Describe a link for every host, with addresses in 10.77.0.0/24."""
    return [
        Wire(path, f"host-{i}", f"10.77.0.{i + 1}", f"02:00:00:00:00:{i + 1:02x}", rate)
        for i, (path, rate) in enumerate(zip(namespaces, rates_bps, strict=True))
    ]


def build(bridge: str, links: Sequence[Wire], *, relayed: bool = False) -> None:
    """Create the links and the bridge of an emulated network, in empty namespaces.

    With `relayed`, a relay connects the links instead of the bridge.

    Raises:
        ClusterError: the kernel refuses; the error contains the message of the kernel.
    """
    for namespace in (bridge, *(link.namespace for link in links)):
        inside(namespace, _without_ipv6)
    joined = ["link add bridge type bridge mcast_snooping 0", "link set bridge up"]
    for link in links:
        peer = f"peer name {INTERFACE} address {link.mac} mtu {_MTU} netns {link.namespace}"
        joined += [f"link add {link.host} mtu {_MTU} type veth {peer}", f"link set {link.host} up"]
    _run(bridge, ["ip", "-batch", "-"], joined)
    for link in () if relayed else links:
        plug(bridge, link)
    _run(
        bridge,
        ["tc", "-batch", "-"],
        [f"qdisc add dev {link.host} root {shape(link.rate_bps)}" for link in links],
    )
    for link in links:
        others = [
            f"neigh add {other.address} lladdr {other.mac} dev {INTERFACE} nud permanent"
            for other in links
            if other is not link
        ]
        own = ["link set lo up", f"addr add {link.address}/24 dev {INTERFACE}", f"link set {INTERFACE} up", *others]
        _run(link.namespace, ["ip", "-batch", "-"], own)
        _run(link.namespace, ["tc", "-batch", "-"], [f"qdisc add dev {INTERFACE} root {shape(link.rate_bps)}"])


def shape(rate_bps: int | None) -> str:
    """Return the arguments of `tc` for a queue with rate `rate_bps`.

    All kinds of queues in this module count bytes on the wire.

    The token bucket holds 2 ms of traffic, so that late timers on a busy machine do not reduce the rate. The queue
    holds 50 ms of traffic, but at least a few segments of 64 KiB. TCP passes such segments to the network at once, and
    the kernel drops a segment as a whole.
    """
    if rate_bps is None:
        return "pfifo limit 1000"
    burst = max(10 * (_MTU + _FRAME), int(rate_bps / 8 * _BURST_S))
    queue = max(4 * 2**16, int(rate_bps / 8 * _QUEUE_S))
    return f"tbf rate {rate_bps}bit burst {burst} limit {queue}"


def carried(bridge: str, links: Sequence[Wire]) -> list[tuple[int, int]]:
    """Count the bytes that each host has sent and received so far, including headers."""
    received = _counted(bridge)
    return [(_counted(link.namespace)[INTERFACE], received[link.host]) for link in links]


def plug(bridge: str, link: Wire) -> None:
    """Make the bridge forward the packets of a link according to their destination address.

    The bridge may have learned an address before learning was turned off; this address is replaced.
    """
    _run(bridge, ["ip", "link", "set", link.host, "master", "bridge"])
    to_no_other = "learning off flood off mcast_flood off bcast_flood off"
    settings = [f"link set dev {link.host} {to_no_other}", f"fdb replace {link.mac} dev {link.host} master static"]
    _run(bridge, ["bridge", "-batch", "-"], settings)


def unplug(bridge: str, link: Wire) -> None:
    """Silently drop the packets of a link in both directions.

    TCP connections stay open and wait.
    """
    _run(bridge, ["ip", "link", "set", link.host, "nomaster"])


def move(bridge: str, links: Sequence[Wire], name: str) -> None:
    """Move links to a separate bridge. `plug` moves a link back."""
    if name not in _run(bridge, ["ip", "-o", "link", "show"]):
        _run(bridge, ["ip", "-batch", "-"], [f"link add {name} type bridge mcast_snooping 0", f"link set {name} up"])
    for link in links:
        _run(bridge, ["ip", "link", "set", link.host, "nomaster"])
        _run(bridge, ["ip", "link", "set", link.host, "master", name])


def _without_ipv6() -> None:
    for which in ("all", "default"):
        setting = Path(f"/proc/sys/net/ipv6/conf/{which}/disable_ipv6")  # absent from a kernel without IPv6
        if setting.exists():
            setting.write_text("1")


def _counted(namespace: str) -> dict[str, int]:
    """Return the bytes that left through the root queue of each interface."""
    queues = json.loads(_run(namespace, ["tc", "-s", "-j", "qdisc", "show"]))
    return {queue["dev"]: queue["bytes"] for queue in queues if queue.get("root")}


def _run(namespace: str, command: list[str], lines: Sequence[str] = ()) -> str:
    text = "".join(f"{line}\n" for line in lines)
    done = inside(namespace, lambda: subprocess.run(command, input=text, capture_output=True, text=True, check=False))
    if done.returncode:
        number = re.search(r"Command failed -:(\d+)", done.stderr)  # label of the line in the output of iproute2
        at = f", at `{lines[int(number[1]) - 1]}`" if number else ""
        raise ClusterError(
            "emulate.command_failed",
            "`{command}` failed{at}: {reason}. {advice}",
            command=" ".join(command),
            at=at,
            reason=" ".join(done.stderr.split()),
            advice=ADVICE,
        )
    return done.stdout


T = TypeVar("T")
ADVICE = "Emulated hosts need CAP_NET_ADMIN and CAP_SYS_ADMIN, as root has; a container needs --privileged."
_CLONE_NEWNET = 0x40000000


@contextmanager
def new_namespace() -> Iterator[int]:
    """Create a network namespace, which exists within the context.

    Raises:
        ClusterError: the kernel refuses.
    """

    def make() -> int:
        call_libc("unshare", _CLONE_NEWNET)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    try:
        descriptor = _in_thread(make)
    except OSError as error:
        raise ClusterError(
            "emulate.no_namespace",
            "a network namespace cannot be created: {reason}. {advice}",
            reason=error.strerror,
            advice=ADVICE,
        ) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def path_of(descriptor: int) -> str:
    """Return a path with which other processes can open a descriptor of this process."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def enter(path: str) -> None:
    """Move the calling thread into a network namespace.

    Threads and processes that it starts later are also in this namespace.

    Raises:
        ClusterError: the launcher that created the namespace has ended, or this process may not enter the namespace.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            call_libc("setns", descriptor, _CLONE_NEWNET)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ClusterError(
            "emulate.namespace_not_entered",
            "the network namespace {path} cannot be entered: {reason}. This needs root, and a launcher that is "
            "still running.",
            path=path,
            reason=error.strerror,
        ) from error


def inside(path: str, function: Callable[[], T]) -> T:
    """Call a function inside a network namespace, in another thread.

    Sockets that the function opens and processes that it starts stay in the namespace.
    """

    def run() -> T:
        enter(path)
        return function()

    return _in_thread(run)


def _in_thread(function: Callable[[], T]) -> T:
    """Call a function in a new thread, which may leave its namespace."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def call_libc(name: str, *arguments: int) -> None:
    """Call a function of libc that Python provides only from version 3.12."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_ALL_PROTOCOLS = 3
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
# size in bytes, larger than the queue of any link, so that the queue drops packets and not the socket
_BUFFER = 64 * 2**20
_HEADER = 10  # size in bytes of the virtio header before a frame, for pending checksum and segmentation
_LARGEST = 2**17
_BATCH = 64  # number of frames that are read from one port per turn


class _DelayedBytes(NamedTuple):
    due: float
    source: int
    target: int
    frame: bytes


class Relay(threading.Thread):
    """A thread that carries packets between the ports of the bridge's namespace.

    The thread runs until the process ends. `cut` has the numbers of the hosts whose packets are dropped in both
    directions.
    """

    def __init__(self, bridge: str, links: Sequence[Wire], delay_s: float) -> None:
        """Open the ports, which must exist and belong to no bridge.

        The thread carries packets after `start` is called.
        """
        super().__init__(name="relay", daemon=True)
        self.cut: set[int] = set()
        self._delay_s = delay_s
        self._by_address = {bytes.fromhex(link.mac.replace(":", "")): number for number, link in enumerate(links)}
        self._ports = inside(bridge, lambda: [_port(link.host) for link in links])
        self._numbers = {port: number for number, port in enumerate(self._ports)}
        self._held: deque[_DelayedBytes] = deque()

    def run(self) -> None:
        """Carry packets in the order of their arrival, each with the same delay."""
        while True:
            wait_s = max(0.0, self._held[0].due - time.monotonic()) if self._held else None
            ready, _, _ = select.select(self._ports, [], [], wait_s)
            for port in ready:
                self._take(port)
            while self._held and self._held[0].due <= time.monotonic():
                self._pass_on(self._held.popleft())

    def _take(self, port: socket.socket) -> None:
        for _ in range(_BATCH):
            try:
                frame = port.recv(_LARGEST)
            except OSError:  # no frame is left, or the link is being removed
                return
            target = self._by_address.get(frame[_HEADER : _HEADER + 6])
            if target is not None:
                self._held.append(_DelayedBytes(time.monotonic() + self._delay_s, self._numbers[port], target, frame))

    def _pass_on(self, held: _DelayedBytes) -> None:
        if self.cut.isdisjoint((held.source, held.target)):
            try:
                self._ports[held.target].send(held.frame)
            except OSError:  # the queue of the link is full
                return


def _port(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # the socket receives nothing before it is bound
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    try:
        port.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _BUFFER)
        port.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
    except PermissionError:  # in a user namespace, the size is limited by the system
        port.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    port.setblocking(False)
    port.bind((name, _ALL_PROTOCOLS))
    return port


_CLONE_NEWUSER = 0x10000000
# Kernel settings that forbid user namespaces, each with the value that forbids them and the value that allows them.
_SETTINGS = {
    "kernel.unprivileged_userns_clone": ("0", "1"),
    "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
    "user.max_user_namespaces": ("0", "10000"),
}


def become_root_of_own_namespace(system: Path = Path("/proc/sys")) -> None:
    """Move this process into a new user namespace, where its user is root.

    Processes that this process starts later are also in the namespace. Call this before the process starts any thread.

    Raises:
        ClusterError: the kernel does not allow a new user namespace.
    """
    if not sys.platform.startswith("linux"):
        return  # the emulation reports the reason
    user, group = os.geteuid(), os.getegid()
    own = Path("/proc/self")
    try:
        call_libc("unshare", _CLONE_NEWUSER)
        (own / "setgroups").write_text("deny")  # without this, the kernel does not allow writing gid_map
        (own / "uid_map").write_text(f"0 {user} 1")
        (own / "gid_map").write_text(f"0 {group} 1")
    except OSError as error:
        raise ClusterError(
            "emulate.user_namespace_refused",
            "emulated hosts need root, or a user namespace, which the kernel refuses: {reason}. {advice}",
            reason=error.strerror,
            advice=_advice(system),
        ) from error


def _advice(system: Path) -> str:
    for name, (refuses, allows) in _SETTINGS.items():
        file = system / name.replace(".", "/")
        if file.exists() and file.read_text().strip() == refuses:
            return f"It would be allowed by `sudo sysctl -w {name}={allows}`; or start the command with sudo."
    return "Start the command with sudo, or in a container with --privileged."
