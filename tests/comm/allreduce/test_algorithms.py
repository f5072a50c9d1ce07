"""Every way to add up gives the same sums.

`auto` measures only between hosts, chooses alike on all ranks, and says why.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from hosts import Hosts
from paceline.comm import Group
from paceline.comm.allreduce import Auto, OwnAllReduce, algorithm_for, close_algorithm
from paceline.comm.backend import joined
from paceline.errors import PlanError
from paceline.planning.sync_info import ALGORITHMS
from ranks import Backend, Ranks

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
    with pytest.raises(PlanError, match="'rings'; there are flat, ring, hierarchical, auto"):
        algorithm_for(Group(), "rings")
