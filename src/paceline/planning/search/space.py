"""Valid plans of a job on a cluster, as objects and as columns of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.cluster import Cluster, spread
from paceline.errors import PlanError
from paceline.job.job import Job
from paceline.planning.check.plan_context import Check, PlanContext
from paceline.planning.check.rules import CHECKS, reasons_of
from paceline.planning.check.split_rules import MEMORY
from paceline.planning.limits import microbatches_fit, shares_heads
from paceline.planning.model.graph import ModelTrace
from paceline.planning.plan import DEGREES, MEANT_FOR, REMATS, SCHEDULES, Plan, Schedule, stages_per_rank
from paceline.planning.sync_info import BETWEEN_HOSTS, WITHIN_HOST, carriers
from paceline.units import count

Ints = NDArray[np.int64]
# numbers of interleaved stages of a rank; values above 2 only if all stages get the same number of layers
_VIRTUAL = (2, 3, 4, 6, 8, 12)
COLUMNS = ("tp", "cp", "ep", "pp", "shared", "microbatches")


class Pipeline(NamedTuple):
    """Pipeline schedule, with the number of interleaved stages on each rank."""

    schedule: Schedule
    virtual: int = Plan.virtual

    def chunks(self, pp: int) -> int:
        """Return the number of stages on each rank; 1 without a pipeline."""
        return stages_per_rank(self.schedule, self.virtual) if pp > 1 else 1


PIPELINES = tuple(
    Pipeline(schedule, virtual)
    for schedule in SCHEDULES
    for virtual in (_VIRTUAL if schedule == "interleaved" else (Plan.virtual,))
)


@dataclass(frozen=True)
class Excluded:
    """Plans that cannot run, grouped by reason.

    Attributes:
        what: plan key and value, such as `tp=16`, or `memory`.
        reason: text that states why such plans cannot run, and a value that would work.
        plans: number of considered plans that are excluded for this reason; 0 if they were not counted.
    """

    what: str
    reason: str
    plans: int = 0


class Space:
    """All plans of a job on a cluster from which a search may choose.

    Attributes:
        devices: number of devices, which limits the number of ranks.
        degrees: for each of tp, cp, ep and pp, the values that may work.
        refused: values of degrees that work in no plan.
    """

    def __init__(self, job: Job, cluster: Cluster, base: Plan, trace: ModelTrace) -> None:
        self.job, self.cluster, self.base, self.trace = job, cluster, base, trace
        self.legal = LegalPlans(job, cluster, base, len(trace.blocks))
        self.devices = self.legal.context.devices
        self.refused: list[Excluded] = []
        self.degrees = {key: self._fitting(key) for key in ("tp", "cp", "ep", "pp")}

    @cached_property
    def rows(self) -> dict[str, NDArray[Any]]:
        """Table with a row for each valid combination of degrees and microbatches.

        The column for dp × fsdp is `shared`. Further columns include the samples of a microbatch, `size` (an index of
        distinct sample counts), and the threads of a rank on CPUs.
        """
        pieces = [piece for degrees in self._inner_degrees() if len(piece := self._with_data_ranks(*degrees))]
        table = np.concatenate(pieces) if pieces else np.empty((0, len(COLUMNS)), np.int64)
        rows: dict[str, NDArray[Any]] = {
            key: np.ascontiguousarray(column) for key, column in zip(COLUMNS, table.T, strict=True)
        }
        counts, least = rows["microbatches"], self.job.gradient_accumulation_steps
        kept = counts >= least if self.legal.allows_microbatches(max(least, 2)) else counts == 1
        rows = {key: column[kept] for key, column in rows.items()}
        rows["ranks"] = rows["tp"] * rows["cp"] * rows["ep"] * rows["pp"] * rows["shared"]
        several, place = numbered(rows["ranks"])
        threads = [self._threads(*key) for key in several]
        rows["threads"] = np.array(threads, np.int64)[place]
        rows["settings"] = np.array(
            [len(self._settings(ranks, most)) for (ranks,), most in zip(several, threads, strict=True)], np.int64
        )[place]
        # samples of the fullest data-parallel rank
        share = -(-self.job.global_batch // (rows["shared"] * rows["ep"]))
        rows["samples"] = share / np.maximum(rows["microbatches"], 1)
        rows["size"] = np.unique(rows["samples"], return_inverse=True)[1]
        return rows

    @cached_property
    def factorisations(self) -> Ints:
        """Number of factorisations of each row.

        They are factorisations of `shared` into dp × fsdp, each with its `zero` stages and settings.
        """
        shared, place = np.unique(self.rows["shared"], return_inverse=True)
        ways = np.array([len(divisors(int(n))) for n in shared], np.int64)[place]
        return np.asarray((ways + np.where(self.rows["pp"] == 1, 2 * (ways - 1), 0)) * self.rows["settings"])

    @cached_property
    def plans_per_row(self) -> Ints:
        """Number of plans of each row."""
        every = np.arange(len(self.rows["tp"]))
        pipelines = sum(self.runs(every, pipeline).astype(np.int64) for pipeline in PIPELINES)
        variants = sum(
            self.allows(every, sequence, remat).astype(np.int64) for sequence in (False, True) for remat in REMATS
        )
        return np.asarray(pipelines * variants * self.factorisations)

    def allows(self, rows: Ints, sequence: bool, remat: str) -> NDArray[np.bool_]:
        """Return a mask of the rows that are valid with `sequence` and `remat`."""
        allowed = self._divides_sequence[rows] if sequence else np.ones(len(rows), np.bool_)
        return allowed & (self.rows["pp"][rows] > 1) if remat != "none" and not self.recomputes else allowed

    @cached_property
    def _divides_sequence(self) -> NDArray[np.bool_]:
        both, place = numbered(self.rows["tp"], self.rows["cp"])
        return np.array([self.legal.divides_sequence(*key) for key in both], np.bool_)[place]

    def runs(self, rows: Ints, pipeline: Pipeline) -> NDArray[np.bool_]:
        """Return a mask of the rows that a pipeline schedule can run.

        Rows without a pipeline can run only with 1f1b.
        """
        return np.asarray(self._schedules[pipeline.schedule][rows] & self._suited[pipeline][self.rows["pp"][rows]])

    @cached_property
    def _suited(self) -> dict[Pipeline, NDArray[np.bool_]]:
        """Masks of the values of pp for which the model has enough layers."""
        layers = max((count for _, count in self.trace.runs), default=0)

        def suits(pipeline: Pipeline, pp: int) -> bool:
            stages = pp * pipeline.chunks(pp)
            # the first and the last stage may have one layer less, because of the embedding and the head
            even = layers % stages == 0 or (layers + 2) % stages == 0
            return (even or pipeline.virtual == Plan.virtual) and self.legal.schedule_fits(*pipeline, pp)

        values = range(max(self.degrees["pp"]) + 1)
        return {
            pipeline: np.array([pp in self.degrees["pp"] and suits(pipeline, pp) for pp in values], np.bool_)
            for pipeline in PIPELINES
        }

    @cached_property
    def _schedules(self) -> dict[str, NDArray[np.bool_]]:
        both, place = numbered(self.rows["pp"], self.rows["microbatches"])
        return {name: np.array([_runs(name, *key) for key in both], np.bool_)[place] for name in SCHEDULES}

    def shards_refused(self, rows: Ints, pipelines: Ints) -> Iterator[tuple[NDArray[np.bool_], Refusal]]:
        """Yield masks of the rows whose stages fsdp cannot shard, each with the reason.

        `pipelines` has an index in `PIPELINES` for each row.
        """
        keys, place = numbered(self.rows["pp"][rows], pipelines)
        for i, (pp, pipeline) in enumerate(keys):
            if refusal := self.legal.fsdp_refusal(PIPELINES[pipeline].schedule, pp):
                yield place == i, refusal

    def settings(self, row: int) -> list[dict[str, Any]]:
        """Return the settings of a row, in the order in which they are tried.

        On CPUs, the settings are transports and numbers of threads. On GPUs, there is a single empty setting.
        """
        return self._settings(int(self.rows["ranks"][row]), int(self.rows["threads"][row]))

    def _settings(self, ranks: int, most: int) -> list[dict[str, Any]]:
        if self.cluster.has_accelerators:
            return [{}]
        transports = self._transports if ranks > 1 and self.base.transport == "auto" else [{}]
        threads = (
            [0, *(2**n for n in range(most.bit_length()) if 2**n < most)]
            if self.base.threads == 0
            else [self.base.threads]
        )
        return [{"threads": n, **transport} for transport in transports for n in threads]

    @cached_property
    def _transports(self) -> list[dict[str, Any]]:
        """Values of `transport` to try: `auto`, and the transports that `auto` never chooses."""
        others = carriers(several_hosts=len(self.cluster.hosts) > 1)
        return [{"transport": name} for name in ("auto", *others) if name not in (WITHIN_HOST, BETWEEN_HOSTS)]

    def _threads(self, ranks: int) -> int:
        """Return the number of threads per rank on the fullest host; 1 on GPUs."""
        if self.cluster.has_accelerators:
            return 1
        return self.base.threads_for(self.cluster.hosts[0], max(spread(ranks, self.legal.context.per_host)))

    @cached_property
    def recomputes(self) -> bool:
        """True if the model has blocks that can be recomputed, and no check refuses recomputation."""
        allowed = self.legal.refusal({"remat": "block"}, ("remat",)) is None
        return allowed and bool(self.legal.context.model_info.blocks)

    def _fitting(self, key: str) -> list[int]:
        fitting = [n for n in self._worth_asking(key) if n == 1 or self.legal.refusal_of_value(key, n) is None]
        self._note_refused(key, fitting)
        return fitting

    def _worth_asking(self, key: str) -> list[int]:
        """Return the values of a degree that divide the numbers of the model."""
        context = self.legal.context
        most = self.devices
        if key == "pp":
            pieces = len(context.model_info.blocks) or sum(
                len(shape.sizes) > 1 for shape in context.model_info.parameters
            )
            return list(range(1, min(most, max(pieces, 1)) + 1))
        if key == "cp" and not context.divides_sequences:
            return [1]
        numbers: tuple[int, ...] = {
            "tp": context.model_info.heads,
            "cp": (context.tokens or self.trace.tokens,),
            "ep": context.model_info.experts or (1,),
        }[key]
        # without heads, every power of two may divide the model
        if not numbers:
            return [1, *(2**n for n in range(1, most.bit_length()) if 2**n <= most)]
        fitting = [n for n in range(1, min(most, min(numbers)) + 1) if not any(number % n for number in numbers)]
        return [n for n in fitting if key != "tp" or shares_heads(context.model_info.key_value_heads, n)]

    def _note_refused(self, key: str, fitting: list[int]) -> None:
        """Note one exclusion for all values of a degree that cannot work.

        The exclusion has the reason for the first of these values.
        """
        powers = [2**n for n in range(1, self.devices.bit_length()) if 2**n <= self.devices]
        wrong = [value for value in (*powers, *range(2, min(self.devices, 16) + 1)) if value not in fitting]
        for value in wrong:
            if refusal := self.legal.refusal_of_value(key, value):
                values = sorted(set(wrong))
                shown = ", ".join(map(str, values[:6])) + (", …" if len(values) > 6 else "")
                self.refused.append(Excluded(f"{key}={shown}", refusal[1]))
                return

    def _inner_degrees(self) -> Iterator[tuple[int, int, int, int]]:
        for tp in self.degrees["tp"]:
            for cp in (n for n in self.degrees["cp"] if tp * n <= self.devices):
                for ep in (n for n in self.degrees["ep"] if tp * cp * n <= self.devices):
                    yield from ((tp, cp, ep, pp) for pp in self.degrees["pp"] if tp * cp * ep * pp <= self.devices)

    def _with_data_ranks(self, tp: int, cp: int, ep: int, pp: int) -> Ints:
        """Return the rows of these degrees, with all values of dp × fsdp and microbatches."""
        shared = self._shared(ep, self.devices // (tp * cp * ep * pp), pp > 1)
        if not shared:
            return np.empty((0, len(COLUMNS)), np.int64)
        table = np.concatenate([_parts(self.job.global_batch, n * ep, pp > 1) for n in shared])
        head = np.tile(np.array([tp, cp, ep, pp], np.int64), (len(table), 1))
        table[:, 0] //= ep
        return np.concatenate([head, table], axis=1)

    def _shared(self, ep: int, most: int, equal: bool) -> list[int]:
        """Return the values of dp × fsdp that are worth trying.

        With a pipeline, these divide the batch evenly. Otherwise, uneven shares are allowed. The data-parallel rank
        with the most samples determines the time, so among values with the same largest share only the smallest is
        returned.
        """
        weights = self.job.partition.weights
        if weights is not None:
            return [len(weights) // ep] if len(weights) % ep == 0 and len(weights) // ep <= most else []
        return [
            data_ranks // ep
            for data_ranks in _useful_data_ranks(self.job.global_batch, equal)
            if data_ranks % ep == 0 and data_ranks // ep <= most
        ]


@cache
def _useful_data_ranks(batch: int, equal: bool) -> tuple[int, ...]:
    if equal:
        return tuple(n for n in range(1, batch + 1) if batch % n == 0)
    fullest: set[int] = {-(-batch // share) for share in range(1, int(batch**0.5) + 2)}
    few = {n for n in range(1, int(batch**0.5) + 2) if n <= batch and -(-batch // -(-batch // n)) == n}
    return tuple(sorted(fullest | few))


@cache
def _parts(batch: int, data_ranks: int, equal: bool) -> Ints:
    """Return the pairs of `data_ranks` and a number of microbatches that are worth trying.

    With a pipeline, the microbatches divide a rank's samples evenly. Otherwise, a rank computes one microbatch after
    the other, so among numbers with equally large microbatches only the smallest is returned.
    """
    share, smallest = -(-batch // data_ranks), batch // data_ranks
    if equal:
        counts = [n for n in range(1, share + 1) if share % n == 0]
    else:
        counts = sorted({-(-share // size) for size in range(1, share + 1)})
    return np.array([(data_ranks, n) for n in counts if n <= smallest], np.int64).reshape(-1, 2)


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, ascending."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def _runs(schedule: str, pp: int, microbatches: int) -> bool:
    return microbatches_fit(schedule, pp, microbatches) if pp > 1 else schedule == "1f1b"


def numbered(*columns: Ints) -> tuple[list[tuple[int, ...]], Ints]:
    """Return the distinct rows of several columns, and the index of each row among them."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        key = key * (int(column.max(initial=0)) + 1) + column
    _, first, place = np.unique(key, return_index=True, return_inverse=True)
    return list(zip(*(column[first].tolist() for column in columns), strict=True)), place


