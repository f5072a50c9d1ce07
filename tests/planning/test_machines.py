"""What the cost model is told of a cluster.

A link taken for faster, or a device for another, and all predictions are off by as much.
"""

from __future__ import annotations

import pytest

from paceline.cluster.catalogue import CATALOGUE
from paceline.cluster.cluster import Cluster, cluster_from
from paceline.cluster.host import Device, Host, Link
from paceline.errors import ClusterError
from paceline.planning.machines import machine_count, machines, on_other_devices, resized, shape
from refusals import raises

GIB = 2**30


def gpu_host(name: str, gpu: str, count: int = 8, gbps: float | None = 1600.0) -> Host:
    gpus = tuple(Device(index=i, name=gpu, memory_bytes=79 * GIB) for i in range(count))
    return Host(
        name=name,
        cores=64,
        memory_bytes=512 * GIB,
        gpus=gpus,
        links=(Link(name="eth0", kind="ethernet", bandwidth_gbps=gbps),),
    )


def cpu_host(
    name: str,
    cpu: str = "AMD EPYC 7763",
    cores: int = 4,
    *,
    bf16: bool | None = None,
    affinity: tuple[tuple[int, ...], ...] = (),
) -> Host:
    link = Link(name="eth0", kind="ethernet", bandwidth_gbps=10)
    return Host(name=name, cores=cores, memory_bytes=8 * GIB, cpu=cpu, cpu_bf16=bf16, affinity=affinity, links=(link,))


def test_a_named_cluster_has_its_devices_and_its_rate() -> None:
    found = machines(cluster_from("64x8xH100-SXM, 400gbit, 2/h"))
    assert found.device == CATALOGUE["H100-SXM"]
    assert (found.hosts, found.per_host, found.devices, found.price_per_hour, found.speeds) == (64, 8, 512, 2.0, ())
    assert found.between.bandwidth == 50e9  # 400 Gbit/s of each device


def test_gpus_that_were_found_are_those_of_the_catalogue_with_the_memory_that_was_found() -> None:
    found = machines(
        Cluster(hosts=(gpu_host("a", "NVIDIA A100-SXM4-80GB"), gpu_host("b", "NVIDIA A100-SXM4-80GB", gbps=800.0)))
    )
    assert found.device.name == "A100-SXM-80"
    assert found.memory_bytes == 79 * GIB
    assert found.between.bandwidth == pytest.approx(800e9 / 8 / 8)  # the slower host's, shared by its devices


def test_hosts_of_several_kinds_are_as_the_slowest_with_speeds() -> None:
    found = machines(Cluster(hosts=(gpu_host("a", "NVIDIA H100 80GB HBM3"), gpu_host("b", "NVIDIA A100-SXM4-80GB"))))
    assert found.device.name == "A100-SXM-80"
    assert found.speeds == pytest.approx((989.4 / 312, 1.0))


def test_a_rate_that_no_driver_states_is_the_catalogues() -> None:
    found = machines(Cluster(hosts=(gpu_host("a", "NVIDIA H200", gbps=None), gpu_host("b", "NVIDIA H200", gbps=None))))
    assert found.between == CATALOGUE["H200"].network


def test_an_unknown_gpu_is_an_error_with_the_nearest_names() -> None:
    with raises(ClusterError, "cluster.not_predictable"):
        machines(Cluster(hosts=(gpu_host("a", "RTX 4099"),)))


def test_what_is_not_known_of_an_accelerator_is_said_in_the_first_line_and_where_to_give_it() -> None:
    with pytest.raises(ClusterError) as error:
        machines(Cluster(hosts=(gpu_host("a", "Acme 1"),)))
    first, _, rest = str(error.value).partition("\n")
    assert first.startswith('no plan can be predicted for "Acme 1": its peak FLOP/s, memory bandwidth and links are')
    assert "docs/how-to/add_a_device.md" in rest


def test_a_device_of_a_host_without_gpus_is_one_core() -> None:
    found = machines(Cluster(hosts=(cpu_host("a"), cpu_host("b"))))
    assert (found.device.kind, found.device.name, found.hosts, found.per_host) == ("cpu", "CPU-AVX2", 2, 4)
    assert found.memory_bytes == 2 * GIB
    assert found.between.bandwidth == pytest.approx(10e9 / 8 / 4)


@pytest.mark.parametrize(
    ("cpu", "bf16", "name"),
    [
        ("Intel(R) Xeon(R) Platinum 8375C", False, "CPU-AVX512"),
        ("Intel(R) Xeon(R) Platinum 8481C", True, "CPU-AVX512-BF16"),
        ("AMD EPYC 7763", False, "CPU-AVX2"),
        ("Neoverse-N1", None, "CPU-NEON"),
        ("CPU-AMX", None, "CPU-AMX"),
    ],
)
def test_a_processor_has_the_class_that_its_name_suggests(cpu: str, bf16: bool | None, name: str) -> None:
    assert machines(Cluster(hosts=(cpu_host("a", cpu, bf16=bf16),))).device.name == name


