"""The queue of a link decides its rate and its losses."""

import json
import subprocess
from typing import Any

import pytest

from paceline.cluster.emulate import EmulatedHost, Emulation
from paceline.cluster.host import Emulate
from paceline.cluster.network import shape


def shown(host: EmulatedHost, *command: str) -> Any:
    """What a command of iproute2 prints in a host, as JSON."""
    inside = ["nsenter", f"--net={host.namespace}", *command]
    return json.loads(subprocess.run(inside, check=True, capture_output=True).stdout)


@pytest.mark.parametrize("rate_bps", [10_000, 25 * 10**6, 10**9, 4 * 10**11])
def test_a_bucket_holds_a_frame_and_two_ms_and_a_queue_what_tcp_sends_at_once_and_fifty(rate_bps: int) -> None:
    words = shape(rate_bps).split()
    burst, queue = (int(words[words.index(name) + 1]) for name in ("burst", "limit"))
    assert burst >= max(10 * 1514, rate_bps / 8 * 0.002 - 1)
    assert queue >= max(4 * 65536, rate_bps / 8 * 0.05 - 1)
    assert queue < 2**32, "what tc takes"


@pytest.mark.needs_root
@pytest.mark.needs_iproute2
def test_the_kernel_takes_the_slowest_and_the_fastest_rate_that_a_cluster_file_may_name() -> None:
    with Emulation(Emulate(hosts=2, rate=("10kbit", "400gbit"))) as emulation:
        queues = [q for host in emulation.hosts for q in shown(host, "tc", "-j", "qdisc", "show")]
    rates = [q["options"]["rate"] for q in queues if q["kind"] == "tbf"]
    assert rates == [10_000 / 8, 400e9 / 8]


@pytest.mark.needs_root
@pytest.mark.needs_iproute2
def test_neighbours_need_not_be_asked_for_so_that_only_what_ranks_send_is_on_a_link() -> None:
    with Emulation(Emulate(hosts=3)) as emulation:
        for host in emulation.hosts:
            known = {neighbour["dst"]: neighbour["state"] for neighbour in shown(host, "ip", "-j", "neigh")}
            assert known == {other.address: ["PERMANENT"] for other in emulation.hosts if other is not host}
