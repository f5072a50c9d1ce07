"""Every way to add up gives the same sums.

`auto` measures only between hosts, chooses alike on all ranks, and says why.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import paceline.comm.allreduce
from hosts import Hosts
from paceline.comm import Group
from paceline.comm.allreduce import Auto, HierarchicalAllReduce, OwnAllReduce, algorithm_for, close_algorithm
from paceline.comm.backend import joined
from paceline.errors import PlanError, SyncError
from paceline.planning.sync_info import ALGORITHMS
from ranks import Backend, RankError, Ranks
from refusals import raises

NAMES = (*ALGORITHMS, "auto")


def sums(hosts: tuple[int, ...]) -> list[dict[str, Any]]:
    """What every algorithm makes of tensors of several kinds."""
    with joined(deadline_s=30) as group:
        group.hosts = hosts
        return [sums_by(group, name) for name in NAMES]


def sums_by(group: Group, name: str) -> dict[str, Any]:
    """What one makes of them."""
    algorithm, why = algorithm_for(group, name)
    taken = algorithm.name if isinstance(algorithm, OwnAllReduce) else "flat"
    results: dict[str, Any] = {"name": taken, "why": why}
    for op in ("sum", "mean", "max"):
        tensor = algorithm.empty(1000, torch.float32)
        tensor.copy_(torch.arange(1000.0) * (group.rank + 1))
        algorithm.all_reduce(tensor, op)
        results[op] = tensor[[1, 999]].tolist()
        algorithm.release(tensor)
    matrix = torch.full((4, 6), group.rank + 1)
    algorithm.all_reduce(matrix[:, ::2])
    results["strided"] = matrix.tolist()
    scalar = torch.tensor(float(group.rank))
    algorithm.all_reduce(scalar)
    results["scalar"] = scalar.item()
    before = group.sent_bytes, group.bytes_reduced
    algorithm.all_reduce(torch.zeros(1000))
    results["counted"] = group.sent_bytes - before[0], group.bytes_reduced - before[1]
    close_algorithm(algorithm)
    return results


@pytest.mark.parametrize(
    ("hosts", "backend"),
    [
        ((0, 0, 0, 0), "shm"),
        pytest.param((0, 1, 0, 1), "gloo", marks=pytest.mark.slow),
        ((0, 1, 0, 1), "shm"),
        pytest.param((0, 0, 0, 0), "gloo", marks=pytest.mark.slow),
    ],
)
def test_every_algorithm_gives_the_same_sums(ranks: Ranks, hosts: tuple[int, ...], backend: Backend) -> None:
    spans = len(set(hosts)) > 1
    by_rank = ranks(4, sums, hosts, backend=backend)
    for rank, results in enumerate(by_rank):
        taken = list(NAMES) if spans else ["flat", "ring", "flat", "flat"]
        assert [result["name"] for result in results] == taken
        assert [result["why"] for result in results] == [result["why"] for result in by_rank[0]]
        for result in results:
            name = result["name"]
            assert (result["sum"], result["mean"], result["max"]) == ([10.0, 9990.0], [2.5, 2497.5], [4.0, 3996.0]), (
                name
            )
            assert result["scalar"] == 6.0, name
            assert result["strided"] == [[10, rank + 1] * 3] * 4, f"{name}: what lies between stays"
            assert result["counted"][1] == 4000, name
            if name == "hierarchical" and spans:
                assert result["counted"][0] in (4 * 512, 4 * 488), (
                    "2 (h - 1) / h of the part that a rank carries, in whole cache lines"
                )


def chosen(name: str) -> tuple[str, list[str], float]:
    """What `auto` says, what it takes for some sizes, and how long it took to find out."""
    with joined(deadline_s=30, transport="gloo") as group:
        group.barrier()
        started = time.monotonic()
        algorithm, why = algorithm_for(group, name)
        took_s = time.monotonic() - started
        names = [algorithm.best(nbytes) for nbytes in (4, 2**10, 2**16, 2**24)] if isinstance(algorithm, Auto) else []
        group.barrier()  # a rank that leaves at once would fail those that still start a group within theirs
        close_algorithm(algorithm)
        return why, names, took_s


@pytest.mark.needs_root
@pytest.mark.needs_iproute2
def test_auto_takes_the_hierarchy_for_large_tensors_between_hosts_and_all_ranks_alike(hosts: Hosts) -> None:
    found = hosts(2, rate="25mbit", ranks_per_host=2).run(chosen, "auto")
    why, names, _ = found[0]
    assert [names for _, names, _ in found] == [names] * 4
    assert names[-1] == "hierarchical"
    assert "4 ranks on 2 hosts" in why
    measured_mb_s = float(why.split(" MB/s")[0].rpartition(" ")[2])
    assert measured_mb_s == pytest.approx(25 / 8, rel=0.5)


def messages_at_start() -> int:
    """Bytes that choosing costs."""
    with joined(deadline_s=30) as group:
        before = group.sent_bytes
        algorithm_for(group, "auto")
        return group.sent_bytes - before


def test_auto_is_flat_on_one_host_and_measures_nothing_there(ranks: Ranks) -> None:
    assert ranks(2, messages_at_start, backend="shm") == [0, 0]
    assert algorithm_for(Group(), "auto")[1] == "flat: all ranks are on one host, where none is fastest"


@pytest.mark.parametrize("name", NAMES)
def test_a_group_of_one_keeps_what_it_has(name: str) -> None:
    tensor = torch.tensor([3.0])
    algorithm_for(Group(), name)[0].all_reduce(tensor, "mean")
    assert tensor.item() == 3.0


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with raises(PlanError, "plan.allreduce_unknown", algorithms=["flat", "ring", "hierarchical"], name="rings"):
        algorithm_for(Group(), "rings")


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
        paceline.comm.allreduce.BLOCK_BYTES = 2**20  # so that some tensors take several
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
    """The sum where the host's ranks talk over gloo, as shared memory is refused."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    with joined(deadline_s=30) as group:
        group.hosts = (0, 0, 1, 1)
        assert group.host.transport.name == "gloo"
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