# (keys that the reason depends on, reason)
Refusal = tuple[tuple[str, ...], str]
# degrees whose refusal holds for all plans if it holds with the other degrees at 1
_FIXED = ("tp", "ep", "fsdp"), ("pp", "cp")


class LegalPlans:
    """Checker of plans that differ from a base plan in some keys. Results are cached.

    Args:
        blocks: number of blocks in the trace, which is the largest number of stages that can be predicted.
    """

    def __init__(self, job: Job, cluster: Cluster, base: Plan, blocks: int) -> None:
        self.blocks = blocks
        self.context = PlanContext(base, job, cluster, weighed=True)
        self._known: list[tuple[Check, dict[tuple[Any, ...], str | None]]] = [
            (check, {}) for check in CHECKS if check.keys != MEMORY
        ]
        self._memory = next(check for check in CHECKS if check.keys == MEMORY)

    def refusal(self, values: dict[str, Any], among: Iterable[str] | None = None) -> Refusal | None:
        """Return the first reason why the base plan with changed values cannot run, or None.

        Memory is not checked here: see `out_of_memory`.

        Args:
            among: plan keys; only checks of these keys alone are run. None runs all checks.
        """
        base, plan = self.context.plan, None
        for check, known in self._known:
            if among is not None and not set(check.keys) <= set(among):
                continue
            key = tuple([values[name] if name in values else getattr(base, name) for name in check.keys])
            if key not in known:
                plan = plan or replace(base, **values)
                problem = check.reason(replace(self.context, plan=plan))
                known[key] = problem.predicate if problem else None
            if (found := known[key]) is not None:
                return check.keys, found
        return None

    def out_of_memory(self, plan: Plan) -> Refusal | None:
        """Return the reason why the state of a plan exceeds the memory, or None."""
        problem = self._memory.reason(replace(self.context, plan=plan))
        return (("memory",), problem.predicate) if problem else None

    def refusal_of_value(self, key: str, value: int) -> Refusal | None:
        """Return the reason why a degree cannot have this value in any plan, or None."""
        together = next(keys for keys in _FIXED if key in keys)
        return self.refusal({key: value}, together) or (self._too_many_stages(value) if key == "pp" else None)

    def _too_many_stages(self, pp: int) -> Refusal | None:
        one_a_rank = [
            self.refusal({"pp": pp, "schedule": schedule}, ("pp", "schedule", "cut", "virtual"))
            for schedule in ("1f1b", "gpipe")
        ]
        if all(one_a_rank):
            return next(iter(one_a_rank))
        apart = f"at most {count(self.blocks, 'block')} of the model can be predicted separately"
        return (("pp",), f"makes {pp} stages, and {apart}: pp={self.blocks}.") if pp > self.blocks else None

    def divides_sequence(self, tp: int, cp: int) -> bool:
        """True if sequence parallelism is valid with these degrees."""
        return tp > 1 and self.refusal({"tp": tp, "cp": cp, "sequence": True}, ("sequence", "tp", "cp")) is None

    def schedule_fits(self, schedule: str, virtual: int, pp: int) -> bool:
        """True if the model has enough blocks for the schedule's stages."""
        values = {"pp": pp, "schedule": schedule, "virtual": virtual}
        stages = pp * stages_per_rank(schedule, virtual) if pp > 1 else 1
        return stages <= self.blocks and self.refusal(values, (*values, "cut")) is None

    def fsdp_refusal(self, schedule: str, pp: int) -> Refusal | None:
        """Return the reason why fsdp cannot shard the stages of this pipeline, or None."""
        return self.refusal({"pp": pp, "schedule": schedule, "fsdp": 2}, ("fsdp", "tp", "ep", "pp", "schedule"))

    def allows_microbatches(self, least: int = 2) -> bool:
        """True if a rank's samples may be divided into this number of microbatches.

        Raises:
            PlanError: several microbatches are not allowed, but the job requires them.
        """
        refusal = self.refusal({"microbatches": least}, ("microbatches",))
        if refusal is not None and self.context.job.gradient_accumulation_steps > 1:
            plan = replace(self.context.plan, microbatches=least)
            raise PlanError.of_problems(list(reasons_of(replace(self.context, plan=plan))))
        return refusal is None


