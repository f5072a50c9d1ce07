"""Dealing a user's DataLoader: what is lost here is an argument of theirs, dropped without a word."""

from __future__ import annotations

import inspect
import itertools
import json
import multiprocessing
import os
import random
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import paceline
from paceline.engine.engine import RankEngine
from paceline.errors import DataError, LoaderProcessError
from ranks import RankError, Ranks
from refusals import raises

SAMPLES, BATCH = 50, 8


pytestmark = pytest.mark.usefixtures("loader_processes_end")


def numbered(samples: int = SAMPLES) -> TensorDataset:
    """Sample i is (i, i % 3)."""
    numbers = torch.arange(samples, dtype=torch.float32)
    return TensorDataset(numbers.unsqueeze(1), torch.arange(samples) % 3)


def engine_of(loader: DataLoader[Any], **options: Any) -> RankEngine:
    torch.manual_seed(1)
    model = nn.Linear(1, 3)
    return paceline.setup(
        model, torch.optim.SGD(model.parameters(), lr=1e-4), loss=F.cross_entropy, loader=loader, **options
    )


def rows(batch: Any) -> list[int]:
    """The numbers of the samples in a rank's part of a batch."""
    return [] if batch is None else [int(x) for x in batch[0].flatten()]


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Buckets(Sampler[list[int]]):
    """Batches of varying sizes, as buckets by length make them, in an order from a generator of NumPy."""

    def __init__(self, seed: int = 4) -> None:
        super().__init__()
        self.random = np.random.default_rng(seed)

    def __iter__(self) -> Iterator[list[int]]:
        order, first = self.random.permutation(SAMPLES), 0
        for size in itertools.cycle((3, 9, 1, 6)):
            if first >= SAMPLES:
                return
            yield order[first : first + size].tolist()
            first += size

    def __len__(self) -> int:
        return 11


class Drawn(Sampler[int]):
    """A sampler of as many indices as there are samples, drawn by a subclass."""

    def __len__(self) -> int:
        return SAMPLES


class Remembering(Drawn):
    """Each epoch begins one later than the last, which only a private counter knows."""

    times = 0

    def __iter__(self) -> Iterator[int]:
        first, self.times = self.times, self.times + 1
        return iter(range(first, SAMPLES))


class ByEpoch(Drawn):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        random.Random(self.epoch).shuffle(order)
        return iter(order)


