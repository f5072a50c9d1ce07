"""A host process finds its place in the environment that its engine leaves, and refuses one that contradicts itself."""

from __future__ import annotations

import os
import socket

import pytest

from paceline.cluster import launch_engines as own
from paceline.cluster.launch_engines import HostPlace, address_from, default_port
from paceline.errors import LaunchError
from refusals import raises

Variables = dict[str, str]
BY_HAND = {"PACELINE_HOSTS": "3", "PACELINE_HOST_NUMBER": "1", "PACELINE_COORDINATOR": "10.0.0.1:4711"}
SLURM = {
    "SLURM_JOB_ID": "42",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[01-02],m7",
    "SLURM_NODEID": "2",
    "SLURMD_NODENAME": "m7",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_orte_hnp_uri": "1943076864.0;tcp://192.0.2.2,10.1.0.1:33549;tcp6://[fd00::2]:41999",
    "PMIX_NAMESPACE": "1943076865",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1", "PACELINE_COORDINATOR": "a"}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "1", "PACELINE_HOSTS": "2"}
JOB_SET = {**INDEXED_JOB, "JOBSET_NAME": "pace", "REPLICATED_JOB_NAME": "node"}
TRAIN_JOB = {
    "JOB_COMPLETION_INDEX": "1",
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "pace-node-0-0.pace",
    "PET_MASTER_PORT": "29500",
}
SKY = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n",
    "SKYPILOT_TASK_ID": "sky-2026-task",
}
JOBS_OF_A_POD = {
    "PACELINE_HOST_NUMBER": "1",
    "PACELINE_COORDINATOR": "pace-leader-0-0.pace",
    "JOB_COMPLETION_INDEX": "0",
}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("SLURM", "OMPI", "PMI", "PET_", "SKYPILOT", "JOB", "PACELINE_HOST", "PACELINE_COORD")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(socket, "gethostname", lambda: "pace-1")
    monkeypatch.setattr(socket, "getfqdn", lambda: "pace-1.pace.default.svc.cluster.local")


