"""A cluster that nobody has at hand is planned for by its name: what the name says must be what is planned for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.cluster.catalogue import CATALOGUE
from paceline.cluster.cluster import Cluster, cluster_from
from paceline.cluster.named import cluster_names, read_name
from paceline.errors import ClusterError
from refusals import raises

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "cluster.md"


def rate_gbps(cluster: Cluster) -> float:
    [link] = cluster.hosts[0].links
    assert link.bandwidth_gbps is not None
    return link.bandwidth_gbps


def test_a_name_says_hosts_devices_links_and_price() -> None:
    cluster = cluster_from("64x8xH100-SXM, 400gbit, 2.5/h")
    assert cluster.devices_per_host == (8,) * 64
    assert cluster.kind == "cuda"
    assert {(gpu.name, gpu.memory_bytes, gpu.bf16) for host in cluster.hosts for gpu in host.gpus} == {
        ("H100-SXM", 80 * 2**30, True)
    }
    assert rate_gbps(cluster) == 3200  # of a host
    assert cluster.price_per_hour == 2.5
    assert cluster.describe() == (
        "64x8xH100-SXM: 64 hosts of 8 × H100-SXM (80 GiB), 400 Gbit/s from each device to other hosts, 2.5 an "
        "hour for each"
    )


@pytest.mark.parametrize(
    "rate",
    ["400gbit", "400 Gbit/s", "400Gb/s", "400gbps", "0.4tbit", "400gbit/device", "3200gbit/host", "3200gbit per host"],
)
def test_a_rate_is_of_a_device_or_of_a_host(rate: str) -> None:
    assert rate_gbps(cluster_from(f"2x8xA100-SXM-80, {rate}")) == pytest.approx(3200)


def test_a_rate_that_is_not_given_is_the_usual_one_and_said_to_be() -> None:
    cluster = cluster_from("2x8xA100-SXM-80")
    assert rate_gbps(cluster) == 1600
    assert "200 Gbit/s from each device to other hosts, assumed since the name gives no rate" in cluster.describe()


@pytest.mark.parametrize(
    ("name", "hosts", "devices"),
    [
        ("H100-SXM", 1, 1),
        ("8xH100-SXM", 1, 8),
        ("3×8×MI300X", 3, 8),
        ("2 x 72 x GB200", 2, 72),
        ("256xTPU-v5e", 1, 256),
    ],
)
def test_short_and_odd_forms_are_understood(name: str, hosts: int, devices: int) -> None:
    assert cluster_from(name).devices_per_host == (devices,) * hosts


@pytest.mark.parametrize(
    ("words", "times", "beyond"),
    [
        ("oversubscribed 3:1", 3.0, 1),
        ("oversubscribed 1.5 : 1", 1.5, 1),
        ("oversubscribed 3:1 beyond 32", 3.0, 32),
        ("400gbit, Oversubscribed 7:1 beyond 384 hosts, 2/h", 7.0, 384),
    ],
)
def test_a_network_may_be_oversubscribed_beyond_some_hosts(words: str, times: float, beyond: int) -> None:
    cluster = cluster_from(f"64x8xH100-SXM, {words}")
    assert rate_gbps(cluster) == 3200
    [link] = cluster.hosts[0].links
    assert (link.oversubscription, link.oversubscribed_beyond) == (times, beyond)
    assert f"oversubscribed {times:g}:1" in cluster.describe()


def test_a_description_says_which_hosts_fast_links_join() -> None:
    assert (
        "36 hosts of 4 × GB200 (186 GiB), joined to 2 domains of 72 by NVLink 5"
        in cluster_from("36x4xGB200").describe()
    )
    assert "joined to one domain of 8" in cluster_from("2x4xGB300").describe()
    assert "joined" not in cluster_from("2x8xB200").describe()


def test_a_power_or_a_memory_in_a_name_stays_with_the_cluster() -> None:
    cluster = cluster_from("2x8xH100 500W, 400gbit")
    assert cluster.name == "2x8xH100-SXM 500W"
    assert {gpu.name for gpu in cluster.hosts[0].gpus} == {"H100-SXM 500W"}
    assert cluster_from(cluster.name).devices == 16
    assert cluster_from("A100-SXM-64GB").hosts[0].gpus[0].memory_bytes == 64 * 2**30


def test_a_device_of_a_cluster_of_cpus_is_a_core() -> None:
    cluster = cluster_from("4x16xcpu-avx512, 25gbit/host")
    assert (cluster.kind, cluster.devices, rate_gbps(cluster)) == ("cpu", 64, 25)
    assert "4 hosts of 16 × cores of CPU-AVX512" in cluster.describe()


@given(
    hosts=st.integers(1, 300),
    per_host=st.integers(1, 16),
    device=st.sampled_from([name for name in CATALOGUE if name != "CPU"]),
    rate=st.none() | st.integers(1, 800),
    price=st.none() | st.integers(0, 99),
)
@settings(max_examples=50)
def test_any_shape_is_read_back_from_the_yaml_that_it_is_written_as(
    hosts: int, per_host: int, device: str, rate: int | None, price: int | None
) -> None:
    words = [
        f"{hosts}x{per_host}x{device}",
        *([f"{rate}gbit"] if rate else []),
        *([f"{price}/h"] if price is not None else []),
    ]
    cluster = cluster_from(", ".join(words))
    assert cluster.devices == hosts * per_host
    assert "hosts" not in cluster.to_yaml()  # thousands of lines otherwise
    import yaml

    assert Cluster.model_validate(yaml.safe_load(cluster.to_yaml())) == cluster
    assert read_name(read_name(cluster.name).shape).shape == cluster.name


def test_thousands_of_hosts_share_what_is_alike() -> None:
    cluster = cluster_from("512x8xH100-SXM, 400gbit")
    assert cluster.devices == 4096
    assert len({id(gpu) for host in cluster.hosts for gpu in host.gpus}) == 8
    assert len({host.name for host in cluster.hosts}) == 512


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("0x8xH100", "has no devices: both numbers must be at least 1, e.g. 1x8xH100-SXM"),
        ("64x0xH100-SXM", "has no devices: both numbers must be at least 1, e.g. 64x8xH100-SXM"),
        ("3x8x", "write HOSTSxDEVICESxDEVICE, e.g. 64x8xH100-SXM, 400gbit"),
        ("3x8x2xH100", "write HOSTSxDEVICESxDEVICE"),
        ("2.5x8xH100", "write HOSTSxDEVICESxDEVICE"),
        ("-3x8xH100", "write HOSTSxDEVICESxDEVICE"),
        ("", "write HOSTSxDEVICESxDEVICE"),
        ("1000000x8xH100", "has 8,000,000 devices. Plans support at most 1,000,000 devices"),
        ("64xH100-SXM", "is one host with 64 devices, but hosts with such devices usually have 8: 8x8xH100-SXM"),
        ("8xH1000", 'cluster "8xH1000": "H1000" is not in the catalogue of hardware. Did you mean '),
        ("8xH100, oversubscribed 0.5:1", "oversubscription ratio must be at least 1:1"),
        ("8xH100, oversubscribed 2:1, oversubscribed 3:1", "two values for its oversubscription"),
        ("8xH100, fast", '"fast" is not a rate such as 400gbit or 3200gbit/host, a price such as 2.5/h'),
        ("2x8xH100, 0gbit", "needs a rate above 0"),
        ("2x8xH100, 400gbit, 200gbit", "two values for its rate"),
        ("2x8xH100, 2/h, 3/h", "two values for its price"),
    ],
)
def test_an_impossible_name_says_what_would_work(name: str, message: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(message)):
        cluster_from(name)


def test_a_yaml_file_may_name_the_catalogue(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("name: the new room\ncatalogue: 2x8xH100-SXM, 400gbit\nprice_per_hour: 1.5\n")
    cluster = Cluster.load(file)
    assert (cluster.name, cluster.devices, cluster.price_per_hour, cluster.only_planned) == (
        "the new room",
        16,
        1.5,
        True,
    )
    assert cluster_from(file) == cluster == cluster_from(str(file))
    file.write_text("name: the new room\ncatalogue: 2x8xH1000\n")
    with raises(ClusterError, "cluster.name_wrong", text="2x8xH1000"):
        Cluster.load(file)
    file.write_text("catalogue: H100-SXM\nhosts: [{name: a, cores: 1, memory_bytes: 1}]\n")
    with raises(ClusterError, "cluster.catalogue_with_hosts"):
        Cluster.load(file)
    file.write_text("catalogue: H100-SXM\nprice_per_hour: -1\n")
    with raises(ClusterError, "file.value_out_of_range", key="price_per_hour"):
        Cluster.load(file)


def test_machines_at_hand_can_have_a_price_too() -> None:
    host = {"name": "a", "cores": 1, "memory_bytes": 1}
    assert Cluster.model_validate({"hosts": [host], "price_per_hour": 0.1}).price_per_hour == 0.1
    assert not Cluster.model_validate({"hosts": [host]}).only_planned
    with pytest.raises(ValidationError):
        Cluster.model_validate({"hosts": [host], "price_per_hour": float("nan")})


def test_what_cluster_takes_is_a_file_or_a_name(tmp_path: Path) -> None:
    assert cluster_from("8xH100-SXM, 2.5/h").devices == 8
    with raises(ClusterError, "file.absent"):
        cluster_from(str(tmp_path / "missing.yaml"))


def test_every_name_in_the_documentation_is_one() -> None:
    text = DOCUMENT.read_text()
    names = re.findall(r"^\| `([^`]*x[A-Z][^`]*)` \|", text, re.MULTILINE) + re.findall(
        r"^catalogue: (.*)$", text, re.MULTILINE
    )
    names += re.findall(r"\(`(\d+x[^`]*)`\)", text)
    assert len(names) >= 8
    for name in names:
        assert cluster_from(name).only_planned


def test_a_list_of_names_keeps_rates_and_prices_with_the_cluster_before_them() -> None:
    listed = cluster_names("64x8xH100-SXM, 400gbit, 2.5/h; 8xA100-SXM-80, 256xTPU-v5p, oversubscribed 3:1 beyond 32")
    assert listed == [
        "64x8xH100-SXM, 400gbit, 2.5/h",
        "8xA100-SXM-80",
        "64x4xTPU-v5p, oversubscribed 3:1 beyond 32",
    ]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("1024xH100", "128x8xH100"),
        ("16xH100-SXM", "16xH100-SXM"),
        ("144xGB200", "36x4xGB200"),
        ("4x16xCPU", "4x16xCPU"),
    ],
)
def test_more_devices_than_a_host_has_are_usual_hosts(name: str, shape: str) -> None:
    assert cluster_names(name) == [shape]
    assert cluster_from(shape).devices == read_name(shape).hosts * read_name(shape).per_host


@pytest.mark.parametrize(
    ("text", "says"),
    [(" ; ", "is not the name of a cluster"), ("1001xH100-SXM", "use 1000xH100-SXM or 1008xH100-SXM")],
)
def test_a_list_that_names_no_whole_hosts_is_refused_with_what_would_work(text: str, says: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(says)):
        cluster_names(text)
