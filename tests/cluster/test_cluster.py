"""A cluster's counts decide how many ranks start, and its YAML is a run's only record of where it ran."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Device, Host, Link
from paceline.errors import ClusterError
from refusals import raises

GIB = 2**30
H200 = Device(index=0, name="NVIDIA H200", memory_bytes=140 * GIB, bf16=True)
LAPTOP = Host(name="laptop", cores=2, memory_bytes=24 * GIB, cpu="AMD EPYC")
SERVER = Host(
    name="server", cores=16, memory_bytes=128 * GIB, cpu="Xeon", gpus=(H200, H200.model_copy(update={"index": 1}))
)

text = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1)
sizes, perhaps = st.integers(1, 2**50), st.sampled_from([None, True, False])
devices = st.builds(Device, index=st.integers(0, 64), name=text, memory_bytes=sizes, bf16=perhaps)
links = st.builds(
    Link,
    name=text,
    kind=st.sampled_from(["loopback", "ethernet", "nvlink", "pcie"]),
    bandwidth_gbps=st.none() | st.floats(min_value=1e-3, max_value=1e4),
)


@st.composite
def hosts(draw: st.DrawFn) -> Host:
    affinity = tuple(
        tuple(group) for group in draw(st.lists(st.lists(st.integers(0, 511), min_size=1, max_size=2), max_size=4))
    )
    return Host(
        name=draw(text),
        cores=draw(st.integers(1, sum(map(len, affinity)) or 512)),
        memory_bytes=draw(sizes),
        cpu=draw(text),
        cpu_bf16=draw(perhaps),
        cpu_avx512=draw(perhaps),
        affinity=affinity,
        gpus=tuple(draw(st.lists(devices, max_size=3))),
        links=tuple(draw(st.lists(links, max_size=3))),
    )


@given(st.lists(hosts(), min_size=1, max_size=3, unique_by=lambda host: host.name), text)
def test_a_cluster_survives_its_yaml(tmp_path_factory: pytest.TempPathFactory, hosts: list[Host], name: str) -> None:
    cluster = Cluster(name=name, hosts=tuple(hosts))
    file = tmp_path_factory.getbasetemp() / "cluster.yaml"
    file.write_text(cluster.to_yaml(), encoding="utf-8")
    assert Cluster.load(file) == cluster


def test_three_lines_by_hand_are_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "hosts:\n- {name: a, cores: 2, memory_bytes: 8000}\n- {name: b, cores: 4, memory_bytes: 8000}\n"
    )
    assert Cluster.load(tmp_path / "c.yaml").devices == 6


def test_every_usable_core_of_a_cpu_host_is_a_device() -> None:
    assert [(d.kind, d.index, d.memory_bytes) for d in LAPTOP.devices] == [("cpu", 0, 12 * GIB), ("cpu", 1, 12 * GIB)]
    assert (Cluster(hosts=(LAPTOP,)).devices, Cluster(hosts=(LAPTOP,)).kind) == (2, "cpu")


def test_where_there_are_gpus_no_rank_is_put_on_cores() -> None:
    cluster = Cluster(hosts=(LAPTOP, SERVER))
    assert (cluster.kind, cluster.devices, cluster.devices_per_host) == ("cuda", 2, (0, 2))


def test_an_accelerator_of_any_maker_is_a_device() -> None:
    gpus = tuple(Device(index=i, kind="npu", name="Ascend 910B", memory_bytes=GIB) for i in range(3))
    cluster = Cluster(hosts=(LAPTOP, LAPTOP.model_copy(update={"name": "other", "gpus": gpus})))
    assert (cluster.kind, cluster.has_accelerators, cluster.devices_per_host) == ("npu", True, (0, 3))


def test_accelerators_of_several_kinds_are_no_cluster() -> None:
    intel = Device(index=0, kind="xpu", name="Max 1550", memory_bytes=GIB)
    with pytest.raises(ValidationError, match=r"host a has GPUs of several kinds \(cuda, xpu\)"):
        Host(name="a", cores=1, memory_bytes=GIB, gpus=(*SERVER.gpus, intel))
    with pytest.raises(ValidationError, match=r"the hosts have GPUs of several kinds \(cuda, xpu\)"):
        Cluster(hosts=(SERVER, Host(name="a", cores=1, memory_bytes=GIB, gpus=(intel,))))
    with pytest.raises(ValidationError, match="kind"):
        Device(index=0, kind="XPU:0", name="Max 1550", memory_bytes=GIB)


@pytest.mark.parametrize(("ranks", "placed"), [(1, [1, 0]), (3, [2, 1]), (6, [2, 4]), (7, [4, 3]), (12, [4, 8])])
def test_ranks_fill_the_hosts_in_their_order_and_then_go_round_again(ranks: int, placed: list[int]) -> None:
    other = Host(name="other", cores=4, memory_bytes=GIB)
    assert Cluster(hosts=(LAPTOP, other)).ranks_per_host(ranks) == placed


def test_hyper_threads_are_no_physical_cores() -> None:
    assert Host(name="a", cores=4, memory_bytes=GIB, affinity=((0, 2), (1, 3))).physical_cores == 2
    assert Host(name="a", cores=1, memory_bytes=GIB, affinity=((0, 2), (1, 3))).physical_cores == 1
    assert LAPTOP.physical_cores == 2


@pytest.mark.parametrize(
    ("cluster", "line"),
    [
        (Cluster(name="this machine", hosts=(LAPTOP,)), "this machine: 2 cores (AMD EPYC), 24 GiB memory, no GPU"),
        (
            Cluster(hosts=(LAPTOP, SERVER)),
            "this cluster: 2 hosts, 18 cores (AMD EPYC, Xeon), 152 GiB memory, 2 × NVIDIA H200 (140 GiB)",
        ),
        (
            Cluster(hosts=(Host(name="a", cores=1, memory_bytes=GIB // 2),)),
            "this cluster: 1 core (CPU), 512 MiB memory, no GPU",
        ),
    ],
)
def test_a_cluster_describes_itself_in_one_line(cluster: Cluster, line: str) -> None:
    assert cluster.describe() == line


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Cluster(hosts=()), "at least one host"),
        (lambda: Cluster(hosts=(LAPTOP, LAPTOP)), "two hosts are named 'laptop'"),
        (
            lambda: Host(name="a", cores=3, memory_bytes=1, affinity=((0,), (1,))),
            "host a has 3 cores, but its affinity names only 2",
        ),
        (lambda: Host(name="a", cores=1, memory_bytes=1, affinity=((0,), ())), "empty list"),
        (lambda: Host(name="a", cores=1, memory_bytes=1, gpus=LAPTOP.devices), "kind cpu among its GPUs"),
        (lambda: Host(name="a", cores=0, memory_bytes=1), "cores"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        wrong()


GOOD = """\
name: lab
hosts:
- name: a
  cores: 2
  memory_bytes: 8000000000
  gpus:
  - {index: 0, name: T4, memory_bytes: 16000000000}
