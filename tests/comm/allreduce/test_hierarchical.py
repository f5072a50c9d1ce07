"""Hierarchical all-reduce is exact, and sends no more between hosts than it must."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import paceline.comm.allreduce
from hosts import Hosts
from paceline.comm import Group
from paceline.comm.allreduce import HierarchicalAllReduce, algorithm_for, close_algorithm
from paceline.comm.backend import joined
from paceline.errors import SyncError
from ranks import RankError, Ranks

CASES = [
    (0, torch.float32),
    (1, torch.int64),
    (3, torch.bfloat16),
    (1001, torch.float64),
    (400_003, torch.float32),
    (5_000_001, torch.uint8),
]


def whole_numbers(ranks: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Numbers for each rank, whose sums over all every dtype holds exactly."""
    return torch.from_numpy(np.random.default_rng(numel).integers(0, 16, (ranks, numel), dtype=np.uint8)).to(dtype)


def as_if_on_hosts(hosts: tuple[int, ...]) -> dict[str, object]:
    """Exact sums and maxima of ranks that are told to be on some hosts."""
    with joined(deadline_s=30) as group:
        group.hosts = hosts
        paceline.comm.allreduce._BLOCK_BYTES = 2**20  # so that some tensors take several
        algorithm = HierarchicalAllReduce(group)
        wrong = [
            (*case, shared)
            for shared in ("shared", "private", "mixed")
            for case in CASES
            if not is_exact(algorithm, *case, shared)
        ]
        result = {"wrong": wrong, "memory": group.host.transport.name, "carriers": algorithm.parts}
        algorithm.close()
        group.host.close()
        return result


def is_exact(algorithm: HierarchicalAllReduce, numel: int, dtype: torch.dtype, shared: str) -> bool:
    """Of tensors that are shared, private, or (`mixed`) private on rank 1 only."""
    group = algorithm.group
    parts = whole_numbers(group.size, numel, dtype)
    tensor = torch.empty(numel, dtype=dtype) if shared == "private" else algorithm.empty(numel, dtype)
    brought = tensor.clone() if shared == "mixed" and group.rank == 1 else tensor
    exact = []
    for op in ("sum", "max"):
        brought.copy_(parts[group.rank])
        algorithm.all_reduce(brought, op)
        exact.append(torch.equal(brought, parts.sum(0, dtype=dtype) if op == "sum" else parts.amax(0)))
    if shared != "private":
        algorithm.release(tensor)
    return all(exact)


@pytest.mark.parametrize(
    "hosts",
    [
        (0, 1, 0, 1),
        (0, 1, 1),
        pytest.param((0, 0, 1, 1), marks=pytest.mark.slow),
        pytest.param((0, 0, 0, 1), marks=pytest.mark.slow),
    ],
)
def test_every_rank_gets_the_exact_result(ranks: Ranks, hosts: tuple[int, ...]) -> None:
    for rank, result in enumerate(ranks(len(hosts), as_if_on_hosts, hosts)):
        assert result["wrong"] == []
        assert result["memory"] == ("shm" if hosts.count(hosts[rank]) > 1 else "none")
        assert result["carriers"] == (2 if hosts.count(0) == hosts.count(1) else 1)


def without_memory() -> list[float]:
    """The sum where the host's ranks talk over gloo."""
    with joined(deadline_s=30) as group:
        halves = group.subgroup([0, 1] if group.rank < 2 else [2, 3])
        group.hosts = (0, 0, 1, 1)
        group._host = halves
        tensor = torch.arange(1000.0) * group.rank
        HierarchicalAllReduce(group).all_reduce(tensor)
        result: list[float] = tensor.tolist()
        return result


def test_hosts_that_allow_no_shared_memory_add_up_over_messages(ranks: Ranks) -> None:
    assert ranks(4, without_memory) == [(torch.arange(1000.0) * 6).tolist()] * 4


def rounded() -> bytes:
    """The bits of a sum that is rounded."""
    with joined(deadline_s=30) as group:
        group.hosts = (0, 0, 1, 1)
        tensor = torch.randn(100_000, generator=torch.Generator().manual_seed(group.rank))
        HierarchicalAllReduce(group).all_reduce(tensor)
        return tensor.numpy().tobytes()


def test_the_bits_are_the_same_on_every_rank(ranks: Ranks) -> None:
    assert len(set(ranks(4, rounded))) == 1


def of_different_sizes() -> str:
    """What is said when a host's ranks bring different sizes."""
    with joined(deadline_s=30) as group:
        group.hosts = (0, 0, 1, 1)
        algorithm = HierarchicalAllReduce(group)
        algorithm.all_reduce(torch.zeros(10))  # from here on no rank still starts a group
        try:
            algorithm.all_reduce(torch.zeros(100 + group.rank % 2))
        except SyncError as error:
            return str(error)
        return ""


def test_different_sizes_on_one_host_are_named(ranks: Ranks) -> None:
    for rank, text in enumerate(ranks(4, of_different_sizes)):
        assert "tensors of 400 to 404 bytes" in text
        assert f"this rank: {400 + rank % 2 * 4}" in text


def killed_inside(folder: str) -> None:
    """Rank 1 ends before its part; what the others say goes to files, as the launch fails."""
    with joined(deadline_s=5) as group:
        group.hosts = (0, 0, 1, 1)
        algorithm = HierarchicalAllReduce(group)
        algorithm.all_reduce(torch.zeros(10))
        if group.rank == 1:
            os._exit(0)
        try:
            algorithm.all_reduce(torch.zeros(4_000_000))
        except SyncError as error:
            Path(folder, f"error-{group.rank}").write_text(str(error))


def test_a_rank_that_dies_is_an_error_on_both_hosts_and_no_hang(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 1 .*ended with exit code \d"):
        ranks(4, killed_inside, str(tmp_path), deadline_s=60)
    assert {"error-0", "error-3"} <= {file.name for file in tmp_path.iterdir()}


def of_four_mebibytes(name: str, calls: int) -> tuple[list[float], str]:
    """The sum of ones by an algorithm, over and over, and its reason."""
    with joined(deadline_s=60, transport="gloo") as group:
        assert isinstance(group, Group)
        algorithm, why = algorithm_for(group, name)
        for _ in range(calls):
            tensor = torch.ones(2**20)
            algorithm.all_reduce(tensor)
        close_algorithm(algorithm)
        return sorted(set(tensor.tolist())), why


@pytest.mark.needs_root
@pytest.mark.needs_iproute2
def test_a_link_carries_two_thirds_of_what_a_flat_ring_has_it_carry(hosts: Hosts) -> None:
    pair = hosts(2, ranks_per_host=2)
    carried = {}
    for name in ("flat", "hierarchical"):
        before = [max(link.sent_bytes, link.received_bytes) for link in pair.bytes()]
        assert [result[0] for result in pair.run(of_four_mebibytes, name, 4)] == [[4.0]] * 4
        after = [max(link.sent_bytes, link.received_bytes) for link in pair.bytes()]
        carried[name] = [(b - a) / (4 * 2**22) for a, b in zip(before, after, strict=True)]
    assert all(0.99 < share <= 1.1 for share in carried["hierarchical"]), (
        "2 (h - 1) / h of the tensor for h = 2, and headers"
    )
    assert all(1.45 < share < 1.75 for share in carried["flat"]), "2 (n - 1) / n for n = 4"
