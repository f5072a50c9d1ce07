"""The space that a search goes through: every combination of degrees and microbatches that may run, as columns of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.cluster import Cluster, spread
from paceline.job.job import Job
from paceline.plan.plan import Plan
from paceline.plan.search_legal import Legality, Refusal
from paceline.plan.split_check import microbatches_fit
from paceline.plan.trace import Trace

Ints = NDArray[np.int64]
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")
REMATS = ("none", "selective", "block")
COLUMNS = ("tp", "cp", "ep", "pp", "shared", "microbatches")
_TRANSPORTS = ("auto", "gloo")  # shm and tcp are what auto takes within a host and between hosts


@dataclass(frozen=True)
class Refused:
    """Values of a degree that cannot work."""

    key: str
    values: tuple[int, ...]
    reason: str


class Space:
    """All plans of a job on a cluster that differ in what a search varies.

    Attributes:
        devices: there are so many; no plan has more ranks, for ranks that share a core are slower than fewer ranks with one each.
        degrees: of tp, cp, ep and pp, the values that may work.
        refused: those that cannot, with the reason.
    """

    def __init__(self, job: Job, cluster: Cluster, base: Plan, trace: Trace) -> None:
        self.job, self.cluster, self.base, self.trace = job, cluster, base, trace
        self.legality = Legality(job, cluster, base, len(trace.blocks))
        self.devices = self.legality.case.devices
        self.refused: list[Refused] = []
        self.degrees = {key: self._fitting(key) for key in ("tp", "cp", "ep", "pp")}

    @cached_property
    def rows(self) -> dict[str, NDArray[Any]]:
        """A row for each tp, cp, ep, pp, dp × fsdp (`shared`) and number of microbatches that the devices and the batch have room for;
        with the samples of a microbatch (`size` is equal where they are), and the threads of a rank on CPUs."""
        pieces = [piece for degrees in self._inner_degrees() if len(piece := self._readers(*degrees))]
        table = np.concatenate(pieces) if pieces else np.empty((0, len(COLUMNS)), np.int64)
        rows: dict[str, NDArray[Any]] = {key: np.ascontiguousarray(column) for key, column in zip(COLUMNS, table.T, strict=True)}
        if not self.legality.allows_microbatches():
            rows = {key: column[rows["microbatches"] == 1] for key, column in rows.items()}
        rows["ranks"] = rows["tp"] * rows["cp"] * rows["ep"] * rows["pp"] * rows["shared"]
        several, place = numbered(rows["ranks"])
        threads = [self._threads(*key) for key in several]
        rows["threads"] = np.array(threads, np.int64)[place]
        rows["knobs"] = np.array([len(self._knobs(ranks, most)) for (ranks,), most in zip(several, threads, strict=True)], np.int64)[place]
        sizes, place = numbered(rows["shared"] * rows["ep"] * rows["microbatches"])
        rows["size"], rows["samples"] = place, np.array([self.job.global_batch / key[0] for key in sizes])[place]
        return rows

    @cached_property
    def sharings(self) -> Ints:
        """In how many ways each row's readers can be shared out over dp and fsdp, each with what fsdp shares out, and the knobs."""
        shared, place = np.unique(self.rows["shared"], return_inverse=True)
        ways = np.array([len(divisors(int(n))) for n in shared], np.int64)[place]
        return np.asarray((ways + np.where(self.rows["pp"] == 1, 2 * (ways - 1), 0)) * self.rows["knobs"])

    @cached_property
    def plans_per_row(self) -> Ints:
        """How many plans each row stands for."""
        every = np.arange(len(self.rows["tp"]))
        schedules = sum(self.runs(every, schedule).astype(np.int64) for schedule in SCHEDULES)
        variants = sum(self.allows(every, sequence, remat).astype(np.int64) for sequence in (False, True) for remat in REMATS)
        return np.asarray(schedules * variants * self.sharings)

    def allows(self, rows: Ints, sequence: bool, remat: str) -> NDArray[np.bool_]:
        """Which of these rows may go with sequence parallelism and remat."""
        allowed = self._divides_sequence[rows] if sequence else np.ones(len(rows), np.bool_)
        return allowed & (self.rows["pp"][rows] > 1) if remat != "none" and not self.recomputes else allowed

    @cached_property
    def _divides_sequence(self) -> NDArray[np.bool_]:
        both, place = numbered(self.rows["tp"], self.rows["cp"])
        return np.array([self.legality.divides_sequence(*key) for key in both], np.bool_)[place]

    def runs(self, rows: Ints, schedule: str) -> NDArray[np.bool_]:
        """Which of these rows a schedule can run: 1f1b stands for all where there is no pipeline."""
        return self._schedules[schedule][rows]

    @cached_property
    def _schedules(self) -> dict[str, NDArray[np.bool_]]:
        both, place = numbered(self.rows["pp"], self.rows["microbatches"])
        fitting = {(name, pp): self.legality.schedule_fits(name, pp) for name in SCHEDULES for pp in self.degrees["pp"]}
        works = {name: [_runs(name, pp, count) and fitting[name, pp] for pp, count in both] for name in SCHEDULES}
        return {name: np.array(works[name], np.bool_)[place] for name in SCHEDULES}

    def shares(self, rows: Ints, fsdp: Ints, schedules: Ints) -> Iterator[tuple[NDArray[np.bool_], Refusal]]:
        """Which of these rows cannot have their readers shared out so, with these schedules (of `SCHEDULES`); for each reason."""
        keys, place = numbered(self.rows["pp"][rows], schedules)
        for i, (pp, schedule) in enumerate(keys):
            if refusal := self.legality.sharing_refusal(SCHEDULES[schedule], pp):
                yield (place == i) & (fsdp > 1), refusal

    def knobs(self, row: int) -> list[dict[str, Any]]:
        """What else may differ: on CPUs, the transport and fewer threads than there are cores; those that are tried first come first."""
        return self._knobs(int(self.rows["ranks"][row]), int(self.rows["threads"][row]))

    def _knobs(self, ranks: int, most: int) -> list[dict[str, Any]]:
        if self.cluster.kind == "cuda":
            return [{}]
        transports = [{"transport": name} for name in _TRANSPORTS] if ranks > 1 and self.base.transport == "auto" else [{}]
        threads = [0, *(2**n for n in range(most.bit_length()) if 2**n < most)] if self.base.threads == 0 else [self.base.threads]
        return [{"threads": n, **transport} for transport in transports for n in threads]

    def _threads(self, ranks: int) -> int:
        """Of each rank on a host that has the most of so many; on GPUs they do not matter."""
        if self.cluster.kind == "cuda":
            return 1
        return self.base.threads_for(self.cluster.hosts[0], max(spread(ranks, self.legality.case.per_host)))

    @cached_property
    def recomputes(self) -> bool:
        """Whether the model has blocks that can be computed again."""
        return bool(self.legality.case.anatomy.blocks)

    def _fitting(self, key: str) -> list[int]:
        fitting = [n for n in self._worth_asking(key) if n == 1 or self.legality.refusal_of_value(key, n) is None]
        self._note_refused(key, fitting)
        return fitting

    def _worth_asking(self, key: str) -> list[int]:
        """Values of a degree without those that cannot divide what it divides."""
        case = self.legality.case
        most = self.devices
        if key == "pp":
            pieces = len(case.anatomy.blocks) or sum(len(shape.sizes) > 1 for shape in case.anatomy.parameters)
            return list(range(1, min(most, max(pieces, 1)) + 1))
        if key == "cp" and not case.anatomy.takes_parts_of_sequences:
            return [1]
        numbers: tuple[int, ...] = {
            "tp": (*case.anatomy.heads, *case.anatomy.key_value_heads),
            "cp": (case.tokens or self.trace.tokens,),
            "ep": case.anatomy.experts or (1,),
        }[key]
        if not numbers:  # a model without heads: nothing says what does not divide
            return [1, *(2**n for n in range(1, most.bit_length()) if 2**n <= most)]
        return [n for n in range(1, min(most, min(numbers)) + 1) if not any(number % n for number in numbers)]

    def _note_refused(self, key: str, fitting: list[int]) -> None:
        """One reason for all values of a degree that cannot work: that of the first power of two among them."""
        powers = [2**n for n in range(1, self.devices.bit_length()) if 2**n <= self.devices]
        wrong = [value for value in (*powers, *range(2, min(self.devices, 16) + 1)) if value not in fitting]
        for value in wrong:
            if refusal := self.legality.refusal_of_value(key, value):
                self.refused.append(Refused(key, tuple(sorted(set(wrong))), refusal[1]))
                return

    def _inner_degrees(self) -> Iterator[tuple[int, int, int, int]]:
        for tp in self.degrees["tp"]:
            for cp in (n for n in self.degrees["cp"] if tp * n <= self.devices):
                for ep in (n for n in self.degrees["ep"] if tp * cp * n <= self.devices):
                    yield from ((tp, cp, ep, pp) for pp in self.degrees["pp"] if tp * cp * ep * pp <= self.devices)

    def _readers(self, tp: int, cp: int, ep: int, pp: int) -> Ints:
        """The rows of these degrees."""
        shared = self._shared(ep, self.devices // (tp * cp * ep * pp), pp > 1)
        if not shared:
            return np.empty((0, len(COLUMNS)), np.int64)
        table = np.concatenate([_parts(self.job.global_batch, n * ep, pp > 1) for n in shared])
        head = np.tile(np.array([tp, cp, ep, pp], np.int64), (len(table), 1))
        table[:, 0] //= ep
        return np.concatenate([head, table], axis=1)

    def _shared(self, ep: int, most: int, equal: bool) -> list[int]:
        """What dp × fsdp may be: numbers of readers that deal the batch evenly; without a pipeline also those with uneven shares that no
        smaller number matches (the fullest reader sets the pace, so of equally full ones the fewest readers win)."""
        weights = self.job.partition.weights
        if weights is not None:
            return [len(weights) // ep] if len(weights) % ep == 0 and len(weights) // ep <= most else []
        return [readers // ep for readers in _useful_readers(self.job.global_batch, equal) if readers % ep == 0 and readers // ep <= most]


@cache
def _useful_readers(batch: int, equal: bool) -> tuple[int, ...]:
    if equal:
        return tuple(n for n in range(1, batch + 1) if batch % n == 0)
    fullest: set[int] = {-(-batch // share) for share in range(1, int(batch**0.5) + 2)}
    few = {n for n in range(1, int(batch**0.5) + 2) if n <= batch and -(-batch // -(-batch // n)) == n}
    return tuple(sorted(fullest | few))


@cache
def _parts(batch: int, readers: int, equal: bool) -> Ints:
    """Rows of (readers, microbatches): numbers of microbatches that divide a share evenly; those of uneven shares as evenly as can be.

    Ranks without a pipeline compute one after the other, so of numbers with equally large parts only the least is there.
    """
    share, smallest = -(-batch // readers), batch // readers
    if equal:
        counts = [n for n in range(1, share + 1) if share % n == 0]
    else:
        counts = sorted({-(-share // size) for size in range(1, share + 1)})
    return np.array([(readers, n) for n in counts if n <= smallest], np.int64).reshape(-1, 2)


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Ascending."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def _runs(schedule: str, pp: int, microbatches: int) -> bool:
    return microbatches_fit(schedule, pp, microbatches) if pp > 1 else schedule == "1f1b"


def numbered(*columns: Ints) -> tuple[list[tuple[int, ...]], Ints]:
    """The different rows of some columns, and for each row which of them it is."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        key = key * (int(column.max(initial=0)) + 1) + column
    _, first, place = np.unique(key, return_index=True, return_inverse=True)
    return list(zip(*(column[first].tolist() for column in columns), strict=True)), place
