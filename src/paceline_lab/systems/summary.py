"""Figures of a comparison from its finished runs, and what they say in words."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING

from paceline.cluster.discover import environment
from paceline.stats import Interval, differ, median_interval
from paceline.units import count, ratio, seconds, size
from paceline_lab.systems.comparable import normalises_apart
from paceline_lab.systems.compared import ComparedWay, Comparison, TakenRun, ratio_of
from paceline_lab.systems.lines import changed_lines
from paceline_lab.systems.proof import Proof

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
