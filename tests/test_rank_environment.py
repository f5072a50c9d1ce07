"""A rank's place in its run goes through environment variables and comes out the same."""

from pathlib import Path

import pytest

from paceline.errors import LaunchError
from paceline.rank_environment import HostEntry, RankEnvironment
from refusals import raises

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
}


@pytest.mark.parametrize(
    "environment",
    [
        RankEnvironment(0, 1, "127.0.0.1", 1),
        RankEnvironment(
            rank=1,
            world_size=2,
            master_address="10.77.0.1",
            master_port=4711,
            local_rank=1,
            local_world_size=2,
            attempt=3,
            address="10.77.0.2",
            interface="eth0",
            threads=4,
            cores=(2, 3),
            host=HostEntry("host-1", "/proc/7/fd/4", "/proc/7/fd/3", Path("/sys/fs/cgroup/paceline-7-1")),
            status_file=Path("/tmp/run/status"),
            error_file=Path("/tmp/run/rank-1.error"),
            launcher=42,
            store="10.77.0.1:4712",
            key_fd=8,
            store_fd=5,
            inherited_fds=(6, 7),
        ),
        RankEnvironment(0, 1, "127.0.0.1", 1, host=HostEntry("host-0", "/proc/7/fd/4", "/proc/7/fd/3")),
    ],
)
def test_what_is_written_is_read_again(environment: RankEnvironment) -> None:
    assert RankEnvironment.from_env(environment.to_env()) == environment


def test_a_rank_of_torchrun_has_a_place_and_no_launcher_of_ours() -> None:
    environment = RankEnvironment.from_env(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2", "OMP_NUM_THREADS": "4,2"})
    assert environment == RankEnvironment(3, 4, "10.0.0.1", 29500, 1, 2, attempt=2)


def test_a_rank_without_a_rendezvous_is_told_which_variables_are_missing() -> None:
    with raises(LaunchError, "launch.environment_incomplete", absent=["WORLD_SIZE", "MASTER_PORT"]):
        RankEnvironment.from_env({"RANK": "0", "MASTER_ADDR": "localhost"})
