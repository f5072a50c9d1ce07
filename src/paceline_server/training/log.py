"""Losses of pieces on their way to the first worker, which records them."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from paceline.wire.store import StoreClient
from paceline_server.training.worker import Piece

_EVERY_S = 0.25  # a message to the store
_COUNT = "served/logged/{}"  # key of the run's store: messages of a worker
_MOST = 2000  # pieces of a message, some hundred kilobytes


@dataclass(frozen=True)
class LoggedPiece:
    """Record of a worker's part of a batch; without samples loss and norm are None."""

    batch: int
    piece: int
    samples: int
    loss: float | None
    norm: float | None
    staleness: int
    problem: str | None

    @classmethod
    def of(cls, done: Piece) -> list[LoggedPiece]:
        """The records of a piece that was computed and pushed, one of each global batch."""
        assert done.pushed is not None
        return [
            cls(
                batch,
                done.ticket.piece,
                position.total,
                None if result is None else result.loss,
                None if result is None else result.grad_norm,
                done.pushed.staleness,
                None if result is None else result.problem,
            )
            for batch, position, result in done.parts
        ]


class PieceLog:
    """Sends a worker's pieces to the first worker, some together.

    Args:
        store: of the run.
        worker: number of the worker.
    """

    def __init__(self, store: StoreClient, worker: int) -> None:
        self.store, self.worker = store, worker
        # where a process of this worker before, which was killed, has left off
        self._number = _count(store, worker)
        self._waiting: list[LoggedPiece] = []
        self._sent_at = time.monotonic()

    def add(self, done: Piece) -> None:
        """Note a piece whose push was accepted."""
        if done.pushed is not None and done.pushed.accepted:
            self._waiting += LoggedPiece.of(done)
        if len(self._waiting) >= _MOST or time.monotonic() - self._sent_at > _EVERY_S:
            self.send()

    def send(self) -> None:
        """Send what waits."""
        if self._waiting:
            self._number += 1
            told = json.dumps([asdict(piece) for piece in self._waiting]).encode()
            # in one, as this process may be killed at any time, and who reads waits for each number
            self.store.set_all(
                {_key(self.worker, self._number): told, _COUNT.format(self.worker): str(self._number).encode()}
            )
            self._waiting = []
        self._sent_at = time.monotonic()


class LoggedBatches:
    """Puts the pieces of all workers together.

    Args:
        first: the batch to begin with.
    """

    def __init__(self, store: StoreClient, workers: int, pieces: int, first: int) -> None:
        self.store, self.workers, self.pieces, self.next = store, workers, pieces, first
        self._known: defaultdict[int, dict[int, LoggedPiece]] = defaultdict(dict)
        self._read = dict.fromkeys(range(workers), 0)

    def add(self, piece: LoggedPiece) -> None:
        """Take in a piece."""
        if piece.batch >= self.next:
            self._known[piece.batch][piece.piece] = piece

    def read(self) -> None:
        """Take in what the other workers have sent."""
        for worker in range(1, self.workers):
            count = _count(self.store, worker)
            for key in (_key(worker, number) for number in range(self._read[worker] + 1, count + 1)):
                if self.store.check([key]):  # a first worker before, which was killed, has taken it in otherwise
                    for told in json.loads(self.store.get(key)):
                        self.add(LoggedPiece(**told))
                    self.store.delete(key)
            self._read[worker] = count

    def whole(self, until: int | None = None) -> Iterator[tuple[int, list[LoggedPiece]]]:
        """Batches in order whose pieces are all known.

        With `until` also the others before it, as far as they are known: a worker that was killed may have pushed a
        piece of which it told nothing.
        """
        while len(self._known[self.next]) == self.pieces or (until is not None and self.next < until):
            self.next += 1
            yield self.next - 1, list(self._known.pop(self.next - 1).values())


def _count(store: StoreClient, worker: int) -> int:
    """Messages that a worker's processes have sent."""
    key = _COUNT.format(worker)
    return int(store.get(key)) if store.check([key]) else 0


def _key(worker: int, number: int) -> str:
    return f"served/log/{worker}/{number}"
