"""Collectives give what their names promise on every rank, and a rank that does not come is named within the deadline."""

from __future__ import annotations

import re
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline.launch.local
from paceline.comm import Group
from paceline.comm.backend import joined
from ranks import Backend, Ranks


def collectives() -> dict[str, Any]:
    """The results of every collective, where rank r brings (r, r + 10) or r + 1 rows."""
    with joined(deadline_s=30) as group:
        results: dict[str, Any] = {"rank": group.rank, "hosts": group.hosts, "transport": group.transport}
        for op in ("sum", "mean", "max"):
            tensor = torch.tensor([1.0, 10.0]) * (group.rank + 1)
            group.all_reduce(tensor, op)
            results[op] = tensor.tolist()
        tensor = torch.tensor([float(group.rank)])
        group.broadcast(tensor, root=group.size - 1)
        results["broadcast"] = tensor.item()
        rows = torch.full((group.rank + 1, 2), float(group.rank), requires_grad=True)
        gathered = group.gather_rows(rows, range(1, group.size + 1))
        torch.cat(gathered).sum().backward()
        assert rows.grad is not None
        results["rows"] = [part.tolist() for part in gathered]
        results["own"] = (gathered[group.rank] is rows, rows.grad.sum().item(), [part.requires_grad for part in gathered])
        results["json"] = group.gather_json({"name": "ä" * 100 * group.rank, "none": None, "rank": group.rank})
        group.barrier()
        results["bytes"] = group.bytes_reduced
        return results


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_collectives_give_every_rank_the_same(ranks: Ranks, size: int, backend: Backend) -> None:
    results = ranks(size, collectives, backend=backend)
    total = sum(range(1, size + 1))
    for rank, result in enumerate(results):
        assert result["rank"] == rank
        assert result["hosts"] == (0,) * size
        assert result["transport"] == backend
        assert result["sum"] == [total, 10 * total]
        assert result["mean"] == pytest.approx([total / size, 10 * total / size])
        assert result["max"] == [size, 10 * size]
        assert result["broadcast"] == size - 1
        assert result["rows"] == [[[r, r]] * (r + 1) for r in range(size)]
        assert result["own"] == (True, 2.0 * (rank + 1), [r == rank for r in range(size)]), "gradients flow through the own rows alone"
        assert result["json"] == [{"name": "ä" * 100 * r, "none": None, "rank": r} for r in range(size)]
        assert result["bytes"] > 3 * 8


def test_a_group_of_one_returns_what_it_is_given() -> None:
    group, tensor = Group(), torch.tensor([3.0])
    group.all_reduce(tensor, "mean")
    group.broadcast(tensor)
    group.barrier()
    rows = torch.ones(2, 2)
    assert tensor.item() == 3.0
    assert group.gather_rows(rows, [2])[0] is rows
    assert group.gather_json({"a": [1]}) == [{"a": [1]}]
    assert group.empty(3, torch.float64).tolist() == [0.0] * 3
    assert (group.transport, group.transport_note) == ("none", None)
    assert (group.bytes_reduced, group.spans_hosts) == (0, False)


def test_ranks_on_two_hosts_span_hosts() -> None:
    assert Group(size=3, hosts=(0, 0, 1)).spans_hosts
    assert not Group(size=2, hosts=(5, 5)).spans_hosts