def test_two_threads_of_a_core_are_half_a_core_each() -> None:
    threads = machines(Cluster(hosts=(cpu_host("a", affinity=((0, 2), (1, 3))),)))
    cores = machines(Cluster(hosts=(cpu_host("a", affinity=((0,), (1,), (2,), (3,))),)))
    assert threads.device.peak_flops["fp32"] == cores.device.peak_flops["fp32"] / 2


def test_emulated_hosts_have_their_rate_their_delay_and_their_quota() -> None:
    found = machines(
        Cluster.model_validate({"emulate": {"hosts": 2, "rate": "100mbit", "cpu": [1, 0.5], "delay_ms": 2.0}})
    )
    assert found.between.bandwidth == pytest.approx(12.5e6)
    assert found.between.latency_s == pytest.approx(2e-3, rel=0.1)
    assert found.speeds == pytest.approx((2.0, 1.0))


@pytest.mark.parametrize(
    ("name", "hosts", "per_host"),
    [
        ("4xGB200", 1, 4),
        ("2x4xGB200", 1, 8),
        ("18x4xGB300", 1, 72),
        ("36x4xGB200", 2, 72),
        ("32x4xGB200", 2, 64),
        ("19x4xGB200", 2, 38),
        ("8x72xGB200", 8, 72),
        ("32x8xTPU-v5e", 1, 256),
        ("256xTPU-v5e", 1, 256),
        ("64x8xTPU-v6e", 2, 256),
        ("36x8xB200", 36, 8),
        ("4x4xGH200-96", 4, 4),
    ],
)
def test_machines_that_fast_links_join_are_one_host_to_the_planner(name: str, hosts: int, per_host: int) -> None:
    """Taken for hosts of 4, an NVL72 would be planned for as if tp=8 went over the network."""
    cluster = cluster_from(name)
    found = machines(cluster)
    assert (found.hosts, found.per_host, found.devices) == (hosts, per_host, cluster.devices)


def test_a_domain_keeps_its_machines_for_what_fails_and_what_is_bought() -> None:
    cluster = cluster_from("36x4xGB200")
    found = machines(cluster)
    assert cluster.devices_per_host == (4,) * 36
    assert (machine_count(found), shape(found)) == (36, "36x4xGB200")
    assert found.between.bandwidth == 50e9  # of a device
    more = resized(found, 37)
    assert (more.hosts, more.per_host, shape(more)) == (4, 37, "37x4xGB200")
    assert machine_count(machines(cluster_from("8x8xH100-SXM"))) == 8


def test_as_many_devices_of_another_kind_are_in_machines_that_exist() -> None:
    domain = machines(cluster_from("36x4xGB200"))
    assert shape(on_other_devices(domain, CATALOGUE["MI355X"])) == "18x8xMI355X"
    assert shape(on_other_devices(domain, CATALOGUE["GB300"])) == "36x4xGB300"
    assert shape(on_other_devices(machines(cluster_from("2x8xA100-SXM-40")), CATALOGUE["H200"])) == "2x8xH200"


def test_hosts_of_several_kinds_in_a_domain_are_as_the_slowest() -> None:
    slow, fast = gpu_host("a", "NVIDIA GB200", 4), gpu_host("b", "NVIDIA GB300", 4)
    both = machines(Cluster(hosts=(slow, fast)))
    assert (both.hosts, both.per_host, both.device.name) == (1, 8, "GB200")
    assert len(both.speeds) in (0, both.hosts)


def test_an_oversubscribed_network_is_told_to_the_cost_model() -> None:
    found = machines(cluster_from("64x8xH100-SXM, 400gbit, oversubscribed 3:1 beyond 32"))
    assert (found.oversubscription, found.oversubscribed_beyond, found.between.bandwidth) == (3.0, 32, 50e9)
    assert machines(cluster_from("64x8xH100-SXM, oversubscribed 2:1")).oversubscribed_beyond == 1
    assert machines(cluster_from("64x8xH100-SXM")).oversubscription == 1.0
    racks = machines(cluster_from("72x4xGB200, oversubscribed 2:1 beyond 36"))
    assert (racks.hosts, racks.oversubscribed_beyond) == (4, 2)  # domains of 72


def test_hosts_without_gpus_take_no_part_where_others_have_some() -> None:
    found = machines(Cluster(hosts=(cpu_host("a"), gpu_host("b", "NVIDIA L4", count=2))))
    assert (found.hosts, found.per_host, found.device.name) == (1, 2, "L4")
