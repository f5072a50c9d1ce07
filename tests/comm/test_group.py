"""Collectives give what their names promise, and name a rank that does not come."""

from __future__ import annotations

import os
import re
import resource
import select
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.comm.checks import CheckedGroup
from paceline.errors import SyncError
from ranks import Backend, RankError, Ranks
from refusals import raises


def collectives() -> dict[str, Any]:
    """The results of every collective, where rank r brings (r, r + 10) or r + 1 rows."""
    with joined(deadline_s=30) as group:
        results: dict[str, Any] = {"rank": group.rank, "hosts": group.hosts, "transport": group.transport.name}
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
        results["own"] = (
            gathered[group.rank] is rows,
            rows.grad.sum().item(),
            [part.requires_grad for part in gathered],
        )
        results["json"] = group.gather_json({"name": "ä" * 100 * group.rank, "none": None, "rank": group.rank})
        group.barrier()
        results["bytes"] = group.bytes_reduced
        return results


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("size", [2, 3])
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
        assert result["own"] == (True, 2.0 * (rank + 1), [r == rank for r in range(size)]), (
            "gradients flow through the own rows alone"
        )
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
    assert (group.transport.name, group.transport_note) == ("none", None)
    assert (group.bytes_reduced, group.spans_hosts) == (0, False)


def test_ranks_on_two_hosts_span_hosts() -> None:
    assert Group(size=3, hosts=(0, 0, 1)).spans_hosts
    assert not Group(size=2, hosts=(5, 5)).spans_hosts


def wait_for_one(folder: Path, leaves: bool, transport: str) -> None:
    """Rank 1 leaves or stays away; what the others say goes to files, as the launch may fail."""
    with joined(deadline_s=3, transport=transport) as group:
        group.barrier()
        if group.rank == 1 and leaves:
            os._exit(0)
        started = time.monotonic()
        try:
            if group.rank != 1:
                group.all_reduce(torch.zeros(4))
        except SyncError as error:
            (folder / f"error-{group.rank}.part").write_text(f"{time.monotonic() - started}\n{error}")
            (folder / f"error-{group.rank}.part").rename(folder / f"error-{group.rank}")
        while len(list(folder.glob("error-[0-9]"))) < 2:  # rank 0 serves the store that rank 2 may still ask
            time.sleep(0.05)


@pytest.mark.parametrize("transport", ["shm", pytest.param("gloo", marks=pytest.mark.slow)])
@pytest.mark.parametrize("leaves", [False, True], ids=["stays away", "leaves"])
def test_a_rank_that_does_not_come_is_named_within_the_deadline(
    launched: Ranks, tmp_path: Path, leaves: bool, transport: str
) -> None:
    with pytest.raises(RankError, match="rank 1 ended") if leaves else nullcontext():
        launched(3, wait_for_one, tmp_path, leaves, transport)
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
        for numel, dtype in (
            (0, torch.float32),
            (1, torch.bfloat16),
            (1000, torch.float64),
            (1_000_000, torch.float32),
        ):
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


@pytest.mark.parametrize(("backend", "shared"), [("shm", 4 * 3), ("gloo", 0)])
def test_a_tensor_of_the_group_lies_in_shared_memory_where_that_is_the_transport(
    ranks: Ranks, backend: Backend, shared: int
) -> None:
    for result in ranks(3, shared_tensors, None, backend=backend):
        assert result["sums"] == [[], [6.0], [6.0], [6.0]]
        assert result["note"] is None
        assert result["shared"] == shared, "every rank maps every rank's"


def test_memory_that_one_rank_is_refused_is_private_on_all_and_said(ranks: Ranks) -> None:
    for result in ranks(3, shared_tensors, 100_000, backend="shm"):
        assert result["sums"] == [[], [6.0], [6.0], [6.0]]
        assert result["shared"] == 3 * 3, "the small ones"
        assert "there is no shared memory for a tensor of 4000000 bytes" in result["note"]


def without_a_store() -> str:
    """What is said where the process group is the user's own, so nobody can be asked who is missing."""
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
    assert "a rank did not come, or a connection failed" in ranks(2, without_a_store)[0]


def test_a_lost_rank_in_a_process_group_of_the_users_own_is_named_over_shared_memory(ranks: Ranks) -> None:
    assert re.search(
        r"all_reduce failed after .*: rank 1 \(pid \d+\) has ended", ranks(2, without_a_store, backend="shm")[0]
    )


def own_error_in_a_collective() -> list[str]:
    """Exceptions of each rank's collective if rank 1 passes a tensor whose values torch cannot read."""
    with joined(deadline_s=20) as group:
        bad = torch.ones(4).to_mkldnn()
        try:
            group.barrier()  # rank 0 may still be in it when rank 1 fails
            if group.rank == 1:
                group.all_reduce(bad)
            return []
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return [kind.__name__ for kind in type(error).__mro__]


