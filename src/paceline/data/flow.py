"""Global batches of an iterable data set, which every rank reads.

Ranks compare what they read, so that a stream that differs between them is an error and never a sample that is trained
twice or not at all.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch

from paceline.comm import Group
from paceline.data.whole import BatchPart
from paceline.errors import DataError
from paceline.job.partition import even_shares


class Flow:
    """The global batches of an iterable data set; stands where a `Partition` does.

    A batch's size is known when it was read.

    Args:
        length: batches of an epoch as the data set tells it, None where it does not.
        batch_size: samples of a full batch, None where they are not known.
        workers: loader processes, which take turns.
    """

    def __init__(
        self,
        name: str,
        *,
        data_group: Group,
        world: Group,
        seed: int,
        length: int | None,
        batch_size: int | None,
        workers: int,
    ) -> None:
        self.name, self.world, self.seed = name, world, seed
        self.replica, self.replicas = data_group.rank, data_group.size
        self.length, self.batch_size, self.workers = length, batch_size, workers
        self._totals: dict[int, int] = {}
        self._digests: dict[int, int] = {}  # of each loader process's first batch
        self._ended: set[int] = set()
        self._chain = 0  # digest of all pieces that this process has read
        self._last: int | None = None  # digest of the piece before the one to come
        self._expected: int | None = None  # the same in a position that is found again
        self._known = 0  # pieces before this turn were trained on

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch, as the data set tells.

        Raises:
            DataError: it does not.
        """
        if self.length is None:
            raise DataError(f"{self.name} is an IterableDataset without a length; give it a __len__, or count steps")
        return self.length

    def size(self, step: int) -> int:
        """Samples of all ranks in the last step read; of a full batch for others."""
        found = self._totals.get(step, self.batch_size)
        if found is None:
            raise DataError(f"the samples of batch {step} of {self.name} are known only when it was read")
        return found

    def shares(self, step: int, epoch: int = 0) -> tuple[int, ...]:
        """Samples of each data-parallel rank in that step."""
        return even_shares(self.size(step), self.replicas)

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[list[Any]]:
        """One request after the other, for as long as the stream flows."""
        return ([] for _ in count(start_step))

    @property
    def ended(self) -> bool:
        """True if the current epoch has no more batches."""
        return len(self._ended) == max(self.workers, 1)

    def begin(self, turn: int, *, again: bool) -> int:
        """The turn to begin with.

        Where what was read is read `again`, that is an earlier one, to see that it is the same.
        """
        if turn == 0:
            self._ended, self._digests, self._last = set(), {}, None
        if not turn or not (again or self._expected is not None):
            return turn
        self._expected = self._last if self._expected is None else self._expected
        self._known = turn
        each = max(self.workers, 1)
        return (turn - 1) // each * each  # the first request goes to the first loader process

    def state_dict(self, turn: int) -> dict[str, Any]:
        """State that `load_state_dict` needs besides the turn's number."""
        if turn == 0:
            return {"last": None, "ended": []}
        return {"last": self._last if self._expected is None else self._expected, "ended": sorted(self._ended)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken."""
        self._expected, self._ended = state["last"], set(state["ended"])

    def take(self, turn: int, piece: BatchPart) -> bool | None:
        """True if a piece has a batch; None at the end of the stream.

        All ranks compare their pieces here.

        Raises:
            DataError: ranks, or loader processes, read something else, or the same twice. On all ranks.
        """
        self._chain = zlib.crc32(f"{self._chain} {piece.digest} {piece.samples}".encode())
        self._compare_ranks(turn)
        if turn < self._known:
            self._check_known(turn, piece)
            return False
        self._last = piece.digest
        if not piece.samples:
            self._ended.add(piece.worker)
            return None if len(self._ended) == max(self.workers, 1) else False
        if turn < self.workers:
            if piece.varied and piece.digest in self._digests.values():
                raise DataError(
                    f"every loader process reads the whole of {self.name}: two of the {self.workers} began with the "
                    "same batch, and each sample would be trained several times. Divide the stream by "
                    "torch.utils.data.get_worker_info(), or set num_workers=1"
                )
            self._digests[turn] = piece.digest
        return True

    def found(self, step: int, samples: int) -> None:
        """Note the samples of a step."""
        self._totals = {step: samples}

    def _check_known(self, turn: int, piece: BatchPart) -> None:
        """Refuse a stream whose last piece before the saved position is another one now."""
        if turn + 1 < self._known:
            return
        expected, self._expected, self._last, self._known = self._expected, None, piece.digest, 0
        if piece.digest != expected:
            raise DataError(
                f"{self.name} does not give again what it gave before: batch {turn} differs, and training cannot go on "
                "there. Have iter() begin the same stream anew in each process, and draw random numbers from a "
                "generator with a seed"
            )

    def _compare_ranks(self, turn: int) -> None:
        if self.world.size == 1:
            return
        # an evaluation may read the stream, and ranks cannot sum what that mode allocates
        with torch.inference_mode(False):
            extremes = torch.tensor([self._chain, -self._chain], dtype=torch.int64, device=self.world.device)
            self.world.all_reduce(extremes, "max")
        highest, lowest = extremes.tolist()
        if highest != -lowest:
            raise DataError(
                f"the ranks read different streams from {self.name}: batch {turn} is not the same on all of them. "
                "paceline deals the batches, so let every rank read the whole stream in one order: leave out any split "
                "by rank (split_dataset_by_node, split_by_node, RANK) and draw random numbers from a generator with a "
                "seed"
            )