- name: b
  cores: 2
  memory_bytes: 8000000000
"""


def refused(folder: Path, text: str) -> str:
    """What is said of a cluster file, whose path is named."""
    file = folder / "cluster.yaml"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ClusterError, match=re.escape(str(file))) as caught:
        Cluster.load(file)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "to", "message"),
    [
        (
            "  cores: 2\n  memory_bytes: 8000000000\n  gpus",
            "  core: 2\n  memory_bytes: 8000000000\n  gpus",
            'line 4: unknown key "core" in hosts[0]. Did you mean "cores"?',
        ),
        ("name: lab", "colour: red", 'line 1: unknown key "colour" in the cluster. Known: name, hosts'),
        ("name: T4", "name: T4, indx: 1", 'line 7: unknown key "indx" in hosts[0].gpus[0]. Did you mean "index"?'),
        (
            "- name: b\n  cores: 2",
            '- name: b\n  cores: "2"',
            "line 9: hosts[1].cores should be a whole number, got '2'",
        ),
        ("- name: b", "- cpu: b", 'line 8: hosts[1] needs the key "name"'),
        ("name: b", "name: a", "two hosts are named 'a'"),
        ("index: 0", "index: -1", "line 7: hosts[0].gpus[0].index should be at least 0, got -1"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_its_line_and_the_fix(
    tmp_path: Path, change: str, to: str, message: str
) -> None:
    assert change in GOOD
    assert message in refused(tmp_path, GOOD.replace(change, to))


def test_every_mistake_is_named_at_once(tmp_path: Path) -> None:
    assert (
        len(refused(tmp_path, GOOD.replace("name: lab", "nam: lab").replace("cores: 2", "cores: two")).splitlines())
        == 3
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty. A cluster needs at least hosts, emulate or catalogue"),
        ("- a", "line 1: a cluster is a group of keys with values, such as `emulate: .*`, not a list"),
        ("a: [", "this is not valid YAML"),
        ("\xff", "is not UTF-8 text: byte 0 is 0xff"),
        ("name: a\nname: b", 'line 2: the key "name" already appears in line 1'),
    ],
)
def test_a_file_that_is_no_cluster_at_all_is_named(tmp_path: Path, content: str, message: str) -> None:
    assert re.search(message, refused(tmp_path, content))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with raises(ClusterError, "file.absent"):
        Cluster.load(tmp_path / "nowhere.yaml")
