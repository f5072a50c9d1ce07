"""DataLoader worker processes: the batches that they send, and one that is killed.

The rank that it belonged to is named, and the worker, and nobody else.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import paceline
from paceline.comm.backend import joined
from paceline.data import sending
from paceline.data.loader import Loader
from paceline.data.loader_processes import Workers
from paceline.data.sending import LargeBatch, Sending, SmallBatch
from paceline.elastic.failure import ErrorRecord
from paceline.errors import LoaderProcessError
from paceline.job.partition import Partition, PartitionSpec
from ranks import RankError, Ranks


def loader(**options: Any) -> DataLoader[Any]:
    dataset = TensorDataset(torch.randn(400, 4), torch.arange(400) % 3)
    return DataLoader(dataset, 8, num_workers=2, multiprocessing_context="fork", **options)


def train_and_lose_a_worker() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    engine = paceline.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=F.cross_entropy, loader=loader())
    for step, batch in enumerate(engine.loader):
        if step == 3 and os.environ["RANK"] == "1":
            # While this rank waits for the other one, which torch's own handler of SIGCHLD would interrupt.
            threading.Timer(0.2, multiprocessing.active_children()[0].kill).start()
        if step == 3 and os.environ["RANK"] == "0":
            threading.Event().wait(0.6)
        engine.step(batch)


def test_the_rank_whose_loader_process_was_killed_is_blamed_and_nobody_else(ranks: Ranks) -> None:
    said = (
        r"(?s)rank 1 of 2 failed first.*rank 1, before step 4 of epoch 0: a DataLoader worker process \(pid \d+\) "
        r"was killed by signal 9"
    )
    with pytest.raises(RankError, match=said):
        ranks(2, train_and_lose_a_worker, backend="shm")


def lose_a_worker_of_ones_own(done: str) -> str:
    """With a DataLoader that paceline knows nothing of, as for validation."""
    with joined(deadline_s=30.0) as group:
        if group.rank == 0:
            while not Path(done).exists():
                threading.Event().wait(0.02)
            return ""
        batches: Any = iter(loader())
        next(batches)
        threading.Timer(0.2, multiprocessing.active_children()[0].kill).start()
        try:
            group.barrier()
        except LoaderProcessError as error:
            return f"{ErrorRecord.of(error, 1).secondary} {error}"
        finally:
            Path(done).touch()
            del batches  # which ends its other process
        return "nothing was raised"


def test_a_wait_that_the_death_of_another_loaders_process_ends_tells_of_that_process(
    ranks: Ranks, tmp_path: Path
) -> None:
    _, said = ranks(2, lose_a_worker_of_ones_own, str(tmp_path / "done"), backend="shm")
    assert said.startswith("False rank 1 failed in a wait for other ranks (all-reduce): DataLoader worker (pid ")
    assert "is killed by signal: Killed" in said


def test_a_lost_loader_process_may_be_tried_again() -> None:
    record = ErrorRecord.of(LoaderProcessError("test.planted", "rank 0: a DataLoader worker process was killed"), 0)
    assert record.explained
    assert record.may_pass
    assert not record.secondary


SCRIPT = """
import torch
from torch.utils.data import TensorDataset
from paceline.data.loader import Loader
from paceline.job.partition import Partition, PartitionSpec

