"""Result of a search: candidates, exclusions, and the gap to the optimum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from paceline.cluster.catalogue import CATALOGUE
from paceline.errors import PlanError
from paceline.partition import contiguous
from paceline.planning.cost.layout import Interval, Layout, Prediction
from paceline.planning.cost.memory import PROPOSED, memory, usable_bytes
from paceline.planning.machines import Adjustment, equal_ratio, machine_count, on_other_devices, resized, shape
from paceline.planning.model.graph import ModelTrace
from paceline.planning.plan import DEGREES, Plan
from paceline.planning.search.space import VARIED, Excluded, Space
from paceline.units import count, percent, size

# keys that add complexity if they differ from their default
_MOVING = ("fsdp", "tp", "pp", "cp", "ep", "remat", "offload", "offload_activations", "sequence", "cut", "schedule")


@dataclass(frozen=True)
class Candidate:
    """A valid plan that fits the memory, with its prediction.

    Attributes:
        plan: plan that passes `plan_errors` for the job and the cluster.
        layout: the plan as numbers for the cost model.
        prediction: predicted cost of the plan.
        why: for the recommended plan, the parts of its step; for other plans, the parts that make them slower.
    """

    plan: Plan
    layout: Layout
    prediction: Prediction
    why: str = ""

    @property
    def interval(self) -> Interval:
        """Interval of the predicted step time."""
        found = self.prediction.interval
        return found or Adjustment().interval(self.layout, self.prediction.step_time_s)


def figures(found: Candidate | None) -> dict[str, Any]:
    """Return a plan and its predicted figures as a dictionary for JSON.

    Without a plan, all values are None.
    """
    if found is None:
        names = ("plan", "step_time_s", "interval_80_s", "throughput", "memory_bytes", "fit_probability", "mfu")
        return dict.fromkeys(names)
    prediction = found.prediction
    return {
        "plan": str(found.plan),
        "step_time_s": prediction.step_time_s,
        "interval_80_s": [found.interval.low_s, found.interval.high_s],
        "throughput": prediction.throughput,
        "memory_bytes": prediction.memory_bytes,
        "fit_probability": prediction.fit_probability,
        "mfu": prediction.mfu,
    }


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        best: the recommended plan (`preferred`), then the other plans, the fastest first. Each set of degrees appears
            only with its best variant.
        excluded: reasons why plans are excluded; the reason that excludes the most plans comes first.
        considered: number of plans in the search space, including invalid plans.
        gap: largest fraction by which an untried plan could be faster than the best plan, before corrections by
            measured runs. It is 0 if every plan was evaluated or excluded by a bound.
        seconds: duration of the search in seconds.
        evaluated: number of plans predicted in full.
        pruned: number of plans that a lower bound excluded without a prediction.
    """

    best: tuple[Candidate, ...]
    excluded: tuple[Excluded, ...] = ()
    considered: int = 0
    gap: float = 0.0
    seconds: float = 0.0
    evaluated: int = 0
    pruned: int = 0

    @property
    def fastest(self) -> Candidate:
        """Plan with the shortest predicted step, with which what-if predictions are compared."""
        return min(self.best, key=lambda candidate: candidate.prediction.step_time_s)


def equals(best: Sequence[Candidate]) -> list[Candidate]:
    """Return the plans that predictions cannot distinguish from the fastest plan.

    For these plans, the interval of the ratio of the two predicted times contains 1. Most of a prediction error is
    common to both times, so this interval is narrower than that of a single time.
    """
    fastest = min(candidate.prediction.step_time_s for candidate in best)
    return [c for c in best if c.prediction.step_time_s <= equal_ratio() * fastest]


def preferred(best: Sequence[Candidate]) -> Candidate:
    """Return the simplest of the plans that predictions cannot distinguish from the fastest plan.

    The plan with the fewest moving parts is the simplest. Ties are broken by the fewest ranks, then by the most free
    memory.
    """
    return min(equals(best), key=_complexity)


def _complexity(candidate: Candidate) -> tuple[float, ...]:
    prediction = candidate.prediction
    parts = moving_parts(candidate.plan)
    return parts, candidate.plan.ranks, prediction.memory_bytes, prediction.step_time_s


def moving_parts(plan: Plan) -> int:
    """Count the plan keys that add complexity and differ from their defaults."""
    return sum(getattr(plan, key) != getattr(Plan, key) for key in _MOVING)


