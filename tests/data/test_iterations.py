"""Loops over dealt loaders see the same batches as loops over plain loaders."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import DataError
from ranks import Ranks

Batches = list[list[int]]
Loop = Callable[[Any, Any], list[Any]]

pytestmark = pytest.mark.usefixtures("loader_processes_end")


def numbers_in(batch: Any) -> list[int]:
    return [int(x) for x in batch[0].flatten()]


def looked_at(first: Any, _: Any) -> list[Any]:
    next(iter(first))
    return [batch for _ in range(2) for batch in first]


def looked_at_and_kept(first: Any, _: Any) -> list[Any]:
    iterator = iter(first)
    seen = [next(iterator)]
    return [*seen, *first, *first, *iterator]


def left_early(first: Any, _: Any) -> list[Any]:
    seen = []
    for stop in (1, 2, 9):
        for i, batch in enumerate(first):
            if i == stop:
                break
            seen.append(batch)
    return seen


def a_function_that_returns_within_an_epoch(first: Any, _: Any) -> list[Any]:
    def one() -> Any:
        for batch in first:
            return batch
        return None

    return [one(), *first, one()]


def zipped(first: Any, second: Any) -> list[Any]:
    return [batch for _ in range(2) for pair in zip(first, second, strict=False) for batch in pair]


def zipped_with_itself(first: Any, _: Any) -> list[Any]:
    return [batch for pair in zip(first, first, strict=True) for batch in pair]


def nested(first: Any, second: Any) -> list[Any]:
    return [batch for outer in first for inner in second for batch in (outer, inner)]


def nested_in_itself(first: Any, _: Any) -> list[Any]:
    return [*(batch for outer in first for inner in first for batch in (outer, inner)), *first]


def endless(first: Any, _: Any) -> list[Any]:
    def forever() -> Iterator[Any]:
        while True:
            yield from first

    return list(itertools.islice(forever(), 9))


def begun_again_at_the_end(first: Any, second: Any) -> list[Any]:
    seen, short = [], iter(second)
    for batch in first:
        try:
            other = next(short)
        except StopIteration:
            short = iter(second)
            other = next(short)
        seen += [batch, other]
    return seen


def in_parts_of_an_epoch(first: Any, _: Any) -> list[Any]:
    iterator = iter(first)
    return [*itertools.islice(iterator, 2), *itertools.islice(iterator, 1), *iterator]


LOOPS: list[Loop] = [
    looked_at,
    looked_at_and_kept,
    left_early,
    a_function_that_returns_within_an_epoch,
    zipped,
    zipped_with_itself,
    nested,
    nested_in_itself,
    endless,
    begun_again_at_the_end,
    in_parts_of_an_epoch,
]
OVERLAPPING = (looked_at_and_kept, zipped_with_itself, nested_in_itself)


def loaders(kind: str) -> list[DataLoader[Any]]:
    """Two loaders, of 4 and of 2 batches."""
    made = []
    for start, samples in ((0, 11), (100, 5)):
        data = TensorDataset(torch.arange(float(start), start + samples).unsqueeze(1), torch.zeros(samples).long())
        shuffled = {"shuffle": True, "generator": torch.Generator().manual_seed(samples)} if kind == "shuffled" else {}
        made.append(DataLoader(data, batch_size=3, num_workers=int(kind == "loader processes"), **shuffled))  # type: ignore[arg-type]
    return made


def engine_on(loader: DataLoader[Any]) -> Any:
    model = nn.Linear(1, 2)
    return paceline.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=F.cross_entropy, loader=loader)


def dealt(kind: str, names: list[str]) -> dict[str, Batches]:
    """This rank's samples in the batches of each loop."""
    found = {}
    for loop in LOOPS:
        if loop.__name__ in names:
            first, second = loaders(kind)
            engine = engine_on(first)
            other = engine.deal(second)
            seen = loop(engine.loader, other)
            found[loop.__name__] = [[] if batch is None else numbers_in(batch) for batch in seen]
            engine.close()
    return found


def plain(kind: str, loop: Loop) -> Batches:
    return [numbers_in(batch) for batch in loop(*loaders(kind))]


@pytest.mark.parametrize("kind", ["in order", "shuffled", pytest.param("loader processes", marks=pytest.mark.slow)])
def test_every_loop_sees_the_batches_of_a_plain_loader(ranks: Ranks, kind: str) -> None:
    loops = [loop for loop in LOOPS if kind != "shuffled" or loop not in OVERLAPPING]
    names = [loop.__name__ for loop in loops]
    alone = dealt(kind, names)
    first, second = ranks(2, dealt, kind, names)
    for loop in loops:
        expected = plain(kind, loop)
        assert alone[loop.__name__] == expected, loop.__name__
        parts = zip(first[loop.__name__], second[loop.__name__], strict=True)
        assert [[*one, *other] for one, other in parts] == expected, loop.__name__


@pytest.mark.parametrize("loop", OVERLAPPING)
def test_two_iterations_of_one_stream_at_a_time_are_refused(loop: Loop) -> None:
    with pytest.raises(DataError):
        dealt("shuffled", [loop.__name__])


@pytest.mark.parametrize("leaves", [False, True])
def test_a_position_is_resumed_after_a_load_alone(tmp_path: Path, leaves: bool) -> None:
    """This includes the position in an epoch that a loop has left early, for example for lack of time."""
    engine = engine_on(loaders("in order")[0])
    looked = iter(engine.loader)
    next(looked)
    rest: Batches = []
    for i, batch in enumerate(engine.loader):
        if i == 2 and leaves:
            break
        if i == 2:
            engine.save(tmp_path)
        elif i > 2:
            rest.append(numbers_in(batch))
    if leaves:
        engine.save(tmp_path)
    engine.close()
    again = engine_on(loaders("in order")[0])
    again.load(tmp_path)
    assert [numbers_in(batch) for batch in again.loader] == [[9, 10]]
    assert leaves or rest == [[9, 10]]
    assert len([*again.loader]) == 4
    again.close()


def by_single_samples() -> list[tuple[int, float]]:
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    data = TensorDataset(torch.arange(1.0, 6).unsqueeze(1), torch.ones(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = paceline.setup(model, optimizer, loss=F.mse_loss, loader=DataLoader(data, batch_size=1))
    assert len(engine.loader) == 5
    return [(result.samples, round(result.loss, 6)) for result in map(engine.step, engine.loader)]


def test_a_batch_smaller_than_the_number_of_ranks_stays_as_it_is(ranks: Ranks) -> None:
    alone = by_single_samples()
    assert len(alone) == 5
    assert ranks(3, by_single_samples) == [alone] * 3
