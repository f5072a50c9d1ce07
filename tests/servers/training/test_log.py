"""The first worker records every batch once, in order, also where a worker that was killed told nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.loader import Position
from paceline.engine.engine import StepResult
from paceline.wire.store import StoreClient, StoreServer
from paceline_server.parameters import Pushed, Ticket
from paceline_server.training.log import LoggedBatches, LoggedPiece, PieceLog
from paceline_server.training.worker import Computed, Piece

PIECES = 3


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreClient]:
    """The store of a run."""
    place = tmp_path_factory.mktemp("store")
    place.chmod(0o700)
    with closing(StoreServer(None, place / "store")), closing(StoreClient(place / "store", None, 10)) as client:
        yield client


def piece(batch: int, number: int) -> LoggedPiece:
    return LoggedPiece(batch, number, 4, 1.0, 1.0, 0, None)


@given(order=st.permutations([(batch, number) for batch in range(5) for number in range(PIECES)]))
def test_batches_come_in_order_once_all_their_pieces_are_known(
    store: StoreClient, order: list[tuple[int, int]]
) -> None:
    log, found = LoggedBatches(store, 1, PIECES, 0), []
    for batch, number in order:
        log.add(piece(batch, number))
        log.add(piece(batch, number))  # the first worker may have read it before it was lost
        found += [(n, len(pieces)) for n, pieces in log.whole()]
    assert found == [(n, PIECES) for n in range(5)]


def test_at_a_boundary_what_nobody_told_of_is_left_out(store: StoreClient) -> None:
    log = LoggedBatches(store, 1, PIECES, 2)
    for batch, number in [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (4, 0)]:
        log.add(piece(batch, number))
    assert not list(log.whole())
    assert [(n, len(pieces)) for n, pieces in log.whole(4)] == [(2, 2), (3, PIECES)]


def test_what_workers_send_some_together_is_read_once(store: StoreClient) -> None:
    told, log = PieceLog(store, 1), LoggedBatches(store, 2, 2, 0)
    for batch in range(3):
        for number in range(2):
            told.add(computed(batch, number))
    told.send()
    log.read()
    log.read()
    assert [n for n, _ in log.whole()] == [0, 1, 2]


class DyingStore:
    """The store for a worker that is killed after so many calls that change it."""

    def __init__(self, store: StoreClient, calls: int) -> None:
        self._store, self._left = store, calls

    def __getattr__(self, name: str) -> Any:
        if name in ("add", "set", "set_all", "append"):
            self._left -= 1
            if self._left < 0:
                raise KeyboardInterrupt
        return getattr(self._store, name)


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_worker_that_was_killed_while_it_told_is_heard_when_it_is_back(calls: int, store: StoreClient) -> None:
    dying = PieceLog(DyingStore(store, calls), 1)  # type: ignore[arg-type]
    dying.add(computed(0, 0))
    with suppress(KeyboardInterrupt):
        dying.send()
    again = PieceLog(store, 1)
    again.add(computed(1, 0))
    again.send()
    assert heard(store)[-1:] == [1]


def test_a_first_worker_that_is_back_hears_what_was_told_since(store: StoreClient) -> None:
    told = PieceLog(store, 1)
    for batch in range(2):
        told.add(computed(batch, 0))
        told.send()
        assert heard(store) == [batch], "each time by another process"


def heard(store: StoreClient) -> list[int]:
    """Batches of which a new reader hears."""
    log = LoggedBatches(store, 2, 1, 0)
    log.read()
    return [number for number, pieces in log.whole(9) if pieces]


def computed(batch: int, number: int) -> Piece:
    """A piece as a worker has computed it."""
    result = StepResult(batch + 1, 1.5, 4, 2.0, None, {}, None)
    part = Computed(batch, Position(0, batch, 4, 4), result)
    return Piece(Ticket(2 * batch + number, batch, number, 0, 0), [part], Pushed(1, 0, True, True))