VARIED = (*DEGREES, "zero", "sequence", "schedule")
_VALUES = {"zero": (3, 2, 1), "sequence": (False, True), "schedule": SCHEDULES}


def legal_plans(
    job: Job, cluster: Cluster, ranks: int | Iterable[int], *, keys: Sequence[str] = VARIED, base: Plan | None = None
) -> list[Plan]:
    """Return every plan with `ranks` ranks that passes `plan_errors`, in a fixed order.

    Plans with fewer ranks come first. Equivalent variants are left out. `zero` varies only if `fsdp` is above 1 and
    there is no pipeline, which gathers and reduces once per step for every `zero`. `sequence` varies only if `tp` is
    above 1, and `schedule` only if `pp` is above 1. With a pipeline, each schedule has the smallest suitable number of
    microbatches that, if possible, is at least that of `base` and the number of ranks in the pipeline (`pp`).

    Args:
        ranks: number of ranks, or several numbers, such as `range(1, 5)` for one to four ranks.
        keys: keys that vary, which may be degrees, `zero`, `sequence`, `schedule` and `remat`. The other keys stay as
            in `base`.
        base: `Plan()` by default.

    Raises:
        ValueError: `keys` contains a key that cannot vary.
        JobError: the model cannot be built.
    """
    if unknown := set(keys) - {*VARIED, "remat"}:
        raise ValueError(
            f"keys: {', '.join(sorted(unknown))} do not vary in the space of plans; the keys that vary are "
            f"{', '.join(VARIED)}, remat"
        )
    base = base or Plan().for_job(job)
    wanted = sorted({ranks} if isinstance(ranks, int) else set(ranks))
    context = PlanContext(base, job, cluster)
    fitting = _fitting_degrees(context, max(wanted, default=1), keys)
    found = []
    for total in wanted:
        for degrees in _factors(total, [(key, fitting[key]) for key in DEGREES]):
            plans = _variants(replace(base, **degrees), job, keys)
            found += [plan for plan in plans if not reasons_of(replace(context, plan=plan))]
    return list(dict.fromkeys(found))


