"""Iterable data sets and data sets of whole batches.

Lost here is a sample trained twice, or by no rank, without a word.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import paceline
from paceline.data.whole import cut, rows_of
from paceline.engine.engine import RankEngine
from paceline.errors import DataError
from paceline.job.samples import digest_of
from ranks import RankError, Ranks
from refusals import raises

SAMPLES, BATCH = 50, 8


pytestmark = pytest.mark.usefixtures("loader_processes_end")


def sample(number: int) -> tuple[Tensor, int]:
    return torch.tensor([float(number)]), number % 3


class Streamed(IterableDataset[Any]):
    """0, 1, …, of which each of n loader processes takes every n-th."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, stride = (info.id, info.num_workers) if info else (0, 1)
        return (sample(i) for i in range(first, self.samples, stride))


class Shuffled(Streamed):
    """In another order each epoch, drawn from the random states of the process as a shuffle buffer does."""

    def __iter__(self) -> Iterator[Any]:
        order = list(super().__iter__())
        random.shuffle(order)
        return iter(order)


class Counted(Streamed):
    def __len__(self) -> int:
        return self.samples


class WholeBatches(IterableDataset[Any]):
    """Batches of varying sizes, which the data set makes itself."""

    def __iter__(self) -> Iterator[Any]:
        first = 0
        for size in (3, 8, 1, 5):
            x = torch.arange(first, first + size, dtype=torch.float32)
            yield {
                "input": x.unsqueeze(1),
                "labels": torch.zeros(size, dtype=torch.int64),
                "names": [str(i) for i in range(size)],
            }
            first += size