class OfGlobalState(Drawn):
    """Draws from the random states of the process, as many do."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(20).tolist()
        yield from (20 + np.random.permutation(15)).tolist()
        yield from random.sample(range(35, 50), 15)


def loader_with(kind: str) -> DataLoader[Any]:
    """A DataLoader whose order is its own."""
    return DataLoader(numbered(), **own_orders()[kind])


def own_orders() -> dict[str, dict[str, Any]]:
    """Arguments of DataLoaders, by what draws their order."""
    weights = torch.linspace(0.1, 2, SAMPLES).tolist()
    return {
        "subset": {"batch_size": BATCH, "sampler": SubsetRandomSampler(range(30), generator=seeded())},
        "weighted": {"batch_size": BATCH, "sampler": WeightedRandomSampler(weights, 40, generator=seeded())},
        "replacement": {
            "batch_size": BATCH,
            "sampler": RandomSampler(numbered(), replacement=True, num_samples=70, generator=seeded()),
        },
        "generator": {"batch_size": BATCH, "shuffle": True, "generator": seeded()},
        "no generator": {"batch_size": BATCH, "sampler": SubsetRandomSampler(range(30))},
        "list": {"batch_size": BATCH, "sampler": list(range(20))[::-1]},
        "drop_last": {"batch_size": BATCH, "sampler": list(range(30)), "drop_last": True},
        "half": {"batch_size": BATCH, "sampler": SequentialSampler(range(25))},
        "by epoch": {"batch_size": BATCH, "sampler": ByEpoch()},
        "remembering": {"batch_size": BATCH, "sampler": Remembering()},
        "global state": {"batch_size": BATCH, "sampler": OfGlobalState()},
        "buckets": {"batch_sampler": Buckets()},
        "batch sampler": {
            "batch_sampler": BatchSampler(SubsetRandomSampler(range(30), generator=seeded()), 7, drop_last=True)
        },
        "bulk": {
            "batch_size": None,
            "sampler": BatchSampler(RandomSampler(range(50), generator=seeded()), 7, drop_last=False),
        },
    }


OWN = list(own_orders())


def epochs_of(kinds: Iterable[str], epochs: int = 2) -> dict[str, list[list[list[int]]]]:
    found = {}
    for kind in kinds:
        engine = engine_of(loader_with(kind))
        found[kind] = [[rows(batch) for batch in engine.loader] for _ in range(epochs)]
    return found


def test_the_order_of_a_loaders_own_sampler_is_kept(ranks: Ranks) -> None:
    """A SubsetRandomSampler that is left out trains on the validation data."""
    alone = epochs_of(OWN)
    for kind in set(OWN) - {"no generator", "global state"}:  # torch's own loader is the reference
        plain: Any = loader_with(kind)
        for epoch in range(2):
            if kind == "by epoch":
                plain.sampler.set_epoch(epoch)
            assert alone[kind][epoch] == [rows(batch) for batch in plain], kind
    assert sorted(itertools.chain(*alone["no generator"][0])) == list(range(30))
    assert sorted(itertools.chain(*alone["global state"][0])) == list(range(50))
    assert alone["global state"][0] != alone["global state"][1]
    first, second = ranks(2, epochs_of, OWN)
    for kind in OWN:
        joined = [[a + b for a, b in zip(*epoch, strict=True)] for epoch in zip(first[kind], second[kind], strict=True)]
        assert joined == alone[kind], kind
        assert all(
            abs(len(a) - len(b)) <= 1
            for epoch in zip(first[kind], second[kind], strict=True)
            for a, b in zip(*epoch, strict=True)
        )


def losses_with(kinds: Iterable[str]) -> dict[str, list[float]]:
    found = {}
    for kind in kinds:
        engine = engine_of(loader_with(kind))
        found[kind] = [engine.step(batch).loss for batch in engine.loader]
    return found


def test_batches_of_varying_sizes_are_weighed_by_their_samples(ranks: Ranks) -> None:
    kinds = ["weighted", "buckets"]
    alone = losses_with(kinds)
    for losses in ranks(2, losses_with, kinds):
        for kind in kinds:
            assert losses[kind] == pytest.approx(alone[kind], rel=1e-5)


def resumed(kind: str, saved: str) -> list[list[int]]:
    engine = engine_of(loader_with(kind))
    engine.loader.load_state_dict(json.loads(saved))
    return [rows(batch) for batch in engine.loader] + [rows(batch) for batch in engine.loader]


def saved_after(kind: str, steps: int, epochs: int) -> tuple[str, list[list[int]]]:
    """A position of a fresh loader, and what follows it in this epoch and the next one."""
    engine = engine_of(loader_with(kind))
    for _ in range(epochs):
        list(engine.loader)
    if not steps:
        saved = json.dumps(engine.loader.state_dict())
        return saved, [rows(batch) for _ in range(2) for batch in engine.loader]
    rest = []
    for step, batch in enumerate(engine.loader, 1):
        if step > steps:
            rest.append(rows(batch))
        if step == steps:
            saved = json.dumps(engine.loader.state_dict())
    return saved, rest + [rows(batch) for batch in engine.loader]


def resume_all(positions: dict[str, str]) -> dict[str, list[list[int]]]:
    return {kind: resumed(kind, saved) for kind, saved in positions.items()}


@pytest.mark.parametrize(("epochs", "steps"), [(0, 0), (0, 2), (1, 0), (2, 1)])
def test_a_saved_position_goes_on_exactly_with_any_sampler_and_number_of_ranks(
    ranks: Ranks, epochs: int, steps: int
) -> None:
    positions = {}
    for kind in OWN:
        positions[kind], rest = saved_after(kind, steps, epochs)
        assert resumed(kind, positions[kind]) == rest, kind
    if (epochs, steps) == (2, 1):
        first, second = ranks(2, resume_all, positions)
        for kind, saved in positions.items():
            assert [a + b for a, b in zip(first[kind], second[kind], strict=True)] == resumed(kind, saved), kind


def test_a_position_at_the_end_of_an_epoch_goes_on_with_the_next_one() -> None:
    for kind in ("subset", "buckets", "remembering"):
        engine = engine_of(loader_with(kind))
        saved = ""
        for _ in engine.loader:
            saved = json.dumps(engine.loader.state_dict())  # the last one stands
        following = [rows(batch) for batch in engine.loader]
        again = engine_of(loader_with(kind))
        again.loader.load_state_dict(json.loads(saved))
        assert [rows(batch) for batch in again.loader] == following, kind


def test_loading_a_position_in_the_same_process_goes_back_to_it() -> None:
    engine = engine_of(loader_with("subset"))
    start = json.dumps(engine.loader.state_dict())
    seen = [rows(batch) for batch in engine.loader]
    list(engine.loader)
    engine.loader.load_state_dict(json.loads(start))
    assert [rows(batch) for batch in engine.loader] == seen


class Unrepeatable(Drawn):
    def __iter__(self) -> Iterator[int]:
        return iter([int.from_bytes(os.urandom(4)) % SAMPLES for _ in range(SAMPLES)])


def test_a_sampler_that_does_not_draw_the_same_again_is_not_resumed_in_silence() -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(numbered(), batch_size=BATCH, sampler=Unrepeatable())

    engine = engine_of(loader())
    next(iter(engine.loader))
    saved = json.dumps(engine.loader.state_dict())
    again = engine_of(loader())
    again.loader.load_state_dict(json.loads(saved))
    with raises(DataError, "data.sampler_not_repeatable", batches=1, epoch=0):
        next(iter(again.loader))


class OfTheRank(Drawn):
    """As scripts for DDP divide the data by hand."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(int(os.environ["RANK"]), SAMPLES, int(os.environ["WORLD_SIZE"])))

    def __len__(self) -> int:
        return SAMPLES // 2