def _fitting_degrees(context: PlanContext, most: int, keys: Sequence[str]) -> dict[str, list[int]]:
    """Return the values of each degree that pass the checks of this degree alone."""
    fitting = {}
    for key in DEGREES:
        own = [check for check in CHECKS if check.keys == (key,)]
        values = range(1, most + 1) if key in keys else (getattr(context.plan, key),)
        if key == "cp" and key in keys and most > 1 and not context.divides_sequences:
            # it may run, but the cost model cannot predict it
            values = (1,)
        contexts = [
            (value, replace(context, plan=replace(context.plan, **dict[str, Any]({key: value})))) for value in values
        ]
        fitting[key] = [
            value for value, changed in contexts if value == 1 or not any(check.reason(changed) for check in own)
        ]
    return fitting


def _factors(total: int, degrees: list[tuple[str, list[int]]]) -> Iterator[dict[str, Any]]:
    """Yield factorisations of `total` with one value for each degree.

    Large values of the first degrees come first.
    """
    (key, values), rest = degrees[0], degrees[1:]
    for value in reversed(values):
        if total % value == 0:
            if rest:
                yield from ({key: value} | others for others in _factors(total // value, rest))
            elif value == total:
                yield {key: value}


def _variants(plan: Plan, job: Job, keys: Sequence[str]) -> Iterator[Plan]:
    """Yield a plan with every value of the keys that have an effect."""
    values: dict[str, Sequence[Any]] = {"remat": REMATS if "remat" in keys else (plan.remat,)}
    for key, degree in MEANT_FOR.items():
        values[key] = (getattr(plan if getattr(plan, degree) > 1 else Plan, key),)
        if key in _VALUES and key in keys and getattr(plan, degree) > 1 and (key, plan.pp > 1) != ("zero", True):
            values[key] = _VALUES[key]
    for combination in product(*values.values()):
        variant = replace(plan, **dict(zip(values, combination, strict=True)))
        if variant.schedule != "interleaved":
            variant = replace(variant, virtual=Plan.virtual)
        parts = _microbatches(variant, job) if plan.pp > 1 else plan.microbatches
        if parts is not None:
            yield replace(variant, microbatches=parts)


def _microbatches(plan: Plan, job: Job) -> int | None:
    """Return a suitable number of microbatches for a schedule, or None.

    It is the smallest valid number that is not below `pp` or the plan's own number. If there is no such number, it
    is the largest valid number.
    """
    share = job.global_batch // plan.data_ranks
    fitting = [
        n
        for n in range(1, min(share, 4 * plan.pp + plan.microbatches) + 1)
        if microbatches_fit(plan.schedule, plan.pp, n)
    ]
    enough = [n for n in fitting if n >= max(plan.pp, plan.microbatches)]
    return next(iter(enough or reversed(fitting)), None)
