"""Reading of a job's stream in parts.

Each data-parallel rank and loader process reads its own parts. A process reads a part to its end before it begins the
next part. The position in an epoch is therefore one number per part, from which any number of ranks can continue.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.comm import Group
from paceline.data.samples import SampleRequest
from paceline.data.whole import BatchShard, Flow, Items
from paceline.errors import DataError, PlanError
from paceline.job.partition import even_shard, even_shares
from paceline.job.samples import digest_of
from paceline.job.streams import OnePart, Stream, iteration_error
from paceline.own_random import OwnRandom, SampleRandom

_NOT_READ = -(2**62)  # value of a rank that has not read from a part
# why every rank reads a whole stream, and what to do
_ONE_PART: dict[OnePart, tuple[str, str]] = {
    "indivisible": (
        "cannot be divided",
        "Add a method shard(num_shards, index), or divide the stream by torch.utils.data.get_worker_info()",
    ),
    "file": ("has only one file", "Divide the data into at least {ranks} files"),
    "setting": ("is read in one part (data.parts is 1)", "Set data.parts to at least {ranks}, or remove it"),
}


@dataclass
class Deal:
    """Position in each part of a stream, and the process that reads each part.

    The number of a process is `worker * replicas + replica`. If there is only one part, every rank reads it.

    Attributes:
        processes: number of data-parallel ranks, and number of loader processes per rank.
        counts: number of samples read from each part.
        ended: whether each part has no more samples.
        digests: digest of the last sample read from each part.
        owners: number of the process that reads each part.
    """

    processes: tuple[int, int]
    counts: list[int]
    ended: list[bool]
    digests: list[int]
    owners: list[int]

    @classmethod
    def new(cls, parts: int, replicas: int, workers: int) -> Deal:
        """Return the position at the start of an epoch."""
        owners = [part % (replicas * workers) for part in range(parts)]
        return cls((replicas, workers), [0] * parts, [False] * parts, [0] * parts, owners)

    def dealt_again(self, replicas: int, workers: int) -> Deal:
        """Return the same position, with the remaining parts assigned to another number of processes."""
        if tuple(self.processes) == (replicas, workers):
            return self
        owners = list(self.owners)
        for number, part in enumerate(self.left()):
            owners[part] = number % (replicas * workers)
        return Deal((replicas, workers), self.counts, self.ended, self.digests, owners)

    def as_json(self) -> dict[str, Any]:
        """Return a copy as JSON values."""
        # `dataclasses.asdict` would copy every number separately
        return {name: list(values) for name, values in vars(self).items()}

    def left(self, process: int | None = None) -> list[int]:
        """Return the parts that have not ended; started parts come first.

        Args:
            process: number of the process whose parts to return; None for all parts.
        """
        parts = [v for v, ended in enumerate(self.ended) if not ended and process in (None, self.owners[v])]
        return sorted(parts, key=lambda v: (not self.counts[v], v))


@dataclass
class PartsShard(BatchShard):
    """One rank's share of a batch, and the positions after it.

    `samples` is the number of samples of the share.

    Attributes:
        epoch: epoch of the batch.
        parts: for each part that was read: number of samples read so far, whether the part has ended, and the digest
            of its last sample.
        states: for the part that is being read: number of samples read so far, and the state of its data set.
        read: number of samples read for this share, including `again`.
        again: number of samples that were read only to reach the position of a resumed run.
        read_s: seconds of reading.
    """

    epoch: int = 0
    parts: dict[int, tuple[int, bool, int]] = field(default_factory=dict)
    states: dict[int, tuple[int, Any]] = field(default_factory=dict)
    read: int = 0
    again: int = 0
    read_s: float = 0.0


class PartsReader(Items):
    """Reader of the parts of a stream that belong to one data-parallel rank.

    Args:
        replica: number of this data-parallel rank.
        replicas: number of data-parallel ranks.
        batch_size: number of samples per batch, over all ranks.
        workers: number of loader processes that divide the parts of a rank; 1 without loader processes.
    """

    def __init__(
        self, stream: Stream, replica: int, replicas: int, seed: int, *, batch_size: int, workers: int
    ) -> None:
        super().__init__(stream, stream.collate_fn, replica, replicas, seed)
        self.stream, self.batch_size, self.workers = stream, batch_size, workers
        self._deal: Deal | None = None  # position of the first epoch that is read
        self._states: dict[int, tuple[int, Any]] = {}
        self._epoch: int | None = None
        self._whole = False  # whether every rank reads all samples
        self._left: list[int] = []  # parts of this process that have not ended
        self._lane: _Lane | None = None

    @property
    def name(self) -> str:
        """Type name of the user's data set."""
        return self.stream.name

    def length(self) -> None:
        """Return None, because the stated length of a stream may be wrong."""

    def check_length(self, expected: int | None) -> None:
        """Do nothing, because a stream has no reliable length."""

    def new_deal(self) -> Deal:
        """Return the position at the start of an epoch."""
        return Deal.new(self.stream.parts or self.replicas * self.workers, self.replicas, self.workers)

    def begin(self, deal: Deal, states: dict[int, tuple[int, Any]]) -> None:
        """Make the next request continue at a position.

        Args:
            states: for each part with a known state: number of samples read, and the state of its data set.
        """
        self._deal, self._states, self._epoch, self._lane = copy.deepcopy(deal), states, None, None

    def example(self, count: int, indices: list[Any]) -> Any:
        """Return a batch that holds the stream's first sample `count` times."""
        return self._collated([self.stream.example] * count, f"a batch of {self.name}")

    def _read(self, request: SampleRequest) -> PartsShard:
        worker = request.step % self.workers
        if self._epoch != request.epoch:
            self._begin_epoch(request.epoch, worker * self.replicas + self.replica)
        shard = PartsShard(None, 0, 0, True, worker, epoch=request.epoch)
        share = even_shard(self.batch_size, self.replica, self.replicas)
        samples = self._fill(self.batch_size if self._whole else share.stop - share.start, shard)
        if self.has_own_collate:  # a user's collate_fn may omit samples that are None
            samples = [sample for sample in samples if sample is not None] or samples
        if self._whole:
            samples = samples[even_shard(len(samples), self.replica, self.replicas)]
        shard.samples = len(samples)
        if samples:
            with OwnRandom(self.seed, request.epoch, request.step, self.replica):
                shard.batch = self._collated(samples, f"a batch of {self.name}")
        return shard

    def _begin_epoch(self, epoch: int, process: int) -> None:
        if self._deal is None:  # a loader process continues with the next epoch
            self._deal, self._states = self.new_deal(), {}
        deal, self._deal = self._deal, None
        self._position, self._epoch, self._lane = deal, epoch, None
        self._whole = len(deal.counts) == 1
        self._left = deal.left(None if self._whole else process)

    def _fill(self, wanted: int, shard: PartsShard) -> list[Any]:
        began, samples, deal = time.perf_counter(), list[Any](), self._position
        while len(samples) < wanted and self._left:
            part = self._left[0]
            if self._lane is None:
                self._lane = _Lane(self, part, deal, self._epoch or 0, self._states.pop(part, None))
                shard.again += self._lane.again
            lane, before = self._lane, len(samples)
            samples += lane.take(wanted - before)
            shard.read += len(samples) - before
            digest = digest_of(samples[-1]) if len(samples) > before else deal.digests[part]
            deal.digests[part] = digest
            shard.parts[part] = lane.read, lane.ended, digest
            if lane.ended:
                self._left.pop(0)
                self._lane = None
        if self._lane is not None and self.stream.keeps_state:
            shard.states[self._left[0]] = self._lane.read, copy.deepcopy(self._lane.part.state())
        shard.read += shard.again
        shard.read_s = time.perf_counter() - began
        return samples


