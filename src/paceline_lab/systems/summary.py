"""Figures of a comparison from its finished runs, and what they say in words."""

from __future__ import annotations

import ast
import difflib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from torch.nn.modules.dropout import _DropoutNd

from paceline.cluster.cluster import Cluster
from paceline.cluster.discover import environment
from paceline.device import DEVICE_VARIABLE
from paceline.errors import RunError
from paceline.job.job import EvaluateSpec, Job
from paceline.job.stop import StopSpec
from paceline.stats import Interval, differ, median_interval
from paceline.sync.batchnorm import has_batch_norm
from paceline.units import count, ratio, seconds, size
from paceline_lab.systems import plain
from paceline_lab.systems.compared import AGREE, ComparedWay, Comparison, TakenRun, difference, ratio_of

if TYPE_CHECKING:
    from paceline_lab.systems.compare import Compare, Way


OURS, PLAIN = "paceline", "plain"
_POINTS = 40  # of a curve, each the mean of a few steps


def summary(compare: Compare) -> Comparison:
    """The result of the runs that were made."""
    base = compare.runs.get(PLAIN, [])
    ways = [_figures(compare, way, base) for way in compare.ways if compare.runs[way.key]]
    apart = {OURS} if compare.hosts == 1 else {OURS, PLAIN}  # one process needs no other host
    alike = [way for way in ways if way.way == OURS or way.ratio is not None]  # the same batch
    rivals = [way for way in alike if way.system not in apart and way.same and way.exact]
    best = min(rivals, key=lambda way: way.step_s.middle, default=None)
    return Comparison(
        job=compare.job.name,
        command=compare.command,
        cluster=compare.cluster.describe(),
        created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        ranks=compare.ranks,
        hosts=compare.hosts,
        steps=compare.steps,
        repeats=max(map(len, compare.runs.values())),  # fewer than asked for where it was stopped
        global_batch=compare.job.global_batch,
        target=compare.target,
        plan=str(compare.plan),
        ways=ways,
        best_other=best.way if best else None,
        left_out=compare.left_out,
        remarks=list(_remarks(alike, best, compare.repeat)),
        notes=[*_notes(compare, ways), *_limits(compare, ways)],
        environment=environment(),
        scaling=compare.scaling,
    )


def _figures(compare: Compare, way: Way, base: Sequence[TakenRun]) -> ComparedWay:
    runs, system = compare.runs[way.key], way.system
    step = median_interval([run.step_s for run in runs])
    batch = way.global_batch or compare.job.global_batch
    faster = ratio_of(base, runs)
    speedup = faster.times(batch / compare.base_batch) if faster else None
    reached = [run.to_target_s for run in runs if run.to_target_s is not None]
    wire = [run.wire_bytes for run in runs if run.wire_bytes is not None]
    proof = compare.proofs.get(way.key, Proof(float("inf")))
    ours = compare.runs[OURS]
    return ComparedWay(
        way=way.key,
        system=system.name,
        title=system.title,
        label=way.label,
        lines=changed_lines(system.script),
        documentation=system.documentation,
        difference=proof.apart,
        same=proof.same,
        exact=way.exact,
        step_s=step,
        speedup=speedup,
        efficiency=speedup.times(1 / compare.ranks) if speedup and system.name != PLAIN else None,
        samples_per_s=_inverse(step, batch),
        first_step_s=median_interval([run.first_step_s for run in runs]),
        memory_bytes=median(run.memory_bytes for run in runs),
        wire_bytes=median(wire) if wire else None,
        to_target_s=median_interval(reached) if len(reached) == len(runs) else None,
        ratio=ratio_of(runs, ours) if way.key != OURS and way.global_batch is None else None,
        recovery=_recovery(compare, way.key),
        seconds=_means(runs[0].ended_s),
        losses=_means(runs[0].losses),
    )


