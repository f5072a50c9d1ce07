"""The network of emulated hosts, made with iproute2: namespaces and a bridge.

There is a namespace per host, and another for the bridge. Nothing is made in the namespace that the machine itself
uses. Neighbours and ports are entered by hand and IPv6 is off, so that nothing but what the ranks send is on a link.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.emulate.namespace import ADVICE, inside
from paceline.errors import ClusterError

INTERFACE = "eth0"  # of every host
OTHER_SIDE = "apart"  # bridge of the hosts on one side of a split network
_MTU = 1500
_FRAME = 14  # bytes of Ethernet's header
_BURST_S = 0.002
_QUEUE_S = 0.05


@dataclass(frozen=True)
class Wire:
    """One host's link: from `INTERFACE` in its namespace to a port of the bridge.

    Attributes:
        namespace: path of the host's.
        host: its name, and that of its port of the bridge.
        rate_bps: bits/s each way, headers included; None leaves it as fast as the machine.
    """

    namespace: str
    host: str
    address: str
    mac: str
    rate_bps: int | None


def wires(namespaces: Sequence[str], rates_bps: Sequence[int | None]) -> list[Wire]:
    """A link for every host, with addresses in 10.77.0.0/24."""
    return [
        Wire(path, f"host-{i}", f"10.77.0.{i + 1}", f"02:00:00:00:00:{i + 1:02x}", rate)
        for i, (path, rate) in enumerate(zip(namespaces, rates_bps, strict=True))
    ]


def build(bridge: str, links: Sequence[Wire], *, relayed: bool = False) -> None:
    """Make the links and bridge of an emulated network, in namespaces that are still empty.

    `relayed` leaves joining the links to a relay.

    Raises:
        ClusterError: the kernel refused; with its words.
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
    """The queue that lets through `rate_bps`, in the words of `tc`.

    Every kind that is used here counts bytes as they are on the wire.

    The bucket holds what 2 ms bring, so that a timer that comes late on a busy machine costs no rate, and the queue 50
    ms, but never less than a few of the 64 KiB pieces that TCP hands to the network at once, and that the kernel drops
    whole.
    """
    if rate_bps is None:
        return "pfifo limit 1000"
    burst = max(10 * (_MTU + _FRAME), int(rate_bps / 8 * _BURST_S))
    queue = max(4 * 2**16, int(rate_bps / 8 * _QUEUE_S))
    return f"tbf rate {rate_bps}bit burst {burst} limit {queue}"


def carried(bridge: str, links: Sequence[Wire]) -> list[tuple[int, int]]:
    """Bytes that each host has sent and received so far, headers included."""
    received = _counted(bridge)
    return [(_counted(link.namespace)[INTERFACE], received[link.host]) for link in links]


def plug(bridge: str, link: Wire) -> None:
    """Make the bridge carry a link's packets, each to the one link with its address.

    An address that the bridge has learned in the moment before it is told not to is replaced.
    """
    _run(bridge, ["ip", "link", "set", link.host, "master", "bridge"])
    to_no_other = "learning off flood off mcast_flood off bcast_flood off"
    settings = [f"link set dev {link.host} {to_no_other}", f"fdb replace {link.mac} dev {link.host} master static"]
    _run(bridge, ["bridge", "-batch", "-"], settings)


def unplug(bridge: str, link: Wire) -> None:
    """Make a link's packets go nowhere, both ways, silently: TCP connections stay, and wait."""
    _run(bridge, ["ip", "link", "set", link.host, "nomaster"])


def move(bridge: str, links: Sequence[Wire], name: str) -> None:
    """Join links to one another by a bridge of their own, apart from the others. `plug` brings one back."""
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
    """Bytes that left through the root queue of each interface."""
    queues = json.loads(_run(namespace, ["tc", "-s", "-j", "qdisc", "show"]))
    return {queue["dev"]: queue["bytes"] for queue in queues if queue.get("root")}


def _run(namespace: str, command: list[str], lines: Sequence[str] = ()) -> str:
    text = "".join(f"{line}\n" for line in lines)
    done = inside(namespace, lambda: subprocess.run(command, input=text, capture_output=True, text=True, check=False))
    if done.returncode:
        number = re.search(r"Command failed -:(\d+)", done.stderr)  # as iproute2 names the line
        at = f", at `{lines[int(number[1]) - 1]}`" if number else ""
        raise ClusterError(f"`{' '.join(command)}` failed{at}: {' '.join(done.stderr.split())}. {ADVICE}")
    return done.stdout
