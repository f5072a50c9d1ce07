"""Result of a search: candidates, exclusions, and the gap to the optimum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from paceline.cluster.catalogue import CATALOGUE
from paceline.errors import PlanError
from paceline.partition import contiguous
from paceline.planning.cost.layout import Interval, Layout, Prediction
from paceline.planning.cost.memory import memory, usable_bytes
from paceline.planning.machines import Adjustment, equal_ratio, machine_count, on_other_devices, resized, shape
from paceline.planning.model.graph import ModelTrace
from paceline.planning.plan import DEGREES, Plan
from paceline.planning.search.space import Excluded, Space
from paceline.units import count, percent, size

# keys that add complexity if they differ from their default
_MOVING = ("fsdp", "tp", "pp", "cp", "ep", "remat", "offload", "sequence", "cut", "schedule")


@dataclass(frozen=True)
class Candidate:
    """A legal plan that fits, with its prediction.

    Attributes:
        plan: a plan that passes `plan_errors` on the job and the cluster.
        layout: the plan as numbers.
        prediction: prediction of one step.
        why: for the winner, the parts of its step; for the others, the parts that make them slower.
    """

    plan: Plan
    layout: Layout
    prediction: Prediction
    why: str = ""

    @property
    def interval(self) -> Interval:
        """Interval of its step time, by default that of the cost model alone."""
        found = self.prediction.interval
        return found or Adjustment().interval(self.layout, self.prediction.step_time_s)


def figures(found: Candidate | None) -> dict[str, Any]:
    """Return a plan and its predicted figures as plain JSON values. All figures are None without a plan."""
    if found is None:
        return dict.fromkeys(("plan", "step_time_s", "interval_80_s", "throughput", "memory_bytes", "mfu"))
    prediction = found.prediction
    return {
        "plan": str(found.plan),
        "step_time_s": prediction.step_time_s,
        "interval_80_s": [found.interval.low_s, found.interval.high_s],
        "throughput": prediction.throughput,
        "memory_bytes": prediction.memory_bytes,
        "mfu": prediction.mfu,
    }


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        best: the recommended plan (`preferred`), then the others, the fastest first. Each set of degrees appears with
            its best variant only.
        excluded: the reasons, the most plans first.
        considered: number of plans in the space: all combinations of degrees, microbatches and variants, legal or not.
        gap: relative time by which the best may miss the optimum, before measured runs correct the predictions. It is 0
            if all other plans were evaluated or excluded by bounds, 1 if nothing is known about the untried ones.
        seconds: duration of the search.
        evaluated: number of plans predicted in full.
        pruned: number of plans that a lower bound, or dominance, excluded without a prediction.
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
        """The plan with the shortest predicted step; the baseline of what-if predictions."""
        return min(self.best, key=lambda candidate: candidate.prediction.step_time_s)


def equals(best: Sequence[Candidate]) -> list[Candidate]:
    """Return the plans that predictions cannot distinguish from the fastest one.

    The criterion is that the interval of the ratio of the two times contains 1. Most of an error affects both times
    alike, so this interval is narrower than the interval of one time.
    """
    fastest = min(candidate.prediction.step_time_s for candidate in best)
    return [c for c in best if c.prediction.step_time_s <= equal_ratio() * fastest]


def preferred(best: Sequence[Candidate]) -> Candidate:
    """Choose the simplest of the plans that predictions cannot distinguish from the fastest.

    The fewest moving parts count first, then the fewest ranks, then the most free memory.
    """
    return min(equals(best), key=_complexity)


def _complexity(candidate: Candidate) -> tuple[float, ...]:
    prediction = candidate.prediction
    parts = moving_parts(candidate.plan)
    return parts, candidate.plan.ranks, prediction.memory_bytes, prediction.step_time_s


def moving_parts(plan: Plan) -> int:
    """Count the kinds of division, rematerialisation and offloading that a plan uses."""
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
    """Rejection counts of a search: by memory, and by the checks of a plan."""

    # bytes of a device
    capacity: float = 0.0
    out_of_memory: int = 0
    refused: dict[tuple[str, ...], tuple[str, int]] = field(default_factory=dict)

    @property
    def plans(self) -> int:
        """Number of all excluded plans."""
        return self.out_of_memory + sum(count for _, count in self.refused.values())

    def refuse(self, keys: tuple[str, ...], reason: str, plans: int = 1) -> None:
        """Count plans that a check refused."""
        text, count = self.refused.get(keys, (reason, 0))
        if count + plans:
            self.refused[keys] = text, count + plans

    def excluded(self, space: Space) -> tuple[Excluded, ...]:
        """Return the exclusions, most plans first.

        They are preceded by values of degrees that were never combined with others.
        """
        values = list(space.refused)
        if (batch := _uneven_batch(space)) is not None:
            values.append(batch)
        found = [Excluded(" ".join(keys[:3]), text, count) for keys, (text, count) in self.refused.items()]
        if self.out_of_memory:
            plans, room = f"{self.out_of_memory:,} plans", size(self.capacity)
            reason = f"does not fit: {plans} need more on a device that has {room} to give"
            found.append(Excluded("memory", reason, self.out_of_memory))
        return (*values, *sorted(found, key=lambda one: -one.plans))[:_MOST_REASONS]


def why_it_wins(winner: Candidate) -> str:
    """Return the parts of the winner's step, the largest first."""
    step = winner.prediction.step_time_s
    parts = sorted(winner.prediction.breakdown.items(), key=lambda part: -part[1])
    return ", ".join(
        f"{percent(seconds / step, 0)} {_WORDS.get(part, part)}"
        for part, seconds in parts
        if seconds >= 2 * _SMALL * step
    )


