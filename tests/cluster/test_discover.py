"""Discovery on the machine that runs the tests.

Wrong here: ranks that fight for cores, or a record that nobody can judge figures by.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cluster.cluster import Cluster, cluster_from
from paceline.cluster.discover import discover, environment
from paceline.cluster.machine import cores_by_physical
from paceline.errors import ClusterError
from paceline.planning.arguments import cluster_to_run_on
from refusals import raises


def test_this_machine_has_what_the_kernel_lets_us_use() -> None:
    cluster = discover()
    host = cluster.hosts[0]
    assert sorted(core for group in host.affinity for core in group) == sorted(os.sched_getaffinity(0))
    assert 1 <= host.cores <= len(os.sched_getaffinity(0))
    assert 0 < host.memory_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert "loopback" in [link.kind for link in host.links]
    assert cluster.describe().startswith("this machine: ")


def test_cores_that_we_may_not_run_on_are_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usable)})
    try:
        assert discover().devices == 1
    finally:
        os.sched_setaffinity(0, usable)


@pytest.mark.parametrize("variable", [("CUDA_VISIBLE_DEVICES", ""), ("PACELINE_DEVICE", "cpu")])
def test_hidden_gpus_leave_a_machine_of_cores(variable: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*variable)
    assert discover().kind == "cpu"


def test_a_discovered_machine_survives_its_yaml(tmp_path: Path) -> None:
    cluster = discover()
    (tmp_path / "cluster.yaml").write_text(cluster.to_yaml())
    assert Cluster.load(tmp_path / "cluster.yaml") == cluster


def test_discovery_starts_without_torch() -> None:
    code = (
        "import sys; from paceline.cluster.discover import discover, environment; "
        "discover(); environment(); print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert shown.strip() == "False"


def test_hyper_threads_of_a_core_stay_together_and_sockets_apart(tmp_path: Path) -> None:
    for core in range(8):  # two sockets numbered in turns, two threads per core
        topology = tmp_path / f"sys/devices/system/cpu/cpu{core}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
        (topology / "physical_package_id").write_text(f"{core % 2}\n")
    assert cores_by_physical(range(8), tmp_path) == ((0, 4), (2, 6), (1, 5), (3, 7))
    assert cores_by_physical([1, 3, 4, 7], tmp_path) == ((4,), (1,), (3, 7))


def test_a_kernel_that_hides_its_topology_has_only_physical_cores(tmp_path: Path) -> None:
    assert cores_by_physical([5, 1, 3], tmp_path) == ((1,), (3,), (5,))


def test_the_record_is_plain_json_with_versions_and_load() -> None:
    record = environment()
    assert json.loads(json.dumps(record)) == record
    assert record["torch"].startswith("2.")
    assert record["paceline"]
    assert len(record["load_average"]) == 3
    assert record["cores"] == discover().hosts[0].cores


def test_the_record_holds_what_changes_speed_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "OMP_NUM_THREADS",
        "MASTER_ADDR",
        "NCCL_SOCKET_IFNAME",
        "HIP_VISIBLE_DEVICES",
        "ZE_AFFINITY_MASK",
        "ASCEND_RT_VISIBLE_DEVICES",
        "AWS_SECRET_ACCESS_KEY",
        "WANDB_API_KEY",
        "HF_TOKEN",
    ):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("PACELINE_DEVICE", "cpu")
    kept = {"OMP_NUM_THREADS", "MASTER_ADDR", "NCCL_SOCKET_IFNAME", "PACELINE_DEVICE"}
    assert kept | {"HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES"} <= set(
        environment()["variables"]
    )
    assert not {"AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "HF_TOKEN"} & environment()["variables"].keys()


@pytest.mark.needs_git
def test_the_record_names_the_commit_and_whether_files_differ_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment()["git_commit"] is None
    (tmp_path / "job.yaml").write_text("a")
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], check=True, timeout=60)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()
    assert environment()["git_commit"] == commit
    (tmp_path / "job.yaml").write_text("b")
    assert environment()["git_commit"] == f"{commit}-dirty"


def test_nothing_runs_on_a_cluster_that_is_only_a_name() -> None:
    with raises(ClusterError, "cluster.catalogue_only"):
        cluster_to_run_on(cluster_from("2x8xH100-SXM"))


def test_a_host_may_be_used_with_a_part_of_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOST_DEVICES", "1")
    assert len(discover().hosts[0].devices) == 1


@pytest.mark.parametrize("number", ["0", "99999", "two", "-1"])
def test_devices_that_a_host_does_not_have_are_refused(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOST_DEVICES", number)
    with raises(ClusterError, "cluster.too_few_devices", wanted=number):
        discover()