class _Lane:
    """The part that a process is reading.

    For a data set without a state, the random numbers depend on the seed, the epoch and the part. With a state, they
    also depend on the number of the sample, because a resumed run does not read earlier samples again.

    Attributes:
        read: number of samples read from the part.
        again: number of samples that were read again to reach the position.
        ended: whether the part has no more samples.

    Raises:
        DataError: the data set raised an exception, or yields other samples than before the position was saved.
    """

    def __init__(self, reader: PartsReader, index: int, deal: Deal, epoch: int, known: tuple[int, Any] | None) -> None:
        stream, at = reader.stream, deal.counts[index]
        self.name, self.ended, self.read = stream.name, False, 0
        self._seeds = (reader.seed, epoch, index) if stream.keeps_state else None
        self._random = OwnRandom(reader.seed, epoch, index)
        try:
            with self._random:
                self.part = stream.part(index, len(deal.counts), epoch)
                if known is not None:
                    self.read = known[0]
                    self.part.dataset.load_state_dict(copy.deepcopy(known[1]))
        except Exception as error:
            raise iteration_error(self.name, error) from error
        self._samples = self.part.after(self.read)
        self.again = at - self.read
        if self.again:
            last = self.take(self.again)[-1:]
            if self.ended or not last or digest_of(last[0]) != deal.digests[index]:
                raise DataError(
                    "data.part_not_repeatable",
                    "{name} yields different samples when it is read again: sample {sample} of part {part} differs, so "
                    "training cannot resume there. iter() must yield the same samples in every process. Draw random "
                    "numbers from a generator with a fixed seed.",
                    name=self.name,
                    sample=at - 1,
                    part=index,
                )

    def take(self, count: int) -> list[Any]:
        """Read the next samples; fewer if the part ends."""
        samples: list[Any] = []
        with self._random:
            while len(samples) < count and not self.ended:
                if self._seeds is not None:
                    SampleRandom.start(*self._seeds, self.read)
                try:
                    samples.append(next(self._samples))
                except StopIteration:
                    self.ended = True
                except Exception as error:
                    raise iteration_error(self.name, error) from error
                else:
                    self.read += 1
        return samples