class BatchItems(Dataset[Any]):
    """Sample i is a whole batch, as files of batches are read."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        size = 2 + index
        return torch.full((size, 1), float(index)), torch.arange(size) % 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(1, 3)

    def forward(self, input: Tensor, names: Any = None) -> Tensor:
        return self.layer(input)  # type: ignore[no-any-return]


def engine_of(loader: DataLoader[Any], **options: Any) -> RankEngine:
    model = Model()
    return paceline.setup(
        model, torch.optim.SGD(model.parameters(), lr=1e-4), loss=F.cross_entropy, loader=loader, **options
    )


def loader_with(kind: str) -> DataLoader[Any]:
    loaders: dict[str, Any] = {
        "plain": lambda: DataLoader(Streamed(), BATCH),
        "drop_last": lambda: DataLoader(Streamed(), BATCH, drop_last=True),
        "workers": lambda: DataLoader(Streamed(), BATCH, num_workers=2, multiprocessing_context="fork"),
        "three workers": lambda: DataLoader(
            Streamed(20), BATCH, num_workers=3, persistent_workers=True, multiprocessing_context="fork"
        ),
        "shuffled": lambda: DataLoader(Shuffled(), BATCH),
        "whole": lambda: DataLoader(WholeBatches(), batch_size=None),
        "items": lambda: DataLoader(
            BatchItems(), batch_size=None, shuffle=True, generator=torch.Generator().manual_seed(2)
        ),
    }
    loader: DataLoader[Any] = loaders[kind]()
    return loader


def rows(batch: Any) -> list[int]:
    if batch is None:
        return []
    return [int(x) for x in (batch["input"] if isinstance(batch, dict) else batch[0]).flatten()]


KINDS = ["plain", "drop_last", "workers", "three workers", "shuffled", "whole", "items"]


def epochs_of(kinds: list[str]) -> dict[str, list[list[list[int]]]]:
    found = {}
    for kind in kinds:
        loader = engine_of(loader_with(kind)).loader
        found[kind] = [[rows(batch) for batch in loader] for _ in range(2)]
        loader.close()
    return found


def test_each_rank_keeps_its_part_of_every_batch_of_the_stream(ranks: Ranks) -> None:
    alone = epochs_of(KINDS)
    for kind in set(KINDS) - {"shuffled", "three workers"}:
        plain = loader_with(kind)
        assert alone[kind] == [[rows(batch) for batch in plain] for _ in range(2)], kind
    for kind in ("shuffled", "three workers"):
        for epoch in alone[kind]:
            assert sorted(itertools.chain(*epoch)) == list(range(20 if kind == "three workers" else SAMPLES))
    assert alone["shuffled"][0] != alone["shuffled"][1]
    first, second = ranks(2, epochs_of, KINDS)
    for kind in KINDS:
        joined = [[a + b for a, b in zip(*epoch, strict=True)] for epoch in zip(first[kind], second[kind], strict=True)]
        assert joined == alone[kind], kind


def losses_with(kind: str) -> list[float]:
    engine = engine_of(loader_with(kind))
    return [engine.step(batch).loss for batch in engine.loader]


def own_loop(kind: str) -> list[float]:
    torch.manual_seed(1)
    model = Model()
    engine = paceline.setup(model, torch.optim.SGD(model.parameters(), lr=1e-2), loader=loader_with(kind))
    losses = []
    for x, y in engine.loader:
        losses.append(float(engine.backward(F.cross_entropy(model(x), y))))
        engine.update()
    return losses


def trained() -> list[float]:
    return [*losses_with("plain"), *losses_with("items"), *own_loop("items")]


def test_a_stream_trains_the_same_alone_and_on_two_ranks(ranks: Ranks) -> None:
    assert ranks(2, trained)[1] == pytest.approx(trained(), rel=1e-5)


def rest_after(kind: str, steps: int) -> tuple[str, list[list[int]]]:
    loader = engine_of(loader_with(kind)).loader
    rest, saved = [], json.dumps(loader.state_dict())
    for step, batch in enumerate(loader, 1):
        if step == steps:
            saved = json.dumps(loader.state_dict())
        if step > steps:
            rest.append(rows(batch))
    if steps == -1:  # at the end of the epoch
        saved, rest = json.dumps(loader.state_dict()), []
    rest += [rows(batch) for batch in loader]
    loader.close()
    return saved, rest


def resumed(kind: str, saved: str, epochs: int) -> list[list[int]]:
    loader = engine_of(loader_with(kind)).loader
    loader.load_state_dict(json.loads(saved))
    found = [rows(batch) for _ in range(epochs) for batch in loader]
    loader.close()
    return found


@pytest.mark.parametrize("kind", ["plain", "workers", "shuffled", "whole", "items"])
def test_a_position_in_a_stream_goes_on_exactly(kind: str) -> None:
    for steps in (0, -1):
        saved, rest = rest_after(kind, steps)
        assert resumed(kind, saved, 1 if steps == -1 else 2) == rest, steps


def all_resumed(saved: dict[str, str]) -> dict[str, list[list[int]]]:
    return {kind: resumed(kind, text, 2) for kind, text in saved.items()}


def test_a_position_in_a_stream_goes_on_exactly_on_other_numbers_of_ranks(ranks: Ranks) -> None:
    left = {kind: rest_after(kind, 2) for kind in ("plain", "workers", "shuffled", "whole", "items")}
    saved = {kind: text for kind, (text, _) in left.items()}
    alone, (first, second) = all_resumed(saved), ranks(2, all_resumed, saved)
    for kind, (_, rest) in left.items():
        assert alone[kind] == rest, kind
        assert [a + b for a, b in zip(first[kind], second[kind], strict=True)] == rest, kind


def test_a_position_after_the_last_batch_of_a_stream_goes_on_with_the_next_epoch() -> None:
    saved, rest = rest_after("plain", 7)
    assert resumed("plain", saved, 1) == rest


def test_another_number_of_loader_processes_cannot_go_on_in_a_stream_that_they_divide() -> None:
    saved, _ = rest_after("workers", 2)
    loader = engine_of(DataLoader(Streamed(), BATCH, num_workers=1)).loader
    with raises(DataError, "data.workers_differ", num_workers=1, then=2):
        loader.load_state_dict(json.loads(saved))


class Unrepeatable(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (sample(int.from_bytes(os.urandom(2))) for _ in range(SAMPLES))


def test_a_stream_that_does_not_come_again_is_not_resumed_in_silence() -> None:
    loader = engine_of(DataLoader(Unrepeatable(), BATCH)).loader
    next(iter(loader))
    saved = json.dumps(loader.state_dict())
    again = engine_of(DataLoader(Unrepeatable(), BATCH)).loader
    again.load_state_dict(json.loads(saved))
    with raises(DataError, "data.stream_not_repeatable"):
        next(iter(again))


class Undivided(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (sample(i) for i in range(SAMPLES))


def test_loader_processes_that_all_read_the_whole_stream_are_refused() -> None:
    """torch trains each sample once for every process."""
    with raises(DataError, "data.workers_repeat"):
        list(engine_of(DataLoader(Undivided(), BATCH, num_workers=2)).loader)
    assert len(list(engine_of(DataLoader(Undivided(), BATCH, num_workers=1)).loader)) == 7


class ByRank(IterableDataset[Any]):
    """As split_dataset_by_node, or a node splitter, divides a stream."""

    def __iter__(self) -> Iterator[Any]:
        return (sample(i) for i in range(int(os.environ["RANK"]), SAMPLES, int(os.environ["WORLD_SIZE"])))


def read_all(dataset: IterableDataset[Any]) -> int:
    return len(list(engine_of(DataLoader(dataset, BATCH)).loader))


class Shorter(IterableDataset[Any]):
    """Of another length on each rank, though it begins alike."""

    def __iter__(self) -> Iterator[Any]:
        return (sample(i) for i in range(SAMPLES - 20 * int(os.environ["RANK"])))


@pytest.mark.parametrize("dataset", [ByRank(), Shorter()])
def test_ranks_that_read_different_streams_are_refused(ranks: Ranks, dataset: IterableDataset[Any]) -> None:
    with raises(RankError, "data.streams_differ"):
        ranks(2, read_all, dataset)


class Graph:
    """A batch of a type that only its own library can cut."""

    def __init__(self, nodes: int) -> None:
        self.nodes = torch.zeros(nodes)


class Graphs(Dataset[Any]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Graph:
        return Graph(index + 3)


def first_graph(batch_size: int | None) -> Any:
    return next(iter(engine_of(DataLoader(Graphs(), batch_size, collate_fn=list if batch_size else None)).loader))


def test_a_batch_that_cannot_be_counted_passes_on_one_rank_and_is_refused_on_two(ranks: Ranks) -> None:
    assert isinstance(first_graph(None), Graph)
    assert len(first_graph(2)) == 2
    with raises(RankError, "data.batch_uncuttable", class_name="Graph", replicas=2):
        ranks(2, first_graph, None)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def test_batches_are_cut_by_the_rows_that_everything_in_them_has() -> None:
    batch = {
        "a": torch.arange(4),
        "b": [torch.zeros(4, 2), ("p", "q", "r", "s")],
        "c": Pair(torch.ones(4), torch.zeros(4)),
        "scale": 0.5,
    }
    assert rows_of(batch) == 4
    part = cut(batch, slice(1, 3))
    assert part["a"].tolist() == [1, 2]
    assert part["b"][1] == ("q", "r")
    assert part["c"].x.shape == (2,)
    assert part["scale"] == 0.5
    assert rows_of({"a": torch.zeros(3), "b": torch.zeros(4)}) is None
    assert rows_of(Graph(3)) is None
    assert rows_of((torch.tensor(1.0), 3)) is None


def test_two_samples_that_differ_have_different_digests() -> None:
    different = [
        torch.zeros(3),
        torch.zeros(4),
        torch.ones(3),
        "a",
        "b",
        1,
        2.0,
        {"a": 1},
        {"b": 1},
        [1, 2],
        Graph(2),
        Graph(3),
        None,
    ]
    different += [torch.arange(3, dtype=torch.bfloat16), torch.rand(1000), b"x"]
    assert len({digest_of(value) for value in different}) == len(different)
    assert digest_of({"x": torch.arange(900)}) == digest_of({"x": torch.arange(900)})


class Breaks(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield sample(0)
        raise OSError("shard 3 is away")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_raises_is_named(workers: int) -> None:
    with raises(DataError, "data.iteration_raised", error="shard 3 is away", kind="OSError") as caught:
        list(engine_of(DataLoader(Breaks(), BATCH, num_workers=workers)).loader)
    assert isinstance(caught.value.__cause__, OSError)


def test_the_length_of_a_stream_is_told_where_it_has_one() -> None:
    assert len(engine_of(DataLoader(Counted(), BATCH)).loader) == 7
    with pytest.raises(TypeError, match="Streamed"):
        len(engine_of(DataLoader(Streamed(), BATCH)).loader)


def test_a_stream_begins_anew_after_a_look_at_its_first_batch() -> None:
    for kind in ("plain", "workers"):
        loader = engine_of(loader_with(kind)).loader
        first, *_ = expected = [rows(batch) for batch in loader_with(kind)]
        assert rows(next(iter(loader))) == first
        assert [rows(batch) for batch in loader] == expected


def divided_losses() -> list[float]:
    engines = [engine_of(loader_with(kind), plan="fsdp=2") for kind in ("plain", "items")]
    return [engine.step(batch).loss for engine in engines for batch in engine.loader]


def test_a_plan_that_divides_the_model_trains_on_a_stream_as_well(ranks: Ranks) -> None:
    assert ranks(2, divided_losses)[0] == pytest.approx([*losses_with("plain"), *losses_with("items")], rel=1e-5)


def evaluated(dataset: IterableDataset[Any]) -> dict[str, float]:
    engine: Any = engine_of(DataLoader(Streamed(), BATCH))
    found: dict[str, float] = engine.evaluate(
        DataLoader(dataset, BATCH), lambda batch: {"mean": batch[0].double().flatten()}
    )
    engine.close()
    return found


def test_a_stream_is_evaluated_whole_and_once(ranks: Ranks) -> None:
    assert evaluated(Streamed()) == pytest.approx({"mean": (SAMPLES - 1) / 2})
    assert ranks(2, evaluated, Streamed(), backend="shm") == [pytest.approx({"mean": (SAMPLES - 1) / 2})] * 2
    with raises(RankError, "data.streams_differ", name=re.compile("ByRank$")):
        ranks(2, evaluated, ByRank())


class ShuffledByEpoch(IterableDataset[int]):
    """Another order in each epoch, divided over the loader processes."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, every = (info.id, info.num_workers) if info is not None else (0, 1)
        yield from torch.randperm(12, generator=torch.Generator().manual_seed(self.epoch))[first::every].tolist()


def epochs_of_a_shuffled_stream(workers: int) -> list[list[int]]:
    model = nn.Linear(1, 1)
    loader = DataLoader(ShuffledByEpoch(), batch_size=4, num_workers=workers, persistent_workers=workers > 0)
    engine = paceline.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loader=loader)
    return [[number for batch in engine.loader for number in batch.tolist()] for _ in range(3)]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_epoch_of_a_stream_reaches_loader_processes_that_live_on(ranks: Ranks, workers: int) -> None:
    alone = epochs_of_a_shuffled_stream(workers)
    assert len({tuple(epoch) for epoch in alone}) == 3
    first, second = ranks(2, epochs_of_a_shuffled_stream, workers)
    for epoch, one, other in zip(alone, first, second, strict=True):
        assert sorted(epoch) == sorted(one + other) == list(range(12))