_MOST_REASONS = 12
# of the step; smaller differences are not reported
_SMALL = 0.005
_WORDS = {
    "compute": "computing",
    "recompute": "computing again",
    "launch": "starting kernels",
    "tp": "tensor-parallel sums",
    "cp": "keys and values between ranks of cp",
    "ep": "tokens to experts and back",
    "fsdp": "gathering parameters",
    "pp": "activations between stages",
    "bubble": "bubble",
    "dp": "sums of gradients",
    "optimizer": "optimizer",
    "other": "the remainder",
}


@dataclass
class RejectionCounts:
    """Numbers of plans that a search rejected, for lack of memory and for each check."""

    # bytes of a device
    capacity: float = 0.0
    out_of_memory: int = 0
    refused: dict[tuple[str, ...], tuple[str, int]] = field(default_factory=dict)

    @property
    def plans(self) -> int:
        """Total number of rejected plans."""
        return self.out_of_memory + sum(count for _, count in self.refused.values())

    def refuse(self, keys: tuple[str, ...], reason: str, plans: int = 1) -> None:
        """Add plans that a check refused."""
        text, count = self.refused.get(keys, (reason, 0))
        if count + plans:
            self.refused[keys] = text, count + plans

    def excluded(self, space: Space) -> tuple[Excluded, ...]:
        """Return the exclusions; those with the most plans come first.

        Before them come the values of degrees that were refused for all plans.
        """
        values = list(space.refused)
        if (batch := _uneven_batch(space)) is not None:
            values.append(batch)
        found = [Excluded(" ".join(keys[:3]), text, count) for keys, (text, count) in self.refused.items()]
        if self.out_of_memory:
            plans, room = f"{self.out_of_memory:,} plans", size(self.capacity)
            reason = f"does not fit: {plans} need more than the {room} that are available on a device"
            found.append(Excluded("memory", reason, self.out_of_memory))
        return (*values, *sorted(found, key=lambda one: -one.plans))[:_MOST_REASONS]


def why_it_wins(winner: Candidate) -> str:
    """Describe the parts of the recommended plan's step, the largest first."""
    step = winner.prediction.step_time_s
    parts = sorted(winner.prediction.breakdown.items(), key=lambda part: -part[1])
    return ", ".join(
        f"{percent(seconds / step, 0)} {_WORDS.get(part, part)}"
        for part, seconds in parts
        if seconds >= 2 * _SMALL * step
    )


def why_it_loses(other: Candidate, winner: Candidate, measured: float = 1.0) -> str:
    """Describe why a plan takes longer than the recommended plan.

    Differences are fractions of the recommended plan's step time.

    Args:
        measured: additional factor on the plan's time from measured runs of its software, hardware and precision.
    """
    told = [f"+{percent(measured - 1, 0)} according to measured runs"] if measured - 1 >= _SMALL else []
    step = winner.prediction.step_time_s
    more = {
        part: (s - winner.prediction.breakdown.get(part, 0.0)) / step for part, s in other.prediction.breakdown.items()
    }
    worst = sorted(((gain, part) for part, gain in more.items() if gain >= _SMALL), reverse=True)[:2]
    told += [f"+{percent(gain, 0)} {_WORDS.get(part, part)}{_cause(part, other, winner)}" for gain, part in worst]
    return "; ".join(told) or "as fast, according to the cost model"


def _cause(part: str, other: Candidate, winner: Candidate) -> str:
    plan, layout = other.plan, other.layout
    if part == "bubble":
        return f": {plan.microbatches} microbatches over {plan.pp} stages"
    if part == "recompute":
        return f": remat={plan.remat}"
    if part in ("compute", "launch", "optimizer") and plan.ranks < winner.plan.ranks:
        return f": {plan.ranks:,} of {winner.plan.ranks:,} ranks"
    if part == "compute":
        return _shapes(plan, layout.samples, winner.plan, winner.layout.samples)
    if part in DEGREES:
        network = layout.link(part).name == layout.machines.between.name and layout.machines.hosts > 1
        return f": {part}={getattr(plan, part)}" + (" over the network between hosts" if network else "")
    return ""


def _shapes(plan: Plan, samples: float, winner: Plan, best_samples: float) -> str:
    if plan.tp > winner.tp:
        return f": tp={plan.tp} makes matrices narrower, or divides only some matrices"
    if samples < best_samples:
        return f": microbatches of {count(round(samples), 'sample')} instead of {best_samples:g}"
    return ": stages are less balanced" if plan.pp > 1 else ""