class PartsFlow(Flow):
    """Global batches of a stream that is read in parts.

    Every rank fills its share of a batch from its own parts. After each batch, the ranks exchange their positions, so
    every rank knows the sizes of all shares, the positions in all parts, and whether the epoch has ended. When a rank
    has no more samples, batches become smaller, until all parts have ended. With `drop_last`, the epoch ends before the
    first batch that is not full.

    Attributes:
        deal: positions after the last batch.
        read, used: numbers of samples that this rank has read, and trained on.
        again: number of samples that this rank has read again to resume.
        read_s, again_s: seconds of reading, and of reading the first batches after a resume.

    Raises:
        PlanError: there are fewer parts than data-parallel ranks.
    """

    def __init__(self, reader: PartsReader, *, data_group: Group, world: Group, drop_last: bool, workers: int) -> None:
        stream, batch = reader.stream, reader.batch_size
        length = None if stream.length is None else -(-stream.length // batch)
        ranks: dict[str, Any] = {"data_group": data_group, "world": world, "seed": reader.seed}
        super().__init__(stream.name, **ranks, length=length, batch_size=batch, workers=workers)
        self.stream, self.reader, self.drop_last = stream, reader, drop_last
        self.deal = reader.new_deal()
        self.epoch = self.read = self.used = self.again = 0
        self.read_s = self.again_s = 0.0
        self._shares: tuple[int, ...] = even_shares(batch, self.replicas)
        self._refuse_few_parts(len(self.deal.counts))

    @property
    def ended(self) -> bool:
        """True if the current epoch has no more batches."""
        return all(self.deal.ended)

    def shares(self, step: int, epoch: int = 0) -> tuple[int, ...]:
        """Return each data-parallel rank's number of samples in a step."""
        return self._shares if step in self._totals else even_shares(self.size(step), self.replicas)

    def begin(self, turn: int, *, again: bool) -> int:
        """Pass the position to the reader, and return `turn`; turn 0 starts a new epoch."""
        if turn == 0:
            self.deal = self.reader.new_deal()
        known = self.stream.states
        states = {v: known[v][1:] for v in self.deal.left() if v in known and self._fits(v)}
        self.reader.begin(self.deal, states)
        return turn

    def _fits(self, part: int) -> bool:
        """Return True if a part's known state is of this epoch and not too late."""
        epoch, read, _ = self.stream.states[part]
        return epoch == self.epoch and 0 < read <= self.deal.counts[part]

    def refuse_workers(self, state: Mapping[str, Any], workers: int) -> None:
        """Accept any number of loader processes, because the parts are assigned again."""

    def gather_states(self) -> None:
        """Collect the newest states of all parts on every rank, before a checkpoint.

        Every rank must call this.
        """
        if not self.stream.keeps_state or self.world.size == 1:
            return
        for states in self.world.gather_json([[v, *state] for v, state in self.stream.states.items()]):
            for part, *state in states:
                epoch, read, _ = self.stream.states.get(part, (-1, 0, None))
                if (state[0], state[1]) > (epoch, read):
                    self.stream.states[part] = state[0], state[1], state[2]

    def state_dict(self, turn: int) -> dict[str, Any]:
        """Return the position and the known states of the parts as JSON values."""
        if turn == 0:
            return {"deal": None}
        known = self.stream.states
        states = {str(v): known[v] for v in self.deal.left() if v in known and self._fits(v)}
        return {"deal": self.deal.as_json(), "part_epoch": self.epoch, "states": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position in `state`.

        Raises:
            PlanError: there are fewer parts than data-parallel ranks.
        """
        if state["deal"] is None:
            return
        deal = Deal(**state["deal"])
        self._refuse_few_parts(len(deal.counts))
        self.deal, self.epoch = deal.dealt_again(self.replicas, self.reader.workers), state["part_epoch"]
        for part, known in state["states"].items():
            if int(part) not in self.stream.states:
                self.stream.states[int(part)] = known[0], known[1], known[2]

    def take(self, turn: int, shard: BatchShard) -> bool | None:
        """Accept this rank's next share, and exchange the positions.

        Returns:
            True to train on the batch, False to skip an empty batch, and None at the end of the epoch.

        Raises:
            DataError: ranks that must read the same samples have read different ones; raised on all ranks.
        """
        assert isinstance(shard, PartsShard)
        self.epoch = shard.epoch
        self._count(shard)
        deal, replicas = self.deal, self.replicas
        told = [_NOT_READ] * (3 * len(deal.counts) + replicas)
        for part, (read, ended, digest) in shard.parts.items():
            told[3 * part : 3 * part + 3] = 2 * read + ended, digest, -digest
        told[len(told) - replicas + self.replica] = shard.samples
        told = self._greatest(told)
        for part in range(len(deal.counts)):
            position, digest, negative = told[3 * part : 3 * part + 3]
            if position == _NOT_READ:
                continue
            if digest != -negative:
                raise DataError(
                    "data.parts_differ",
                    "the ranks read different samples from {name} for the same batch (part {part}). Every rank must "
                    "read the same samples in the same order. Remove any split by rank (split_dataset_by_node, RANK), "
                    "and draw random numbers from a generator with a fixed seed.",
                    name=self.name,
                    part=part,
                )
            deal.counts[part], deal.ended[part], deal.digests[part] = position // 2, position % 2 == 1, digest
        self._shares = tuple(told[len(told) - replicas :])
        total = sum(self._shares)
        if self.drop_last and total < (self.batch_size or 0):
            deal.ended = [True] * len(deal.ended)
        elif total:
            return True
        return None if self.ended else False

    def costs(self) -> dict[str, Any]:
        """Return the numbers of samples and seconds that this rank has spent on reading."""
        found = {"read": self.read, "used": self.used, "read_per_used": round(self.read / max(1, self.used), 3)}
        if self.again:
            found |= {"read_again": self.again, "read_again_s": round(self.again_s, 3)}
        return {**found, "read_s": round(self.read_s, 3), "resume_s": round(self._resume_s(), 3)}

    def _resume_s(self) -> float:
        """Estimate the most seconds of reading that a resume repeats.

        A resume reads each unfinished part again, so the part with the most samples read takes longest.
        """
        return 0.0 if self.stream.keeps_state else max(self.deal.counts) * self.read_s / max(1, self.read)

    def warnings(self) -> list[str]:
        """Return sentences about costs that another data set or setting would avoid."""
        found = []
        if self.stream.one_part is not None and self.replicas > 1:
            why, advice = _ONE_PART[self.stream.one_part]
            found.append(
                f"{self.name} {why}, so each of {self.replicas} data-parallel ranks reads every sample: "
                f"{self.replicas} samples are read per sample used. {advice.format(ranks=self.replicas)}"
            )
        if self.stream.parts == 1 and not self.stream.keeps_state:
            found.append(
                f"{self.name} has no state_dict and load_state_dict, so a resume within an epoch reads the stream "
                "again from its beginning"
            )
        return found

    def found(self, step: int, samples: int) -> None:
        """Record the number of samples of a step."""
        self._totals = {step: sum(self._shares)}

    def _count(self, shard: PartsShard) -> None:
        self.read, self.used, self.read_s = (
            self.read + shard.read,
            self.used + shard.samples,
            self.read_s + shard.read_s,
        )
        if shard.again:
            self.again, self.again_s = self.again + shard.again, self.again_s + shard.read_s
        for part, (read, state) in shard.states.items():
            self.stream.states[part] = shard.epoch, read, state

    def _greatest(self, values: list[int]) -> list[int]:
        if self.world.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64, device=self.world.device)
        self.world.all_reduce(tensor, "max")
        return [int(value) for value in tensor.tolist()]

    def _refuse_few_parts(self, parts: int) -> None:
        if 1 < parts < self.replicas:
            raise PlanError(
                "data.parts_too_few",
                "{name} is read in {parts} parts, but the plan has {replicas} data-parallel ranks, and each of them "
                "needs its own part. Use at most {parts} data-parallel ranks, or divide the data set into more files "
                "or parts (data.parts).",
                name=self.name,
                parts=parts,
                replicas=self.replicas,
            )