ABSENT = """
import os
import time
from pathlib import Path

import torch

from paceline.comm.backend import joined
from paceline.errors import SyncError


def meet(arguments):
    folder, behaviour, transport = Path(arguments[0]), arguments[1], arguments[2]
    with joined(deadline_s=3, transport=transport) as group:
        group.barrier()
        if group.rank == 1:
            if behaviour == "leaves":
                os._exit(0)
            while len(list(folder.glob("error-*"))) < 2:
                time.sleep(0.05)
            return
        started = time.monotonic()
        try:
            group.all_reduce(torch.zeros(4))
        except SyncError as error:
            (folder / f"error-{group.rank}.part").write_text(f"{time.monotonic() - started}\\n{error}")
            (folder / f"error-{group.rank}.part").rename(folder / f"error-{group.rank}")
        while len(list(folder.glob("error-[0-9]"))) < 2:  # rank 0 serves the store that rank 2 may still ask
            time.sleep(0.05)
"""


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("behaviour", ["stays away", "leaves"])
def test_a_rank_that_does_not_come_is_named_within_the_deadline(tmp_path: Path, behaviour: str, transport: str) -> None:
    script = tmp_path / "ranks_that_meet.py"
    script.write_text(ABSENT)
    started = time.monotonic()
    arguments = [f"{script}:meet", str(tmp_path), behaviour, transport]
    paceline.launch.local.launch(arguments, ranks=3, threads=1, pin_cores=None, deadline_s=60)
    assert time.monotonic() - started < 60
    for rank in (0, 2):
        waited_s, text = (tmp_path / f"error-{rank}").read_text().split("\n", 1)
        assert float(waited_s) < 3 + 2 + 10, "the deadline, the time to ask who is missing, and a busy machine"
        assert f"rank {rank} waited" in text
        assert "in all-reduce and ranks [1] did not come (deadline 3 s)" in text
        assert "raise deadline_s" in text


def shared_tensors(limit: int | None) -> dict[str, Any]:
    """Tensors of `Group.empty`; with a limit, the last rank is refused memory for more than so many bytes."""
    with joined(deadline_s=30) as group:
        if limit is not None and group.rank == group.size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        results: dict[str, Any] = {"sums": []}
        for numel, dtype in ((0, torch.float32), (1, torch.bfloat16), (1000, torch.float64), (1_000_000, torch.float32)):
            tensor = group.empty(numel, dtype)
            assert (tensor.shape, tensor.dtype, bool(tensor.any())) == ((numel,), dtype, False)
            tensor.fill_(group.rank + 1)
            group.all_reduce(tensor)
            part = tensor[numel // 3 : numel // 2]
            group.all_reduce(part, "mean")
            results["sums"].append(sorted(set(tensor.tolist())))
        results["shared"] = Path("/proc/self/maps").read_text().count("/memfd:paceline-tensor")
        results["note"] = group.transport_note
        return results


@pytest.mark.parametrize("size", [2, 3])
def test_a_tensor_of_the_group_lies_in_shared_memory_where_that_is_the_transport(ranks: Ranks, size: int) -> None:
    total = float(sum(range(1, size + 1)))
    for backend in ("shm", "gloo"):
        for result in ranks(size, shared_tensors, None, backend=backend):
            assert result["sums"] == [[], [total], [total], [total]]
            assert result["note"] is None
            assert result["shared"] == (4 * size if backend == "shm" else 0), "every rank maps every rank's"


def test_memory_that_one_rank_is_refused_is_private_on_all_and_said(ranks: Ranks) -> None:
    for result in ranks(3, shared_tensors, 100_000, backend="shm"):
        assert result["sums"] == [[], [6.0], [6.0], [6.0]]
        assert result["shared"] == 3 * 3, "the small ones"
        assert "there is no shared memory for a tensor of 4000000 bytes" in result["note"]


def without_a_store() -> str:
    """What is said where the process group is the user's own, so nobody can be asked who is missing."""
    from paceline.errors import SyncError

    with joined(deadline_s=30) as group:
        if group.rank == 1:
            return ""
        try:
            for _ in range(1000):
                group.all_reduce(torch.zeros(4))
        except SyncError as error:
            return str(error)
        return "no error"


def test_a_lost_connection_in_a_process_group_of_the_users_own_blames_no_one(ranks: Ranks) -> None:
    assert "some rank did not come, or a connection failed" in ranks(2, without_a_store)[0]


def test_a_lost_rank_in_a_process_group_of_the_users_own_is_named_over_shared_memory(ranks: Ranks) -> None:
    assert re.search(r"all_reduce: rank 1 \(pid \d+\) ended", ranks(2, without_a_store, backend="shm")[0])