def nothing_fits(space: Space, rejections: RejectionCounts, layout: Layout) -> PlanError:
    """Return the error for a search that found no plan."""
    job, cluster = space.job, space.cluster
    if not len(space.rows["tp"]):
        return _no_division(space)
    if missing := smallest_that_works(layout, job.global_batch):
        return PlanError(
            "plan.no_fit",
            "no plan fits {job} on {cluster}. {advice}",
            job=job.name,
            cluster=cluster.name,
            advice=missing,
        )
    given = {key.name for key in fields(Plan)}.difference(VARIED, ("remat", "microbatches"))
    if refusal := space.legal.refusal({}, given):
        # a key that the search does not vary is the cause
        refused = [f"Every plan {refusal[1]}"]
    else:
        refused = [f"{one.what}: {one.reason}" for one in rejections.excluded(space)]
    return PlanError(
        "plan.none_found",
        "{job} cannot be trained on {cluster} under any plan.\n{reasons}",
        job=job.name,
        cluster=cluster.name,
        reasons="\n".join(refused),
    )


def _uneven_batch(space: Space) -> Excluded | None:
    """Return the exclusion of numbers of data-parallel ranks that divide the batch unevenly, or None."""
    batch, most = space.job.global_batch, min(space.devices, space.job.global_batch)
    even = [n for n in range(1, most + 1) if batch % n == 0]
    if space.job.partition.weights is not None or len(even) == most:
        return None
    shown = ", ".join(map(str, even[:12])) + (", …" if len(even) > 12 else "")
    reason = (
        f"a global batch of {batch:,} can be divided evenly over {shown} data-parallel ranks; with any other number, "
        "some ranks get one more sample, and all ranks wait for them"
    )
    return Excluded("dp × fsdp × ep", reason)


def _no_division(space: Space) -> PlanError:
    weights = space.job.partition.weights
    if weights is not None:
        return PlanError(
            "plan.weights_exceed_devices",
            "the job's partition has {weights} weights, one for each data-parallel rank, but {cluster} has {devices} "
            "devices. Give at most {devices} weights, or none for equal shares.",
            weights=len(weights),
            cluster=space.cluster.name,
            devices=space.devices,
        )
    return PlanError(
        "plan.no_division",
        "no plan divides a global batch of {batch} over {devices} devices of {cluster}",
        batch=space.job.global_batch,
        devices=space.devices,
        cluster=space.cluster.name,
    )


_MOST_HOSTS = 2**14
_MOST_CP = 64
_MOST_TP = 64


class SmallestMemory(NamedTuple):
    """Plan that comes closest to fitting the memory of given machines.

    Attributes:
        needed: peak memory of the rank that needs the most, in bytes.
        room: memory that a plan may use on one device, in bytes.
    """

    needed: float
    room: float
    layout: Layout

    @property
    def fits(self) -> bool:
        """True if the plan fits."""
        return self.needed <= self.room


def smallest_that_works(layout: Layout, global_batch: int) -> str:
    """Describe why a model does not fit the machines; "" if it fits.

    The text states the missing memory and the smallest sufficient cluster.

    Args:
        layout: layout of any plan of the job on the machines. Its degrees are ignored.
        global_batch: number of samples in a step, which limits the number of data-parallel ranks.
    """
    here = least(layout, global_batch)
    if here.fits:
        return ""
    machines = layout.machines
    if machines.device.is_core:
        has = f"its part of the host's memory is only {size(here.room)}"
    else:
        device, likely = _a(machines.device.name), percent(PROPOSED, 0)
        has = f"only {size(here.room)} of {device} suffice with a probability of {likely}"
    said = (
        f"At least {size(here.needed)} on each device, with {words(here.layout)}, but {has}: "
        f"{size(here.needed - here.room)} are missing."
    )
    more, larger = _more_hosts(layout, global_batch), _larger_device(layout, global_batch)
    enough = [_on(found) for found in (more, larger) if found.fits]
    if enough:
        return f"{said} It fits on {', or on '.join(enough)}."
    what, most = max(memory(more.layout).items(), key=lambda item: item[1])
    return (
        f"{said} More such hosts do not help: {what} alone would still need {size(most)}. Use shorter samples or "
        "smaller layers."
    )