def first_batch(sampler: Any) -> None:
    next(iter(engine_of(DataLoader(numbered(), batch_size=BATCH, sampler=sampler)).loader))


def test_a_sampler_that_draws_something_else_on_each_rank_is_refused(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="draws other indices on rank 1 than on rank 0"):
        ranks(2, first_batch, OfTheRank())


def test_a_sampler_for_one_rank_of_ddp_is_refused_with_the_line_to_write() -> None:
    sampler: Any = DistributedSampler(numbered(), num_replicas=2, rank=0)
    with raises(DataError, "data.sampler_distributed", parts=2):
        engine_of(DataLoader(numbered(), batch_size=BATCH, sampler=sampler))
    with raises(DataError, "data.sampler_distributed"):
        engine_of(DataLoader(numbered(), batch_sampler=BatchSampler(sampler, BATCH, drop_last=False)))


class Raises(Drawn):
    def __iter__(self) -> Iterator[int]:
        yield 0
        raise KeyError("length")


def test_a_sampler_that_raises_is_named_on_every_rank(ranks: Ranks) -> None:
    with raises(DataError, "data.sampler_failed"):
        first_batch(Raises())
    with pytest.raises(RankError, match=r"Raises raised KeyError: 'length'"):
        ranks(2, first_batch, Raises())


class Endless(Sampler[int]):
    """As training by iterations draws: no length and no end; notes how far ahead it is asked."""

    drawn = 0

    def __iter__(self) -> Iterator[int]:
        for self.drawn in itertools.count(1):
            yield self.drawn % SAMPLES


def endless(workers: int = 0) -> tuple[list[list[int]], int]:
    sampler = Endless()
    by_batch: Any = BatchSampler(sampler, BATCH, drop_last=False)
    engine = engine_of(
        DataLoader(
            numbered(), batch_sampler=by_batch, num_workers=workers, multiprocessing_context="fork" if workers else None
        )
    )
    with pytest.raises(TypeError, match="has no length"):
        len(engine.loader)
    return [rows(batch) for batch in itertools.islice(engine.loader, 20)], sampler.drawn


def test_a_sampler_without_an_end_is_drawn_no_earlier_than_a_dataloader_would(ranks: Ranks) -> None:
    alone, drawn = endless()
    assert alone[0] == list(range(1, 9))
    assert drawn <= 21 * BATCH
    first, second = ranks(2, endless, 1)
    assert [a + b for a, b in zip(first[0], second[0], strict=True)] == alone


class Named(Dataset[Any]):
    """Samples by (name, number), as data sets over several files have them."""

    def __getitem__(self, key: tuple[str, int]) -> tuple[Tensor, int]:
        return torch.tensor([float(key[1] + (100 if key[0] == "b" else 0))]), 0


def named() -> list[list[int]]:
    keys = [(name, i) for i in range(6) for name in "ab"]
    return [rows(batch) for batch in engine_of(DataLoader(Named(), batch_size=4, sampler=keys)).loader]


def test_indices_need_not_be_numbers(ranks: Ranks) -> None:
    alone = named()
    assert alone[0] == [0, 100, 1, 101]
    assert [a + b for a, b in zip(*ranks(2, named), strict=True)] == alone


