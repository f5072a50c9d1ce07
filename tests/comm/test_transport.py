"""All ranks of a run agree on a transport: shared memory, TCP between hosts, or gloo; then everybody is told why."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from commands import BIN, ended, events, kill_rank, losses, paceline, processes_of, started, wait_for_step, write_job
from paceline.comm.transport import choose
from paceline.errors import ClusterError, LaunchError
from ranks import Ranks

_CLONE_NEWNET = 0x40000000
NOBODY = 65534


def store(name: str) -> Store:
    return PrefixStore(name, _get_default_store())


def chosen(wanted: str, limits: dict[int, int]) -> tuple[str, str | None]:
    """What the ranks choose.

    Those in `limits` may make no larger file than that, which is what shared memory is to the kernel.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank in limits:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits[rank], resource.RLIM_INFINITY))
    try:
        return choose(store("test"), rank, size, wanted, timeout_s=30)
    except ClusterError as error:
        return "error", str(error)


@pytest.mark.parametrize("wanted", ["auto", "shm"])
def test_on_one_host_it_is_shared_memory(ranks: Ranks, wanted: str) -> None:
    assert ranks(4, chosen, wanted, {}) == [("shm", None)] * 4


@pytest.mark.parametrize("transport", ["gloo", "tcp"])
def test_gloo_and_tcp_are_taken_where_they_are_asked_for(ranks: Ranks, transport: str) -> None:
    assert ranks(2, chosen, transport, {}) == [(transport, None)] * 2


def test_tcp_that_does_not_encrypt_says_so(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_ENCRYPT", "off")
    for transport, note in ranks(2, chosen, "tcp", {}):
        assert transport == "tcp"
        assert note is not None
        assert note.startswith("encrypt=off, so attackers on the network can read")


@pytest.mark.parametrize("limit", [100_000, 2_000_000], ids=["no memory", "less than a group needs"])
def test_one_rank_without_memory_takes_all_to_gloo(ranks: Ranks, limit: int) -> None:
    [(backend, reason)] = set(ranks(3, chosen, "auto", {1: limit}))
    assert backend == "gloo"
    assert reason is not None
    assert re.fullmatch(r"shared memory of \d+ bytes was refused: .*File too large.* \(rank 1\)", reason)


def test_where_shared_memory_is_insisted_on_every_rank_says_why_not(ranks: Ranks) -> None:
    [(backend, reason)] = set(ranks(2, chosen, "shm", {1: 100_000}))
    assert backend == "error"
    assert reason is not None
    assert reason.startswith("transport=shm is not available: shared memory of ")
    assert "(rank 1)." in reason


def chosen_on_two_hosts() -> tuple[str, str | None]:
    """Rank 1 has a network of its own, as an emulated host and a container have."""
    if dist.get_rank() == 1:
        assert ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) == 0
    return chosen("auto", {})


@pytest.mark.needs_root
def test_ranks_on_several_hosts_talk_over_tcp(ranks: Ranks) -> None:
    assert ranks(2, chosen_on_two_hosts) == [("tcp", None)] * 2


def chosen_by_two_users() -> tuple[str, str | None]:
    """Rank 1 is another user: it may not open the memory of rank 0."""
    rank = dist.get_rank()
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = torch.tensor([server.port if server else 0])
    dist.broadcast(port, src=0)
    meeting: Store = server or TCPStore("127.0.0.1", int(port), is_master=False)
    if rank == 1:
        os.setgid(NOBODY)
        os.seteuid(NOBODY)
    result = choose(meeting, rank, 2, "auto", timeout_s=30)
    if rank == 1:
        os.seteuid(0)
    dist.barrier()
    return result


@pytest.mark.needs_root
def test_ranks_of_two_users_share_nothing(ranks: Ranks) -> None:
    [(backend, reason)] = set(ranks(2, chosen_by_two_users))
    assert backend == "gloo"
    assert reason is not None
    assert re.search(r"shared memory of process \d+ cannot be opened: .*Permission denied.*\(rank 1\)", reason)


def with_one_absent() -> str:
    if dist.get_rank() == 1:
        dist.barrier()
        return ""
    try:
        choose(store("test"), 0, 2, "auto", timeout_s=0.5)
        error = ""
    except LaunchError as caught:
        error = str(caught)
    dist.barrier()
    return error


def test_a_rank_that_does_not_come_is_named(ranks: Ranks) -> None:
    assert ranks(2, with_one_absent)[0] == "rank 0 waited 0.5 s for ranks 1, which did not start"


# Runs, as a person starts them


@contextmanager
def largest_file(limit: int) -> Iterator[None]:
    """No process started meanwhile can write a larger file, or have more shared memory."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def transport_of(run: Path) -> str:
    return cast(str, events(run, "start")[0]["transport"])


def test_a_run_without_shared_memory_trains_over_gloo_and_says_so(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml")
    with largest_file(2_000_000):
        outcome = paceline("train", job, "--plan", "dp=2", "--run", "run", folder=tmp_path)
    assert outcome.code == 0, outcome.err
    assert outcome.says("the ranks communicate over gloo: shared memory of ")
    assert transport_of(tmp_path / "run") == "gloo"
    [event] = events(tmp_path / "run", "transport")
    assert event["transport"] == "gloo"
    assert "was refused" in event["reason"]


def test_the_same_run_over_both_transports_learns_the_same(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml")
    found = {}
    for transport in ("shm", "gloo"):
        outcome = paceline("train", job, "--plan", f"dp=2 transport={transport}", "--run", transport, folder=tmp_path)
        assert outcome.code == 0, outcome.err
        assert "the ranks use TCP" not in outcome.err, "nothing was fallen back from"
        assert transport_of(tmp_path / transport) == transport
        found[transport] = losses(tmp_path / transport)
    assert found["shm"] == pytest.approx(found["gloo"], rel=1e-5)


@pytest.mark.needs_root
@pytest.mark.parametrize(
    "change",
    [
        pytest.param("mount -t tmpfs -o size=64k tmpfs /dev/shm", id="too small", marks=pytest.mark.slow),
        pytest.param("umount -l /dev/shm", id="missing", marks=pytest.mark.slow),
    ],
)
def test_the_system_folder_for_shared_memory_does_not_matter(tmp_path: Path, change: str) -> None:
    job = write_job(tmp_path / "job.yaml")
    train = f"{BIN / 'paceline'} train {job} --plan 'dp=2 transport=shm' --run run"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = ["unshare", "-m", "sh", "-c", f"{change} && exec {train}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert transport_of(tmp_path / "run") == "shm"


@pytest.mark.slow
def test_a_killed_rank_ends_the_command_and_leaves_nothing(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", stop={"steps": 1_000_000})
    before = set(os.listdir("/dev/shm"))
    command, off = ("train", job, "--plan", "dp=2 transport=shm", "--run", "run"), {"PACELINE_RECOVERY": "off"}
    with started("paceline", *command, folder=tmp_path, environment=off) as process:
        wait_for_step(20, tmp_path / "run", process)
        ranks = processes_of(process)
        kill_rank(1, process)
        outcome = ended(process)
    assert outcome.code == 1
    assert outcome.error.startswith("rank 1 (host ")
    assert "was killed by SIGKILL" in outcome.error
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    assert {name for name in os.listdir("/dev/shm") if "paceline" in name} <= before