def why_it_loses(other: Candidate, winner: Candidate, measured: float = 1.0) -> str:
    """Return the parts in which a plan takes longer than the winner, with causes.

    Values are fractions of the winner's step.

    Args:
        measured: additional factor on its time, from measured runs similar to one of the two plans.
    """
    told = [f"+{percent(measured - 1, 0)} by measured runs that are like it"] if measured - 1 >= _SMALL else []
    step = winner.prediction.step_time_s
    more = {
        part: (s - winner.prediction.breakdown.get(part, 0.0)) / step for part, s in other.prediction.breakdown.items()
    }
    worst = sorted(((gain, part) for part, gain in more.items() if gain >= _SMALL), reverse=True)[:2]
    told += [f"+{percent(gain, 0)} {_WORDS.get(part, part)}{_cause(part, other, winner)}" for gain, part in worst]
    return "; ".join(told) or "as fast, as far as the model can tell"


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
        return f": tp={plan.tp} makes matrices narrower, or divides only a part of them"
    if samples < best_samples:
        return f": microbatches of {count(round(samples), 'sample')} instead of {best_samples:g}"
    return ": stages are less even" if plan.pp > 1 else ""


def nothing_fits(space: Space, rejections: RejectionCounts, layout: Layout) -> PlanError:
    """Return the error of a search that found no plan."""
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
    refused = [f"{one.what}: {one.reason}" for one in rejections.excluded(space)]
    return PlanError(
        "plan.none_found",
        "{job} cannot be trained on {cluster} under any plan.\n{reasons}",
        job=job.name,
        cluster=cluster.name,
        reasons="\n".join(refused),
    )


def _uneven_batch(space: Space) -> Excluded | None:
    """Return counts of data-parallel ranks that divide the batch unevenly: all wait for the fullest."""
    batch, most = space.job.global_batch, min(space.devices, space.job.global_batch)
    even = [n for n in range(1, most + 1) if batch % n == 0]
    if space.job.partition.weights is not None or len(even) == most:
        return None
    shown = ", ".join(map(str, even[:12])) + (", …" if len(even) > 12 else "")
    reason = (
        f"a global batch of {batch:,} deals evenly to {shown} data-parallel ranks; with others all wait for those "
        "with one sample more"
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
    """The plan that comes closest to fitting on given machines.

    Attributes:
        needed: bytes of its fullest rank.
        room: bytes of the rank's device.
    """

    needed: float
    room: float
    layout: Layout

    @property
    def fits(self) -> bool:
        """True if the plan fits."""
        return self.needed <= self.room


def smallest_that_works(layout: Layout, global_batch: int) -> str:
    """Describe why a model does not fit; "" if it does.

    It names the missing memory and the smallest sufficient cluster.

    Args:
        layout: layout of any plan of the job on the machines. Its trace, machines, precision and bytes of state are
            used, but not its degrees.
        global_batch: samples of a step; a plan cannot have more data-parallel ranks.
    """
    here = least(layout, global_batch)
    if here.fits:
        return ""
    machines = layout.machines
    has = "its part of the host's memory is" if machines.device.is_core else f"{_a(machines.device.name)} has"
    said = (
        f"At least {size(here.needed)} on each device, with {words(here.layout)}, and {has} {size(here.room)} to give: "
        f"{size(here.needed - here.room)} are missing."
    )
    more, larger = _more_hosts(layout, global_batch), _larger_device(layout, global_batch)
    enough = [_on(found) for found in (more, larger) if found.fits]
    if enough:
        return f"{said} It fits on {', or on '.join(enough)}."
    what, most = max(memory(more.layout).items(), key=lambda item: item[1])
    return (
        f"{said} More such hosts do not help: {what} alone would still take {size(most)}. Shorter samples or "
        "smaller layers would."
    )


def least(layout: Layout, global_batch: int) -> SmallestMemory:
    """Find the plan whose fullest rank needs the smallest share of its device.

    Only plans that shard everything are tried.
    """
    options = (
        SmallestMemory(sum(memory(option).values()), usable_bytes(option), option)
        for option in _frugal(layout, global_batch)
    )
    return min(options, key=lambda option: option.needed / option.room)


def words(layout: Layout) -> str:
    """Return the degrees of a layout in a plan's text form."""
    degrees = [f"{axis}={n}" for axis in DEGREES if (n := getattr(layout, axis)) > 1]
    remat = [] if layout.remat == "none" else [f"remat={layout.remat}"]
    return " ".join([*degrees, *remat]) or "dp=1"


def _frugal(layout: Layout, global_batch: int) -> Iterator[Layout]:
    """Yield plans with all state sharded, all blocks recomputed, and one sample per microbatch."""
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
    """True if tp divides the heads and at least one weight, and cp the tokens."""
    if tp == 1:
        return trace.tokens % cp == 0
    gemms = [gemm for block, _ in trace.runs for gemm in block.gemms if gemm.divided != "none"]
    return (
        bool(gemms)
        and trace.tokens % cp == 0
        and all(gemm.batch % tp == 0 for gemm in gemms if gemm.divided == "batch")
    )


def _more_hosts(layout: Layout, global_batch: int) -> SmallestMemory:
    """Fit on the fewest sufficient hosts, found by bisection, or on a very large number."""

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
    """Fit on the same number of devices of the smallest sufficient or the largest kind."""
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