@pytest.mark.parametrize("backend", ["shm", "tcp", "gloo"])
def test_an_error_of_a_ranks_own_in_a_collective_is_no_lost_connection(ranks: Ranks, backend: Backend) -> None:
    _, raised = ranks(2, own_error_in_a_collective, backend=backend)
    assert "RuntimeError" in raised
    assert "SyncError" not in raised


def forked_by_the_user() -> float:
    """Sum over the ranks after each rank has forked a process that ended within the group."""
    try:
        with joined(deadline_s=20) as group:
            group.barrier()
            if (child := os.fork()) == 0:
                raise SystemExit(0)
            life = os.pidfd_open(child)
            ended = select.select([life], [], [], 10)[0]
            os.close(life)
            if not ended:
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            assert ended, "the fork hangs"
            tensor = torch.ones(4)
            group.all_reduce(tensor)
            return tensor.sum().item()
    except SystemExit:
        os._exit(0)


@pytest.mark.parametrize("backend", ["shm", "tcp", "gloo"])
def test_a_process_that_a_rank_forks_leaves_the_ranks_connections_alone(ranks: Ranks, backend: Backend) -> None:
    assert ranks(2, forked_by_the_user, backend=backend) == [8.0, 8.0]


def messages_and_parts() -> dict[str, Any]:
    """What the calls that are not all-reduces give, on three ranks."""
    with joined(deadline_s=30) as group:
        results: dict[str, Any] = {}
        following, before, started = (group.rank + 1) % 3, (group.rank - 1) % 3, group.sent_bytes
        first, second = torch.empty(2, dtype=torch.bfloat16), torch.empty(1, 3, dtype=torch.bool)
        sent = torch.full((2,), group.rank + 0.5, dtype=torch.bfloat16)
        group.exchange(
            [(following, sent), (following, torch.ones(1, 3, dtype=torch.bool))], [(before, first), (before, second)]
        )
        results["exchange"] = (first.tolist(), second.tolist(), group.sent_bytes - started)
        if group.rank == 0:
            group.send(torch.tensor([7]), to=2)
        if group.rank == 2:
            received = torch.tensor([0])
            group.receive(received, source=0)
            results["received"] = received.item()
        started = group.sent_bytes
        gathered = torch.empty(6, dtype=torch.int64)
        group.all_gather(gathered, torch.tensor([group.rank, -group.rank]))
        results["gathered"] = (gathered.tolist(), group.sent_bytes - started)
        for op in ("sum", "mean", "max"):
            own = torch.empty(2)
            group.reduce_scatter(own, torch.arange(6.0) * (group.rank + 1), op)
            results[op] = own.tolist()
        return results


@pytest.mark.parametrize("backend", ["gloo", "shm", "tcp"])
def test_messages_and_parts_arrive_where_they_belong(ranks: Ranks, backend: Backend) -> None:
    for rank, result in enumerate(ranks(3, messages_and_parts, backend=backend)):
        assert result["exchange"] == ([(rank - 1) % 3 + 0.5] * 2, [[True] * 3], 4 + 3)
        assert result.get("received", 7) == 7
        assert result["gathered"] == ([0, 0, 1, -1, 2, -2], 2 * 16)
        assert result["sum"] == [12.0 * rank, 6 * (2.0 * rank + 1)]
        assert result["mean"] == [4.0 * rank, 2 * (2.0 * rank + 1)]
        assert result["max"] == [6.0 * rank, 3 * (2.0 * rank + 1)]


def test_a_tensor_with_gaps_is_refused_as_a_message(ranks: Ranks) -> None:
    assert all("not contiguous" in text for text in ranks(2, strided_message))


def strided_message() -> str:
    """What is said of a column of a matrix."""
    with joined(deadline_s=30) as group:
        try:
            group.send(torch.zeros(4, 4)[:, 0], to=1 - group.rank)
        except SyncError as error:
            return str(error)
        return ""


def several_groups() -> dict[str, Any]:
    """Groups that ranks make side by side, unevenly many, and again after an end."""
    with joined(deadline_s=30) as world:
        results: dict[str, Any] = {"transports": set()}
        if world.rank == 3:
            world.subgroup([3])
        row = world.subgroup([0, 1] if world.rank < 2 else [2, 3])
        if world.rank in (0, 1):
            row.subgroup([0, 1]).close()  # of which the others know nothing
        column = world.subgroup([0, 2] if world.rank % 2 == 0 else [1, 3])
        again = world.copy()
        again.close()
        again = world.copy()
        sums = []
        for group in (row, column, again, world):
            tensor = torch.tensor([2.0**world.rank])
            group.all_reduce(tensor)
            sums.append(tensor.item())
            results["transports"].add(group.transport.name)
        results |= {
            "sums": sums,
            "place": (row.rank, row.size, column.rank, again.size),
            "one_host": world.host is world,
        }
        return results