def place(monkeypatch: pytest.MonkeyPatch, *variables: Variables) -> HostPlace | None:
    """Place of a process with these variables, `-` for one that is not set."""
    for name, value in {name: value for one in variables for name, value in one.items()}.items():
        if value == "-":
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    return own.detected().hosts()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (BY_HAND, HostPlace(1, 3, "10.0.0.1", 4711, "pace-1", "hosts")),
        (BY_HAND | {"PACELINE_HOSTS": "2..8"}, HostPlace(1, 8, "10.0.0.1", 4711, "pace-1", "hosts", least=2)),
        (BY_HAND | {"PACELINE_ENGINE": "ssh"}, HostPlace(1, 3, "10.0.0.1", 4711, "pace-1", "ssh")),
        (SLURM, HostPlace(2, 3, "n01", default_port("slurm", "42"), "m7", "slurm", "42")),
        (
            SLURM | {"PMI_RANK": "2", "PMI_SIZE": "3", "SLURM_PROCID": "2"},
            HostPlace(2, 3, "n01", default_port("slurm", "42"), "m7", "slurm", "42"),
        ),
        (OPEN_MPI, HostPlace(1, 2, "192.0.2.2", default_port("mpi", "1943076865"), "pace-1", "mpi", "1943076865")),
        (MPICH, HostPlace(1, 2, "a", default_port("mpi", ""), "pace-1", "mpi")),
        (
            INDEXED_JOB,
            HostPlace(
                1,
                2,
                "pace-0.pace.default.svc.cluster.local",
                default_port("kubernetes", "pace"),
                "pace-1",
                "kubernetes",
                "pace",
            ),
        ),
        (
            JOB_SET,
            HostPlace(1, 2, "pace-node-0-0.pace", default_port("kubernetes", "pace"), "pace-1", "kubernetes", "pace"),
        ),
        (TRAIN_JOB, HostPlace(1, 2, "pace-node-0-0.pace", 29500, "pace-1", "kubernetes", "pace")),
        (SKY, HostPlace(1, 2, "10.0.0.1", default_port("sky", "sky-2026-task"), "pace-1", "sky", "sky-2026-task")),
    ],
    ids=[
        "by hand",
        "by hand, from 2 hosts on",
        "ssh",
        "Slurm",
        "Slurm with PMI",
        "Open MPI",
        "MPICH",
        "indexed Job",
        "JobSet",
        "TrainJob",
        "SkyPilot",
    ],
)
def test_every_engine_says_the_place_of_a_host(
    variables: Variables, expected: HostPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert place(monkeypatch, variables) == expected


@pytest.mark.parametrize(
    ("variables", "changes", "code"),
    [
        (BY_HAND, {"PACELINE_HOST_NUMBER": "3"}, "launcher.number_out_of_range"),
        (BY_HAND, {"PACELINE_HOST_NUMBER": "-"}, "launcher.variable_missing"),
        (BY_HAND, {"PACELINE_HOSTS": "-"}, "launcher.variable_missing"),
        (BY_HAND, {"PACELINE_HOSTS": "two"}, "launcher.number_invalid"),
        (BY_HAND, {"PACELINE_HOSTS": "2.."}, "launcher.number_invalid"),
        (BY_HAND, {"PACELINE_HOSTS": "8..2"}, "launcher.range_invalid"),
        (BY_HAND, {"PACELINE_HOSTS": "9" * 5000}, "launcher.number_invalid"),
        (BY_HAND, {"PACELINE_COORDINATOR": "-"}, "launcher.no_coordinator"),
        (BY_HAND, {"PACELINE_COORDINATOR": "a:0"}, "launcher.port_invalid"),
        (BY_HAND, {"PACELINE_COORDINATOR": "a:http"}, "launcher.port_invalid"),
        (SLURM, {"SLURM_STEP_NUM_TASKS": "6"}, "launcher.slurm_tasks"),
        (SLURM, {"SLURM_STEP_NODELIST": "n[1-2]"}, "launcher.slurm_nodes"),
        (SLURM, {"SLURM_STEP_NODELIST": "n[1-"}, "launcher.node_list_invalid"),
        (SLURM, {"SLURM_NODEID": "3"}, "launcher.number_out_of_range"),
        (OPEN_MPI, {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "launcher.mpi_processes"),
        (
            OPEN_MPI,
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_MCA_orte_local_daemon_uri": "1943076864.1;tcp://10.0.0.7:1"},
            "launcher.no_coordinator",
        ),
        (MPICH, {"PACELINE_COORDINATOR": "-"}, "launcher.no_coordinator"),
        (TRAIN_JOB, {"PET_NNODES": "1:4"}, "launcher.number_invalid"),
        (TRAIN_JOB, {"PET_MASTER_PORT": "-1"}, "launcher.port_invalid"),
        (SKY, {"SKYPILOT_NODE_IPS": "10.0.0.1"}, "launcher.sky_addresses"),
        (SKY, {"SKYPILOT_NODE_RANK": "-1"}, "launcher.number_invalid"),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused_by_the_names_of_its_variables(
    variables: Variables, changes: Variables, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with raises(LaunchError, code):
        place(monkeypatch, variables, changes)


def test_two_engines_that_say_different_places_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(
        LaunchError, "launcher.ambiguous", count=3, first="hosts", name="slurm", number=1, other_count=3, other_number=2
    ):
        place(monkeypatch, BY_HAND, SLURM)


@pytest.mark.parametrize(
    ("variables", "engine", "number"),
    [
        pytest.param((BY_HAND, SLURM, {"PACELINE_HOST_NUMBER": "2"}), "hosts", 2, id="two engines that agree"),
        pytest.param((SLURM, OPEN_MPI), "mpi", 1, id="mpirun within an allocation"),
        pytest.param((SLURM, BY_HAND, {"PACELINE_ENGINE": "ray"}), "ray", 1, id="Ray within an allocation"),
        pytest.param((JOB_SET, JOBS_OF_A_POD), "hosts", 1, id="several jobs of a JobSet, numbered by the manifest"),
    ],
)
def test_of_several_engines_the_one_that_started_the_process_says_its_place(
    variables: tuple[Variables, ...], engine: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = place(monkeypatch, *variables)
    assert found is not None
    assert (found.engine, found.number) == (engine, number)


def test_a_rank_of_torchrun_is_no_host_process_within_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place(monkeypatch, SLURM, TORCHRUN) is None
    assert own.detected() is own.ENGINES["torchrun"]


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"PACELINE_HOSTS": "1", "PACELINE_HOST_NUMBER": "0"},
        SLURM
        | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "n1", "SLURM_NODEID": "0"},
        {"JOB_COMPLETION_INDEX": "3"},  # an indexed Job whose pods know of no others
        {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_IPS": "10.0.0.1"},
    ],
)
def test_one_host_is_a_local_run(variables: Variables, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place(monkeypatch, variables) is None


def test_an_allocation_of_slurm_without_srun_is_a_local_run_that_tells_of_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {"SLURM_JOB_ID": "42", "SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    assert place(monkeypatch, batch) is None
    note = own.detected().note()
    assert note is not None
    assert "has 2 nodes; only this one is used. For all of them: srun --ntasks-per-node=1 paceline" in note


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("a", ("a", 7)),
        ("a:1", ("a", 1)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("fd00::2", ("fd00::2", 7)),
        ("[fd00::2]", ("fd00::2", 7)),
        ("[fd00::2]:1", ("fd00::2", 1)),
    ],
)
def test_an_address_may_have_a_port(text: str, address: tuple[str, int]) -> None:
    assert address_from(text, 7) == address


@pytest.mark.parametrize("text", ["a:65536", "a:-1", "a:", "a:²", ":1", "[]:1", ""])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="host 0"):
        address_from(text, 7)


def test_pods_of_a_second_replica_of_a_jobsets_job_are_refused_as_they_count_from_0_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "pace-node-0-1")
    assert place(monkeypatch, JOB_SET) is not None
    monkeypatch.setattr(socket, "gethostname", lambda: "pace-node-1-1")
    with raises(
        LaunchError,
        "launcher.job_set_replicas",
        host_number="PACELINE_HOST_NUMBER",
        job_set="pace",
        of_replica="1",
        replicated="node",
    ):
        place(monkeypatch, JOB_SET)