partition = Partition(PartitionSpec(), samples=64, global_batch=8, seed=0, replica=0, replicas=1)
loader = Loader(TensorDataset(torch.arange(64)), partition, num_workers=1)
batches = iter(loader)
print(next(batches)[0].shape)
"""


def test_a_script_ends_that_leaves_an_epoch_unfinished() -> None:
    """multiprocessing waited for the loader process for ever, which ignores its first SIGTERM."""
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert (ended.stdout, ended.stderr) == ("torch.Size([8])\n", "")


class Told(Dataset[int]):
    """Samples that are what the process was told when it was forked."""

    told = 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return Told.told


def test_processes_that_are_started_have_nothing_in_memory_of_what_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    partition = Partition(PartitionSpec(), samples=64, global_batch=8, seed=0, replica=0, replicas=1)
    loader = Loader(Told(), partition, num_workers=1)
    loader.start()
    processes = set(multiprocessing.active_children())
    loader.start()
    monkeypatch.setattr(Told, "told", 1)
    assert [batch.unique().tolist() for batch in loader] == [[0]] * 8
    assert set(multiprocessing.active_children()) == processes, "others were started"
    loader.close()
    assert not multiprocessing.active_children()
    assert [batch.unique().tolist() for batch in loader] == [[1]] * 8
    loader.close()


def test_processes_that_are_started_end_where_a_saved_position_is_loaded() -> None:
    partition = Partition(PartitionSpec(), samples=64, global_batch=8, seed=0, replica=0, replicas=1)
    first, later = (Loader(TensorDataset(torch.arange(64)), partition, num_workers=1) for _ in range(2))
    batches = iter(first)
    for _ in range(3):
        next(batches)
    before = set(multiprocessing.active_children())
    later.start()
    assert len(multiprocessing.active_children()) == len(before) + 1
    later.load_state_dict(first.state_dict())
    assert set(multiprocessing.active_children()) == before
    later.start()
    assert torch.equal(next(iter(later))[0], next(batches)[0])
    first.close()
    later.close()


class InLoaderProcess:
    """What `get_worker_info` says there."""


ALONE = Sending(Workers())  # without shared memory


def sent(batch: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sending, "get_worker_info", InLoaderProcess)
    return ALONE(batch)


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.complex64, torch.int32]


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4), st.booleans())
def test_small_batches_arrive_bit_by_bit_in_memory_of_their_own(
    dtype: torch.dtype, shape: list[int], nested: bool
) -> None:
    values = torch.randn(shape, dtype=torch.float32).mul(50).to(dtype)
    batch: Any = {"x": (values, [3, None, "text"])} if nested else values
    with pytest.MonkeyPatch.context() as patch:
        message = sent(batch, patch)
    assert isinstance(message, SmallBatch)
    found = ALONE.received(message)
    if nested:
        assert found["x"][1] == [3, None, "text"]
        found = found["x"][0]
    assert (found.dtype, found.shape) == (values.dtype, values.shape)
    assert torch.equal(found, values)
    before = values.clone()
    found.zero_()
    assert torch.equal(values, before)


EDGES = [edge + more for bits in (15, 16, 31, 32, 63) for edge in (-(2**bits), 2**bits) for more in (-1, 0, 1)]


@given(st.lists(st.sampled_from([n for n in EDGES if -(2**63) <= n < 2**63]) | st.integers(-9, 9), max_size=9))
def test_whole_numbers_of_any_size_arrive_unchanged(values: list[int]) -> None:
    batch = torch.tensor(values, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        found = ALONE.received(sent(batch, patch))
    assert (found.dtype, found.tolist()) == (torch.int64, values)


WHOLE = torch.arange(24.0).view(4, 6)


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(200_000),
        [torch.zeros(100_000), torch.zeros(100_000)],
        WHOLE[:2],
        WHOLE.t(),
        (WHOLE, WHOLE.view(-1)),
        nn.Parameter(torch.zeros(3)),
        torch.zeros(3, requires_grad=True),
        torch.eye(3).to_sparse(),
        torch.tensor([1j]).conj(),
        np.zeros(100_000),
        lambda: 0,
    ],
    ids=[
        "large",
        "large together",
        "a part",
        "transposed",
        "two views",
        "parameter",
        "grad",
        "sparse",
        "conj",
        "array",
        "code",
    ],
)
def test_what_is_not_small_and_plain_is_left_to_torch(batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sent(batch, monkeypatch) is batch


def test_where_no_loader_process_reads_a_batch_stays_as_it_is() -> None:
    assert ALONE(WHOLE) is WHOLE


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
@pytest.mark.parametrize("pinned", [False, True])
def test_small_and_large_batches_come_from_loader_processes(pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned ones are sent by torch, whose thread pins tensors; here there is nothing to pin them for."""
    kinds = received_kinds(monkeypatch)
    for width, kind in ((4, SmallBatch), (8000, LargeBatch)):
        made = loader_of(numbers(width))
        made.pin_memory = pinned
        made.close()
        assert torch.equal(torch.cat([batch[0] for batch in made]), numbers(width))
        made.close()
        assert kinds == ({list} if pinned else {kind})
        kinds.clear()


def numbers(width: int, samples: int = 64) -> Tensor:
    return torch.arange(samples * float(width)).view(samples, width)


def loader_of(rows: Tensor, **options: Any) -> Loader:
    spec = PartitionSpec(shuffle=False)
    partition = Partition(spec, samples=len(rows), global_batch=32, seed=0, replica=0, replicas=1)
    return Loader(TensorDataset(rows), partition, workers=Workers(1, **options))


def received_kinds(monkeypatch: pytest.MonkeyPatch) -> set[type]:
    kinds: set[type] = set()
    received = Sending.received

    def noted(sending: Sending, message: Any) -> Any:
        kinds.add(type(message))
        return received(sending, message)

    monkeypatch.setattr(Sending, "received", noted)
    return kinds


@given(st.lists(st.sampled_from(["drop", "keep", "keep a part"]), min_size=1, max_size=8))
@settings(max_examples=6, deadline=None)
def test_large_batches_that_are_kept_keep_their_values(fates: list[str]) -> None:
    rows = numbers(8000, 640)
    loader, kept = loader_of(rows), []
    for epoch in range(2):
        for step, (batch,) in enumerate(loader):
            first = 32 * step
            assert torch.equal(batch, rows[first : first + 32])
            fate = fates[(epoch + step) % len(fates)]
            if fate != "drop":
                kept.append((batch if fate == "keep" else batch[3:5], first if fate == "keep" else first + 3))
    loader.close()
    assert all(torch.equal(batch, rows[first : first + len(batch)]) for batch, first in kept)


def test_the_memory_of_dropped_batches_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = received_kinds(monkeypatch)
    loader = loader_of(numbers(8000, 640))
    places = {batch.data_ptr() for _ in range(3) for (batch,) in loader}
    loader.close()
    assert kinds == {LargeBatch}
    assert len(places) <= 6


def test_many_batches_read_ahead_arrive_whole(capsys: pytest.CaptureFixture[str]) -> None:
    rows = numbers(4500, 32 * 300)
    loader = loader_of(rows, prefetch_factor=300)
    for step, (batch,) in enumerate(loader):
        assert torch.equal(batch, rows[32 * step : 32 * step + 32])
    loader.close()
    assert capsys.readouterr().err == ""


def test_a_forked_process_keeps_the_batch_that_its_parent_drops() -> None:
    rows = numbers(8000, 640)
    loader = loader_of(rows)
    for epoch in range(2):
        batches = iter(loader)
        batch = next(batches)[0]
        read, write = os.pipe()
        if not (child := os.fork()):
            os.read(read, 1)
            os._exit(0 if torch.equal(batch, rows[:32]) else 1)
        del batch
        assert torch.equal(torch.cat([part[0] for part in batches]), rows[32:]), epoch
        os.write(write, b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.close(read)
        os.close(write)
    loader.close()


def test_loader_processes_that_are_spawned_send_large_batches_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = received_kinds(monkeypatch)
    loader = loader_of(numbers(8000), context="spawn")
    assert torch.equal(torch.cat([batch[0] for batch in loader]), numbers(8000))
    loader.close()
    assert kinds == {list}
