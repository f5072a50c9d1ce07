"""A container's limits, and groups of our own, in copies of the kernel's files.

Wrong here: runs that are throttled or killed.
"""

from pathlib import Path

import pytest

from paceline.cluster.cgroup import cpu_quota, enter_group, make_group, memory_limit_bytes, place_of_group
from paceline.errors import ClusterError
from refusals import raises

V2 = {
    "proc/self/cgroup": "0::/pod/train",
    "sys/fs/cgroup/pod/train/cpu.max": "max 100000",
    "sys/fs/cgroup/pod/train/memory.max": "8589934592",
    "sys/fs/cgroup/pod/cpu.max": "250000 100000",
    "sys/fs/cgroup/pod/memory.max": "max",
}
V1 = {
    "proc/self/cgroup": "9:name=systemd:/docker/1f\n4:memory:/docker/1f\n2:cpu,cpuacct:/docker/1f\n0::/",
    "sys/fs/cgroup/cpu,cpuacct/docker/1f/cpu.cfs_quota_us": "150000",
    "sys/fs/cgroup/cpu,cpuacct/docker/1f/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/memory/docker/1f/memory.limit_in_bytes": "2147483648",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
}


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


HIDDEN = {name.replace("/docker/1f/", "/"): text for name, text in reversed(V1.items())}
BESIDE = {"proc/self/cgroup": "1:name=systemd:/\n0::/run", "sys/fs/cgroup/unified/run/cpu.max": "300000 100000"}


@pytest.mark.parametrize(
    ("files", "cores", "memory_gib"),
    [
        pytest.param(V2, 2.5, 8, id="version 2, with a quota on a group above"),
        pytest.param(V2 | {"sys/fs/cgroup/pod/train/cpu.max": "50000 100000"}, 0.5, 8, id="the tightest counts"),
        pytest.param(V1, 1.5, 2, id="version 1"),
        pytest.param(HIDDEN, 1.5, 2, id="a container that sees its mount point only"),
        pytest.param(BESIDE, 3.0, None, id="version 2 beside version 1"),
        pytest.param({}, None, None, id="no groups"),
        pytest.param({"proc/self/cgroup": "0::/../elsewhere"}, None, None, id="a group elsewhere"),
        pytest.param(
            {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None, None, id="without a limit"
        ),
    ],
)
def test_the_limits_of_all_groups_above_count(
    tmp_path: Path, files: dict[str, str], cores: float | None, memory_gib: int | None
) -> None:
    root = machine(tmp_path, files)
    assert cpu_quota(root) == cores
    assert memory_limit_bytes(root) == (None if memory_gib is None else memory_gib * 2**30)


def test_a_group_of_version_1_gets_a_quota_beside_the_own_group(tmp_path: Path) -> None:
    root = machine(tmp_path, V1 | {"sys/fs/cgroup/cpu,cpuacct/docker/1f/cgroup.procs": ""})
    place = place_of_group("ours", root)
    assert place == root / "sys/fs/cgroup/cpu,cpuacct/docker/1f/ours"
    make_group(place, 0.5)
    quota_us, period_us = (int((place / f"cpu.cfs_{what}_us").read_text()) for what in ("quota", "period"))
    assert quota_us / period_us == 0.5


def test_a_group_of_version_2_lies_where_the_controller_is_handed_on(tmp_path: Path) -> None:
    files = {f"sys/fs/cgroup/{group}cgroup.procs": "" for group in ("", "pod/", "pod/train/")}
    files |= {
        "sys/fs/cgroup/pod/train/cgroup.subtree_control": "",
        "sys/fs/cgroup/pod/cgroup.subtree_control": "memory cpu",
    }
    root = machine(tmp_path, V2 | files)
    place = place_of_group("ours", root)
    assert place == root / "sys/fs/cgroup/pod/ours"
    place.mkdir()
    (place / "cpu.max").write_text("max 100000")  # as the kernel makes it
    make_group(place, 1.5)
    quota_us, period_us = map(int, (place / "cpu.max").read_text().split())
    assert quota_us / period_us == 1.5


def test_a_process_that_enters_a_group_does_so_with_all_its_threads(tmp_path: Path) -> None:
    enter_group(tmp_path)
    assert (tmp_path / "cgroup.procs").read_text() == "0"  # the kernel's name for whoever writes it


def test_where_no_group_can_be_made_the_error_says_what_to_do(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/pod/train/cgroup.procs": "1", "sys/fs/cgroup/pod/train/cgroup.subtree_control": ""}
    with raises(ClusterError, "cluster.no_cpu_control_group"):
        place_of_group("ours", machine(tmp_path, V2 | files))
    with raises(ClusterError, "cluster.control_group_refused", cores=1):
        make_group(tmp_path / "of" / "nothing", 1)
    with raises(ClusterError, "cluster.control_group_not_entered"):
        enter_group(tmp_path / "nowhere")
