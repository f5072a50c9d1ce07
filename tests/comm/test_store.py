"""The channel's store under torch's process groups: every backend meets in it, and errors are torch's."""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from paceline.comm import tcp, transport  # noqa: F401 - registers the backends
from paceline.comm.rendezvous import ChannelStore
from paceline.wire.key import RunKey
from paceline.wire.store import StoreClient, StoreServer
from ranks import Ranks

DEADLINE_S = 30.0


def test_torch_finds_every_call_and_its_own_errors() -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = StoreServer(None, Path(folder) / "store")
        own = ChannelStore(StoreClient(Path(folder) / "store", None, DEADLINE_S))
        store: Any = PrefixStore("prefix", own)
        store.set("a", "1")
        assert own.get("prefix/a") == b"1"
        assert [store.add("n", 3), store.get("n"), store.check(["a", "b"])] == [3, b"3", False]
        store.append("a", "2")
        assert store.has_extended_api()
        store.multi_set(["x", "y"], ["7", "8"])
        assert store.multi_get(["a", "y"]) == [b"12", b"8"]
        assert store.compare_set("a", "12", "new") == b"new"
        assert [store.delete_key("a"), store.num_keys()] == [True, 3]
        with pytest.raises(dist.DistStoreError, match="prefix/never, which no process has set"):
            store.wait(["never"], timedelta(seconds=0.05))
        store.set_timeout(timedelta(seconds=0.05))
        with pytest.raises(dist.DistStoreError, match="prefix/never"):
            store.get("never")
        server.close()
        with pytest.raises(dist.DistNetworkError):
            store.set("late", "1")
        own.close()


def sums_in(backend: str, key: bytes | None, where: tuple[str, int] | Path | str) -> list[float]:
    """Sums over a group of all ranks, and over one made within it, that met in the channel's store."""
    import os

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if backend == "tcp":  # between ranks of one host it would be shared memory
        transport.host_identity = lambda: f"the host of rank {rank}"
    dist.barrier()  # a rank that leaves at once would fail those that still connect to it
    dist.destroy_process_group()
    store = ChannelStore(StoreClient(where, RunKey.from_pem(key) if key else None, DEADLINE_S))  # type: ignore[arg-type]
    timeout = timedelta(seconds=DEADLINE_S)
    dist.init_process_group(backend, store=PrefixStore("run", store), rank=rank, world_size=size, timeout=timeout)
    tensor = torch.full((1000,), float(rank + 1))
    dist.all_reduce(tensor)
    pair = dist.new_group([0, 1], timeout=timeout)
    if rank < 2:
        dist.all_reduce(tensor, group=pair)
    names: list[object] = [None] * size
    dist.all_gather_object(names, rank)
    assert names == list(range(size))
    dist.barrier()
    dist.destroy_process_group()
    store.close()
    return [tensor[0].item(), tensor[-1].item()]


@pytest.mark.parametrize("backend", ["shm", "tcp", "gloo"])
@pytest.mark.parametrize("over", ["TLS", "a Unix socket"])
def test_groups_of_every_backend_meet_in_it(backend: str, over: str, ranks: Ranks) -> None:
    with tempfile.TemporaryDirectory() as folder:
        key = RunKey.make() if over == "TLS" else None
        server = StoreServer(key, ("127.0.0.1", 0) if key else Path(folder) / "store")
        results = ranks(3, sums_in, backend, key.to_pem() if key else None, server.address)
        server.close()
    assert results == [[12.0, 12.0], [12.0, 12.0], [6.0, 6.0]]
    assert server.unauthenticated == 0
