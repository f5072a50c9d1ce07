"""A cluster file with `emulate` is a cluster like any other, for plans and runs."""

from pathlib import Path

import pytest

from paceline.cluster import machine
from paceline.cluster.cluster import Cluster
from paceline.cluster.discover import discover
from paceline.cluster.host import Emulate, bits_per_s
from paceline.cluster.network import shape
from paceline.errors import ClusterError, InvalidValue
from refusals import raises

MACHINE = (
    discover().hosts[0].model_copy(update={"cores": 4, "memory_bytes": 8 * 2**30, "affinity": ((0,), (1,), (2,), (3,))})
)


@pytest.fixture(autouse=True)
def _machine_of_4_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "this_host", lambda: MACHINE)


def read(folder: Path, text: str) -> Cluster:
    (folder / "cluster.yaml").write_text(text)
    return Cluster.load(folder / "cluster.yaml")


def test_hosts_have_the_cores_of_their_quota_and_their_links_the_rate(tmp_path: Path) -> None:
    cluster = read(tmp_path, "emulate: {hosts: 3, rate: [100mbit, 100mbit, 1gbit], cpu: [2, 1, 0.5]}")
    assert [host.name for host in cluster.hosts] == ["host-0", "host-1", "host-2"]
    assert cluster.devices_per_host == (2, 1, 1)
    assert [link.bandwidth_gbps for host in cluster.hosts for link in host.links] == [0.1, 0.1, 1.0]
    assert cluster.hosts[0].memory_bytes == MACHINE.memory_bytes // 3
    assert "3 hosts" in cluster.describe()
    assert cluster.describe().endswith("emulated on this machine, links of 100mbit or 1gbit, cpu 2 or 1 or 0.5")


def test_hosts_without_a_quota_share_the_machines_cores_so_that_each_gets_ranks() -> None:
    assert Cluster(emulate=Emulate(hosts=2)).devices_per_host == (2, 2)
    assert Cluster(emulate=Emulate(hosts=8)).devices_per_host == (1,) * 8


def test_one_value_stands_for_all_hosts() -> None:
    emulate = Emulate(hosts=2, rate="25mbit", cpu=0.5)
    assert (emulate.rates_bps, emulate.cores) == ((25 * 10**6,) * 2, (0.5, 0.5))
    assert (Emulate(hosts=2).rates_bps, Emulate(hosts=2).cores) == ((None, None), (None, None))


def test_an_emulated_cluster_survives_its_yaml_also_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(emulate=Emulate(hosts=2, rate=("25mbit", "1gbit"), cpu=4))
    monkeypatch.setattr(machine, "this_host", pytest.fail)
    assert read(tmp_path, cluster.to_yaml()) == cluster


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: lab\nemulate:\n  host: 2", 'line 3: unknown key "host" in emulate. Did you mean "hosts"?'),
        ("name: lab\nemulat: {hosts: 2}", 'line 2: unknown key "emulat" in the cluster. Did you mean "emulate"?'),
        ("emulate:\n  rate: 1gbit", 'line 1: emulate needs the key "hosts"'),
        ("emulate:\n  hosts: 0", "line 2: emulate.hosts should be at least 1, got 0"),
        (
            "emulate:\n  hosts: 2\n  rate: 100Mbps",
            "line 3: emulate.rate: '100Mbps' is not a rate such as 25mbit or 1gbit",
        ),
        ("emulate:\n  hosts: 2\n  rate: [1gbit, 5]", "line 3: emulate.rate: '5' is not a rate"),
        (
            "\nemulate:\n  hosts: 2\n  cpu: [1, 1, 1]",
            "line 2: emulate: cpu lists 3 values, but there are 2 hosts",
        ),
        ("emulate:\n  hosts: 2\n  cpu: [1, 0]", "line 3: emulate.cpu: 0 is not a valid number of cores"),
        ("emulate:\n  hosts: 2\n  cpu: .nan", "line 3: emulate.cpu: nan is not a valid number of cores"),
        ("emulate:\n  hosts: 2\n  cpu: [1, yes]", "line 3: emulate.cpu: True is not a valid number of cores"),
        (
            "emulate:\n  hosts: 2\n  cpu: 9",
            "line 1: cpu: host-0 should have 9 cores",
        ),
        ("emulate: {hosts: 2, delay_ms: 0}", "line 1: emulate.delay_ms should be more than 0.0, got 0"),
        ("emulate: 4", "line 1: emulate should be a group of keys with values, got 4"),
        (
            "hosts:\n- {name: a, cores: 1, memory_bytes: 1}\nemulate: {hosts: 2}",
            "emulate creates 2 hosts, but 1 are listed",
        ),
        ("name: lab", "cluster.yaml: a cluster needs at least one host. List `hosts`, emulate some"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_its_line_and_the_fix(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ClusterError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("100mbit", 10**8), ("1gbit", 10**9), ("2.5 Gbit/s", 25 * 10**8), ("56kbit", 56_000), ("25MBIT", 25 * 10**6)],
)
def test_a_rate_is_bits_a_second_in_powers_of_ten(text: str, expected: int) -> None:
    assert bits_per_s(text) == expected


@pytest.mark.parametrize(
    "text", ["100", "100mb", "100mbps", "100 MB/s", "-1mbit", "0gbit", "1tbit", "", "1e3mbit", "401gbit", "2kbit"]
)
def test_what_is_no_rate_or_might_mean_bytes_is_refused_with_what_would_be_one(text: str) -> None:
    with raises(InvalidValue, "cluster.rate_invalid"):
        bits_per_s(text)


@pytest.mark.parametrize("rate_bps", [10_000, 25 * 10**6, 10**9, 4 * 10**11])
def test_a_bucket_holds_a_frame_and_two_ms_and_a_queue_what_tcp_sends_at_once_and_fifty(rate_bps: int) -> None:
    words = shape(rate_bps).split()
    burst, queue = (int(words[words.index(name) + 1]) for name in ("burst", "limit"))
    assert burst >= max(10 * 1514, rate_bps / 8 * 0.002 - 1)
    assert queue >= max(4 * 65536, rate_bps / 8 * 0.05 - 1)
    assert queue < 2**32, "what tc takes"