def _means(values: Sequence[float]) -> list[float]:
    """Means of neighbouring values, so many that they can be drawn."""
    each = -(-len(values) // _POINTS)
    return [fmean(values[i : i + each]) for i in range(0, len(values), each)]


def _recovery(compare: Compare, way: str) -> str:
    if way not in compare.pauses:
        return ""
    pause_s = compare.pauses[way]
    return "the training ends" if pause_s is None else f"goes on after {pause_s:.2g} s"


def _inverse(step: Interval, samples: int) -> Interval:
    return Interval(samples / step.high, samples / step.middle, samples / step.low)


def _remarks(ways: list[ComparedWay], best: ComparedWay | None, repeats: int) -> Iterator[str]:
    """Sentences on what each is best at, ours not spared."""
    ours = next((way for way in ways if way.way == OURS), None)
    if ours is None or best is None or best.ratio is None:
        return
    name = f"{best.title} ({best.label})"
    if not differ(best.step_s, ours.step_s, repeats=repeats) and best.ratio.low <= 1 <= best.ratio.high:
        yield f"No difference: steps of the fastest other system, {name}, take {ratio(best.ratio)} as long as ours."
    elif best.ratio.middle >= 1:
        yield f"paceline takes the shortest steps; the fastest other system, {name}, takes {ratio(best.ratio)} as long."
    else:
        slower = 1 / best.ratio.middle
        yield f"{name} takes the shortest steps: paceline takes {slower:.2f} × as long, which is ours to mend."
    alone = next((way for way in ways if way.system == PLAIN and way.way not in (best.way, ours.way)), None)
    if alone is not None and alone.step_s.high < min(ours.step_s.low, best.step_s.low):
        yield f"One process alone takes shorter steps than all that use several ranks: {seconds(alone.step_s.middle)}."
    same = [way for way in ways if way.same]
    first = min(same, key=lambda way: way.first_step_s.middle)
    yield f"The first step comes soonest with {first.title}: after {first.first_step_s.middle:.1f} s."
    several = [way for way in same if way.system != PLAIN] or same
    least = min(several, key=lambda way: way.memory_bytes)
    yield f"Least memory of those with several ranks: {least.title} ({least.label}), {size(least.memory_bytes)} in all."
    if counted := [way for way in several if way.wire_bytes]:
        fewest = min(counted, key=lambda way: way.wire_bytes or 0.0)
        sent = size(fewest.wire_bytes or 0)
        yield f"Fewest bytes on the busiest link: {fewest.title} ({fewest.label}), {sent} a step."
    lasting = [way for way in ways if way.recovery.startswith("goes on")]
    if any(way.recovery for way in ways):
        names = ", ".join(dict.fromkeys(way.title for way in lasting)) or "none"
        yield f"When a rank is killed, {names} went on; the others that were tried ended."
    scripts = [way for way in several if way.lines is not None]
    if scripts:
        short = min(scripts, key=lambda way: way.lines or 0)
        yield f"Fewest lines changed in a plain script: {short.title}, {count(short.lines or 0, 'line')}."


def _notes(compare: Compare, ways: list[ComparedWay]) -> Iterator[str]:
    for way in ways:
        proof = compare.proofs.get(way.way)
        if proof is not None and proof.is_open and way.exact:
            yield (
                f"Whether {way.title} ({way.label}) computes the same cannot be told: rounding alone moves this job's "
                "losses from the first update on. Its times are shown, and no ratio counts them."
            )
        elif not way.same and way.exact:
            yield (
                f"{way.title} ({way.label}) computes something else: its losses differ from those of one process by up "
                f"to {way.difference:.1%}. Its times are shown, and are no measure of the same work."
            )


def _limits(compare: Compare, ways: list[ComparedWay]) -> Iterator[str]:
    """Limits of the comparison of losses."""
    taken = {way.way for way in ways}
    titles = {way.key: way.title for way in compare.ways if way.key in taken}
    by_steps: dict[int, list[str]] = {}
    for key, proof in compare.proofs.items():
        if key in taken and proof.same and proof.steps:
            by_steps.setdefault(proof.steps, []).append(titles[key])
    for steps, those in sorted(by_steps.items()):
        yield (
            f"Rounding alone moves this job's losses, so those of {count(steps, 'step')} were compared of "
            f"{'; '.join(those)}."
        )
    if not normalises_apart(compare.job):
        return
    by_size: dict[int, list[str]] = {}
    for way in compare.ways:
        if way.key in taken:
            batch = way.global_batch or compare.job.global_batch
            name = way.title if way.system.name == OURS else way.system.title
            by_size.setdefault(batch // compare.parts(way), []).append(name)
    if len(by_size) > 1:
        by_name = (
            f"Over {count(n, 'sample')}: {'; '.join(dict.fromkeys(those))}" for n, those in sorted(by_size.items())
        )
        names = ". ".join(by_name)
        yield f"Batch norms see a rank's samples alone; losses are compared with a process that does alike. {names}."


# of `AGREE`: up to there a step is compared, for rounding of another size may move it further
_SURE = 0.1


@dataclass(frozen=True)
class Reference:
    """One process that a way to train is compared with.

    Attributes:
        batch: samples of a step; None: the comparison's.
        parts: in which a batch is computed, as by replicas that normalise each its own part.
        disturbed: whether its first weights are a rounding apart, which tells what rounding does to the losses.
    """

    batch: int | None = None
    parts: int = 1
    disturbed: bool = False


@dataclass(frozen=True)
class Proof:
    """Largest relative difference of a way's first losses from those of one process.

    Attributes:
        steps: that were compared; None: all that both took. Later ones are moved by rounding alone. After one step
            no gradient is compared, so it proves nothing.
    """

    apart: float
    steps: int | None = None

    @property
    def same(self) -> bool:
        """True if the way computes what one process computes."""
        return self.apart <= AGREE and not self.is_open

    @property
    def is_open(self) -> bool:
        """True if rounding moves the losses so early that nothing can be told."""
        return self.steps is not None and self.steps < 2

    def __str__(self) -> str:
        if self.is_open:
            return (
                f"losses that differ by up to {self.apart:.1%}, as they may by rounding alone: what it computes is open"
            )
        if not self.same:
            return f"OTHER losses, by up to {self.apart:.1%}"
        if self.steps is None:
            return f"the same losses (to {self.apart:.0e})"
        return (
            f"the same losses (to {self.apart:.0e}) in the first {self.steps} steps; later ones are moved by rounding "
            "alone"
        )


class References:
    """Courses of losses of one process, each taken when it is first asked for.

    Args:
        take: trains as a reference says, and returns its losses.
    """

    def __init__(self, take: Callable[[Reference], list[float]]) -> None:
        self._take = take
        self._taken: dict[Reference, list[float]] = {}

    def prove(self, losses: list[float], batch: int | None, parts: int) -> Proof:
        """Compare losses with those of one process, as far as rounding lets them be compared."""
        wanted = self._losses(Reference(batch, parts))
        apart = difference(losses, wanted)
        if apart <= AGREE:
            return Proof(apart)
        moved = self._losses(Reference(batch, parts, disturbed=True))
        pairs = zip(wanted, moved, strict=True)
        sure = next((n for n, pair in enumerate(pairs) if difference(pair[:1], pair[1:]) > _SURE * AGREE), len(wanted))
        if sure == len(wanted):
            return Proof(apart)
        compared = difference(losses[:sure], wanted[:sure])
        return Proof(apart, sure) if sure < 2 and compared <= AGREE else Proof(compared, sure if sure > 1 else None)

    def _losses(self, reference: Reference) -> list[float]:
        if reference not in self._taken:
            self._taken[reference] = self._take(reference)
        return self._taken[reference]


def changed_lines(script: Path | None) -> int | None:
    """Lines of a script's functions that the plain one has not; None without a script."""
    if script is None:
        return None
    before, after = _code(Path(plain.__file__)), _code(script)
    same = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return sum(end - begin for kind, _, _, begin, end in same.get_opcodes() if kind in ("insert", "replace"))


def _code(script: Path) -> list[str]:
    """Lines of a file's functions, without blank lines and docstrings."""
    found = []
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner) is not None:
                    inner.body = inner.body[1:]
            found += ast.unparse(node).splitlines()
    return found


def as_compared(job: Job, steps: int, ranks: int) -> Job:
    """The job of so many steps, each of a whole batch that is dealt evenly.

    Raises:
        RunError: systems would not do the same work; says what to change.
    """
    if job.global_batch % ranks:
        raise RunError(
            f"global_batch {job.global_batch} cannot be dealt evenly to {count(ranks, 'rank')}, as the other systems "
            f"need it: let it be {job.global_batch // ranks * ranks or ranks}"
        )
    if job.precision != "fp32":
        raise RunError(f"systems are compared in fp32, and the job says precision: {job.precision}: leave it out")
    stop = {"stop": StopSpec(steps=steps), "evaluate": EvaluateSpec(every_steps=steps), "drop_last": True}
    return job.model_copy(update={**stop, "trackers": ()})


def grown(job: Job, ranks: int) -> Job:
    """The job with its batch for each rank, as weak scaling has it.

    Raises:
        RunError: there is one rank, the data is too short, or the work would grow by another factor.
    """
    if ranks == 1:
        raise RunError("weak scaling compares several ranks with one, and there is one rank here: leave --weak out")
    if job.loss.is_over_whole_batch:
        raise RunError(
            f"the loss {job.loss.name} compares all samples of a batch with each other, so {ranks} times the batch is "
            "more than as many times the work: leave --weak out"
        )
    batch = ranks * job.global_batch
    train: Any = job.data.build(input_shape=job.model.input_shape(), seed=job.seed).train
    samples = len(train)
    if samples < batch:
        raise RunError(
            f"with --weak each of {count(ranks, 'rank')} has a batch of {job.global_batch}, {batch} in all, and the "
            f"training set has {samples} samples: give more data, or a smaller global_batch"
        )
    return job.model_copy(update={"global_batch": batch})


def must_draw_nothing(job: Job) -> None:
    """Refuse dropout, of which every system draws its own.

    Raises:
        RunError: the model has some; names the first.
    """
    for name, module in job.model.build().named_modules():
        if isinstance(module, _DropoutNd) and module.p > 0:
            raise RunError(
                f'"{name}" of the model drops out with p={module.p:g}, and every system draws on its own, so their '
                "losses cannot be compared: set it to 0 in model.args"
            )


def must_be_cpus_of_this_machine(cluster: Cluster) -> None:
    """Refuse machines on which paceline would train elsewhere than the others do.

    Raises:
        RunError: they have accelerators, or are other hosts.
    """
    if cluster.has_accelerators:
        raise RunError(
            f"systems are compared on CPUs, and {cluster.describe()}: set {DEVICE_VARIABLE}=cpu to compare them there"
        )
    if len(cluster.hosts) > 1 and cluster.emulate is None:
        raise RunError("systems are compared on this machine, or on hosts that it emulates (--cluster): no other hosts")


def normalises_apart(job: Job) -> bool:
    """True if replicas normalise each its own part of a batch."""
    return job.batch_norm == "local" and has_batch_norm(job.model.build())