@pytest.mark.parametrize("backend", ["gloo", "shm", "tcp"])
def test_groups_made_side_by_side_do_not_meet_each_other(ranks: Ranks, backend: Backend) -> None:
    for rank, result in enumerate(ranks(4, several_groups, backend=backend)):
        assert result["sums"] == [3.0 if rank < 2 else 12.0, 5.0 if rank % 2 == 0 else 10.0, 15.0, 15.0]
        assert result["place"] == (rank % 2, 2, rank // 2, 4)
        assert result["transports"] == {backend}
        assert result["one_host"]


def beside_the_main_thread() -> tuple[list[float], list[float]]:
    """Concurrent sums over a group and its copy, in another order on each rank.

    The copy's on a worker thread, the group's on the main one.
    """
    from paceline.comm.comm_thread import CommThread

    with joined(deadline_s=30) as group:
        copy, worker, theirs, ours = group.copy(), CommThread(), torch.ones(50, 1000), torch.ones(50, 1000)
        tasks = [worker.start(partial(copy.all_reduce, row)) for row in theirs]
        for row in ours:
            group.all_reduce(row)
        for task in tasks:
            task.wait()
        worker.close()
        copy.close()
        return sorted(set(theirs.flatten().tolist())), sorted(set(ours.flatten().tolist()))


@pytest.mark.parametrize("backend", ["gloo", "shm", "tcp"])
def test_a_copy_works_beside_the_main_thread(ranks: Ranks, backend: Backend) -> None:
    assert ranks(3, beside_the_main_thread, backend=backend) == [([3.0], [3.0])] * 3


@pytest.mark.parametrize("asked", [[1, 0], [0, 0, 1], [0, 7], []])
def test_ranks_that_make_no_group_are_refused(asked: list[int]) -> None:
    with raises(SyncError, "ranks.group_invalid"):
        Group(rank=0, size=4).subgroup(asked)


def different_calls() -> dict[str, str]:
    """What a checked group says when rank 1 does something else, again and again; the group stays of use."""
    with joined(deadline_s=30) as plain:
        group, odd = CheckedGroup.of(plain), plain.rank == 1
        numbers, other = torch.zeros(3), 1 - plain.rank
        calls: dict[str, Callable[[], object]] = {
            "shape": lambda: group.all_reduce(torch.zeros(3, 4 + odd)),
            "dtype": lambda: group.broadcast(torch.zeros(3, dtype=torch.float64 if odd else torch.float32)),
            "op": lambda: group.all_reduce(numbers, "max" if odd else "sum"),
            "call": lambda: (group.all_reduce if odd else group.broadcast)(numbers),
            "message": lambda: (
                group.exchange([(other, numbers[:2])], [(other, torch.zeros(2 + odd))]) if plain.rank < 2 else None
            ),
            "equal": lambda: group.gather_json("x" * plain.rank),
            "equal messages": lambda: group.exchange(
                [((plain.rank + 1) % 3, numbers)], [((plain.rank - 1) % 3, torch.zeros(3))]
            ),
        }
        said = {}
        for kind, call in calls.items():
            try:
                call()
                said[kind] = ""
            except SyncError as error:
                said[kind] = str(error)
            plain.barrier()
        said["counts"] = "" if group.sent_bytes == plain.sent_bytes else "the view counts by itself"
        return said


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_checked_group_names_two_calls_that_differ_before_either_starts(ranks: Ranks, backend: Backend) -> None:
    by_rank = ranks(3, different_calls, backend=backend)
    for said in by_rank:
        assert "rank 0 all-reduce (sum) of float32 (3, 4), rank 1 all-reduce (sum) of float32 (3, 5)" in said["shape"]
        assert (
            "rank 0 broadcast from rank 0 of float32 (3,), rank 1 broadcast from rank 0 of float64 (3,)"
            in said["dtype"]
        )
        assert "rank 0 all-reduce (sum) of float32 (3,), rank 1 all-reduce (max) of float32 (3,)" in said["op"]
        assert "rank 0 broadcast from rank 0 of float32 (3,), rank 1 all-reduce (sum) of float32 (3,)" in said["call"]
        assert said["equal"] == said["equal messages"] == said["counts"] == ""
    sender, receiver, third = (said["message"] for said in by_rank)
    assert "rank 0 float32 (2,), rank 1 float32 (3,)" in sender
    assert "rank 1 float32 (3,), rank 0 float32 (2,)" in receiver
    assert third == ""