def doubled(samples: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.stack([2 * x for x, _ in samples]), torch.tensor([int(y) for _, y in samples])


class Numbered(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES


class Collated(Numbered):
    """Makes whole batches by itself, which a `collate_fn` then gets, as from a DataLoader."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)]), index % 3

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return torch.tensor([[float(i)] for i in indices]), torch.tensor([i % 3 for i in indices])


def halved(batch: Any) -> tuple[Tensor, Tensor]:
    return batch[0] / 2, batch[1]


def test_collate_fn_is_called_also_where_the_data_set_makes_whole_batches() -> None:
    assert rows(next(iter(engine_of(DataLoader(numbered(), BATCH, collate_fn=doubled)).loader))) == [
        2 * i for i in range(BATCH)
    ]
    assert rows(next(iter(engine_of(DataLoader(Collated(), BATCH, collate_fn=halved)).loader))) == [
        i // 2 for i in range(BATCH)
    ]
    assert rows(next(iter(engine_of(DataLoader(Collated(), BATCH)).loader))) == list(range(BATCH))


class Opened(Numbered):
    """A file that each loader process opens for itself."""

    opened_by = -1

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([float(self.opened_by)]), index


def open_it(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.opened_by = worker + 10  # type: ignore[attr-defined]


def test_worker_init_fn_runs_in_each_loader_process_and_sees_the_users_data_set() -> None:
    batches = iter(engine_of(DataLoader(Opened(), BATCH, num_workers=2, worker_init_fn=open_it)).loader)
    assert [rows(next(batches))[0], rows(next(batches))[0]] == [10, 11]
    batches.close()  # type: ignore[attr-defined]


def test_loader_processes_are_started_as_multiprocessing_context_says() -> None:
    loader = engine_of(
        DataLoader(numbered(), BATCH, num_workers=1, worker_init_fn=open_it, multiprocessing_context="spawn")
    ).loader
    assert loader.workers.context.get_start_method() == "spawn"


class Pids(Numbered):
    """Who reads, by which start method, and what the data set was told in the rank meanwhile."""

    told = 0

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([float(self.told), float(os.getpid())]), index


@pytest.mark.parametrize("persistent", [False, True])
def test_loader_processes_live_from_epoch_to_epoch_only_where_they_are_persistent(persistent: bool) -> None:
    dataset = Pids()
    engine = engine_of(DataLoader(dataset, BATCH, num_workers=1, persistent_workers=persistent))
    told, pids = [], set()
    for epoch in range(2):
        dataset.told = epoch
        for batch in engine.loader:
            told.append(int(batch[0][0, 0]))
            pids.add(int(batch[0][0, 1]))
    assert (len(pids) == 1) == persistent
    assert sorted(set(told)) == ([0] if persistent else [0, 1])
    assert bool(multiprocessing.active_children()) == persistent
    engine.loader.close()


class Asked(Dataset[Any]):
    """Counts what loader processes were asked for."""

    def __init__(self) -> None:
        self.asked = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.asked += 1
        return torch.zeros(1), index


def test_loader_processes_read_as_far_ahead_as_prefetch_factor_says() -> None:
    dataset = Asked()
    engine = engine_of(DataLoader(dataset, 2, num_workers=1, prefetch_factor=7))
    batches = iter(engine.loader)
    next(batches)
    assert engine.loader.workers.prefetch_factor == 7
    engine.loader.close()
    assert int(dataset.asked) <= 2 * 9


class Slow(Numbered):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(1)
        return torch.zeros(1), index


def test_a_loader_process_that_does_not_answer_within_timeout_is_an_error() -> None:
    engine = engine_of(DataLoader(Slow(), 1, num_workers=1, timeout=0.1))
    with raises(LoaderProcessError, "loader.timeout", timeout_s=0.1, where="rank 0, before step 0 of epoch 0"):
        next(iter(engine.loader))


def test_every_argument_of_a_dataloader_is_known_here() -> None:
    """A new one in torch must be honoured or refused before anybody finds out that it is dropped."""
    known = {
        "dataset",
        "batch_size",
        "shuffle",
        "sampler",
        "batch_sampler",
        "num_workers",
        "collate_fn",
        "pin_memory",
        "drop_last",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
        "generator",
        "prefetch_factor",
        "persistent_workers",
        "pin_memory_device",  # deprecated in torch 2.13 without effect: the current accelerator is taken
        "in_order",  # False only permits another order; batches come in order
    }
    assert set(inspect.signature(DataLoader.__init__).parameters) - {"self"} == known


def test_batches_come_in_order_also_where_that_is_not_asked_for() -> None:
    engine = engine_of(DataLoader(numbered(), BATCH, num_workers=2, in_order=False))
    assert list(itertools.chain(*(rows(batch) for batch in engine.loader))) == list(range(SAMPLES))


class Reversing(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([(-x, y) for x, y in super().__iter__()])


def test_a_subclass_with_an_iteration_of_its_own_is_refused() -> None:
    with raises(DataError, "data.loader_overridden", class_name="Reversing", name="__iter__"):
        engine_of(Reversing(numbered(), BATCH))


def test_a_set_smaller_than_the_batch_is_one_batch() -> None:
    assert [rows(batch) for batch in engine_of(DataLoader(numbered(5), BATCH)).loader] == [list(range(5))]


def test_a_second_loader_is_dealt_as_well_in_an_order_of_its_own() -> None:
    engine = engine_of(DataLoader(numbered(), BATCH, shuffle=True))
    other = engine.deal(DataLoader(numbered(), BATCH, shuffle=True))
    first, second = ([rows(batch) for batch in loader] for loader in (engine.loader, other))
    assert first != second
    assert sorted(itertools.chain(*second)) == list(range(SAMPLES))


def losses_with_a_validation_loader() -> list[float]:
    """Validation by a dealt loader, whose last batch is one sample, between two epochs of training."""
    torch.manual_seed(1)
    model = nn.Linear(1, 3)
    engine = paceline.setup(model, torch.optim.SGD(model.parameters(), lr=1e-4), loader=DataLoader(numbered(48), BATCH))
    validation = engine.deal(DataLoader(numbered(9), BATCH))
    losses = []
    for _ in range(2):
        for x, y in engine.loader:
            losses.append(float(engine.backward(F.cross_entropy(model(x), y))))
            engine.update()
        for _ in validation:
            pass
    return losses


def test_a_loss_is_weighed_by_the_loader_under_way_and_not_by_one_that_validated(ranks: Ranks) -> None:
    assert ranks(2, losses_with_a_validation_loader)[0] == pytest.approx(losses_with_a_validation_loader(), rel=1e-5)


def test_a_loader_of_one_ranks_part_is_refused_for_an_evaluation_too() -> None:
    engine: Any = engine_of(DataLoader(numbered(), BATCH))
    sampler: Any = DistributedSampler(numbered(), num_replicas=2, rank=0)
    with raises(DataError, "data.sampler_distributed", parts=2):
        engine.evaluate(DataLoader(numbered(), BATCH, sampler=sampler))


def evaluated() -> list[float]:
    engine: Any = engine_of(loader_with("list"))
    loaders = [loader_with(kind) for kind in ("subset", "buckets")]
    found = [engine.evaluate(loader, lambda batch: {"mean": batch[0].double().flatten()}) for loader in loaders]
    engine.close()
    return [float(metrics["mean"]) for metrics in found]


def test_an_evaluation_draws_a_sampler_once_for_all_ranks(ranks: Ranks) -> None:
    """Over shared memory, which cannot sum what inference mode allocates."""
    assert ranks(2, evaluated, backend="shm") == [pytest.approx(evaluated())] * 2


@pytest.mark.parametrize(
    ("options", "setup", "said"),
    [
        ({"batch_size": 10, "shuffle": True}, {}, "batch_size was 8 and is 10"),
        ({"batch_size": 8}, {}, "shuffle was True and is False"),
        ({"batch_size": 8, "shuffle": True}, {"seed": 7}, "seed was 0 and is 7"),
    ],
)
def test_a_position_within_an_epoch_that_is_dealt_in_another_way_is_refused(
    options: dict[str, Any], setup: dict[str, Any], said: str
) -> None:
    engine = engine_of(DataLoader(numbered(), BATCH, shuffle=True))
    next(iter(engine.loader))
    within = json.loads(json.dumps(engine.loader.state_dict()))
    list(engine.loader)
    between = json.loads(json.dumps(engine.loader.state_dict()))
    other = engine_of(DataLoader(numbered(), **options), **setup)
    other.loader.load_state_dict(between)
    with raises(DataError, "data.position_differs", step=1, differs=said):
        other.loader.load_state_dict(within)


def train_on_the_loader_itself() -> None:
    torch.manual_seed(1)
    model, loader = nn.Linear(1, 3), DataLoader(numbered(), BATCH, shuffle=True)
    engine = paceline.setup(model, torch.optim.SGD(model.parameters(), lr=1e-4), loader=loader)
    for x, y in loader:
        engine.backward(F.cross_entropy(model(x), y))
        engine.update()


def test_a_loop_over_the_dataloader_instead_of_the_engines_is_refused_on_several_ranks(ranks: Ranks) -> None:
    train_on_the_loader_itself()
    with raises(RankError, "loop.loader_unused"):
        ranks(2, train_on_the_loader_itself)