def least(layout: Layout, global_batch: int) -> SmallestMemory:
    """Find the plan that needs the smallest fraction of a device's memory.

    Only plans that shard the whole state are tried.
    """
    options = (
        SmallestMemory(sum(memory(option).values()), usable_bytes(option), option)
        for option in _frugal(layout, global_batch)
    )
    return min(options, key=lambda option: option.needed / option.room)


def words(layout: Layout) -> str:
    """Return the degrees and the remat of a layout as plan text."""
    degrees = [f"{axis}={n}" for axis in DEGREES if (n := getattr(layout, axis)) > 1]
    remat = [] if layout.remat == "none" else [f"remat={layout.remat}"]
    return " ".join([*degrees, *remat]) or "dp=1"


def _frugal(layout: Layout, global_batch: int) -> Iterator[Layout]:
    """Yield layouts with all state sharded, all blocks recomputed, and one sample per microbatch."""
    machines, trace = layout.machines, layout.trace
    layers = max((count for _, count in trace.runs), default=1)
    cores = _powers(machines.per_host) if machines.device.is_core else [1]
    # a single rank on a host has all of its memory
    for idle in cores:
        devices = machines.devices // idle
        for tp in _powers(min(devices, _MOST_TP)):
            for pp in _powers(min(devices // tp, layers)):
                for cp in _powers(min(devices // tp // pp, trace.tokens, _MOST_CP)):
                    if _divides(trace, tp, cp):
                        yield _sharded(layout, tp, pp, cp, devices // (tp * pp * cp), global_batch)


def _sharded(layout: Layout, tp: int, pp: int, cp: int, left: int, global_batch: int) -> Layout:
    fsdp = max(n for n in range(1, min(left, global_batch) + 1) if global_batch % n == 0)
    blocks = len(layout.trace.blocks)
    return replace(
        layout,
        dp=1,
        fsdp=fsdp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=1,
        zero=3,
        samples=1.0,
        microbatches=global_batch // fsdp,
        schedule="1f1b",
        chunks=1,
        remat="block",
        sequence=tp > 1,
        cut=contiguous([1] * blocks, pp),
    )


def _divides(trace: ModelTrace, tp: int, cp: int) -> bool:
    """True if tp divides the heads and a weight, and cp the tokens."""
    if tp == 1:
        return trace.tokens % cp == 0
    gemms = [gemm for block, _ in trace.runs for gemm in block.gemms if gemm.divided != "none"]
    return (
        bool(gemms)
        and trace.tokens % cp == 0
        and all(gemm.batch % tp == 0 for gemm in gemms if gemm.divided == "batch")
    )


def _more_hosts(layout: Layout, global_batch: int) -> SmallestMemory:
    """Find the smallest number of hosts on which a plan fits, by bisection.

    If no number is sufficient, the result is for a very large number of hosts.
    """

    def on(hosts: int) -> SmallestMemory:
        return least(replace(layout, machines=resized(layout.machines, hosts)), global_batch)

    low = machine_count(layout.machines)
    high = 2 * low
    while not (found := on(high)).fits and high < _MOST_HOSTS:
        low, high = high, 2 * high
    while found.fits and high - low > 1:
        middle = (low + high) // 2
        fewer = on(middle)
        low, high, found = (low, middle, fewer) if fewer.fits else (middle, high, found)
    return found


def _larger_device(layout: Layout, global_batch: int) -> SmallestMemory:
    """Find the smallest kind of device on which a plan fits.

    If no device is sufficient, the result is for the largest device.
    """
    machines = layout.machines
    own, kind = machines.memory_bytes or machines.device.memory_bytes, machines.device.kind
    alike = [device for device in CATALOGUE.values() if device.kind == kind and not device.is_core]
    larger = [device for device in alike if device.memory_bytes > own]
    found = least(layout, global_batch)
    for device in sorted(larger, key=lambda device: device.memory_bytes):
        found = least(replace(layout, machines=on_other_devices(machines, device)), global_batch)
        if found.fits:
            break
    return found


def _on(found: SmallestMemory) -> str:
    return f"{shape(found.layout.machines)} with {words(found.layout)} ({size(found.needed)} of {size(found.room)})"


def _powers(most: int) -> list[int]:
    return [2**i for i in range(max(most, 1).bit_length())]


def _a(name: str) -> str:
    return f"an {name}" if name[0] in "AEFHILMNORSX" else f"a {name}"
