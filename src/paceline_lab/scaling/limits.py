"""Sentences on what limits the scaling, from measured numbers.

A plan or a batch is recommended only if the interval of its measured gain excludes zero.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from paceline.job.job import Job
from paceline.report.run_record import excess_of, where_it_goes
from paceline.stats import LEAST_REPEATS, Interval, differ, median_interval
from paceline.units import count, digits, percent
from paceline_lab.scaling.result import AUTO, MeasuredSetting
from paceline_lab.scaling.settings import ONE, Setting
from paceline_lab.scaling.summary import WARN_CORES, FinishedRun, stolen_share


def limits_of(settings: list[MeasuredSetting], auto: str = "") -> list[str]:
    """Describe the fixed layout, the plan of `auto`, and a larger batch.

    Args:
        auto: the plan that `auto` chose, as written in its setting.
    """
    one = next((s for s in settings if s.devices == 1), None)
    strong = [s for s in settings if s.scaling == "strong" and s.devices > 1]
    many = max(strong, key=lambda s: (s.fixed, s.devices, s.throughput.middle), default=None)
    if one is None or many is None or many.speedup is None or many.efficiency is None:
        return ["One device and several are needed to say how the job scales."]
    if min(len(one.runs), len(many.runs)) < LEAST_REPEATS:
        return [
            (
                f"Fewer than {LEAST_REPEATS} repeats tell no difference from chance: nothing is claimed here. "
                "--repeat 5 is the default."
            )
        ]
    chosen = next((s for s in settings if s.plan == auto and s.scaling == "strong"), None)
    weak = next((s for s in settings if s.scaling == "weak" and s.devices == many.devices), None)
    return [*_limits(one, many), *_about_auto(chosen, many), *_about_larger_batch(many, weak)]


def _limits(one: MeasuredSetting, many: MeasuredSetting) -> list[str]:
    assert many.efficiency is not None
    headline = _headline(many)
    if many.efficiency.high >= 1:
        enough = "Within the interval that is the ideal: nothing that could be measured is lost."
        unclear = "The intervals are too wide to say what limits it. Use more repeats, or reduce other load."
        return [headline, enough if many.is_speedup else unclear]
    lost = where_it_goes(_parts(one), _parts(many), many.devices) if one.ranks and many.ranks else None
    return [headline, lost] if lost else [headline]


def _about_auto(chosen: MeasuredSetting | None, many: MeasuredSetting) -> list[str]:
    """Compare the plan that `auto` chose with the fixed layout."""
    if chosen is None:
        return []
    if chosen is many:
        return [f"This is the plan that auto chose: {chosen.plan}."]
    times = [s.training_time_s or s.step_time_s for s in (chosen, many)]
    repeats = min(len(chosen.runs), len(many.runs))
    ratio = times[1].middle / times[0].middle
    verdict = (
        "not measurably different from"
        if not differ(*times, repeats=repeats)
        else f"faster than ({digits(ratio)} ×)"
        if ratio > 1
        else f"slower than ({digits(ratio)} ×)"
    )
    plan = chosen.plan if chosen.fixed else chosen.label.removeprefix(AUTO)
    return [f"The plan that auto chose, {plan}, is {verdict} {_name(many)} with {many.plan}."]


def _about_larger_batch(many: MeasuredSetting, weak: MeasuredSetting | None) -> list[str]:
    """Recommend a larger batch if the interval of its gain excludes zero."""
    gain = None if weak is None else _gain(many, weak)
    if weak is None or gain is None or gain.low <= 1 or many.throughput.overlaps(weak.throughput):
        return []
    low, middle, high = (percent(value - 1) for value in (gain.low, gain.middle, gain.high))
    return [
        f"A larger global batch gives more samples per second: {weak.global_batch} instead of {many.global_batch} "
        f"samples give {middle} more (95 % interval {low} to {high}). It is another training: compare the losses."
    ]


def _gain(many: MeasuredSetting, weak: MeasuredSetting) -> Interval | None:
    """Compute the ratio of throughputs in the same rounds; None if there are too few."""
    samples = [s.throughput.middle * s.step_time_s.middle for s in (many, weak)]
    pairs = [
        (strong_s / samples[0]) / (weak_s / samples[1])
        for strong_s, weak_s in zip(many.rounds_s, weak.rounds_s, strict=False)
        if strong_s is not None and weak_s is not None
    ]
    return median_interval(pairs) if len(pairs) >= LEAST_REPEATS else None


def _headline(many: MeasuredSetting) -> str:
    assert many.speedup is not None
    assert many.efficiency is not None
    interval = f"95 % interval {many.speedup.low:.2f} to {many.speedup.high:.2f}"
    if not many.is_speedup:
        return (
            f"No difference can be claimed between one device and {_name(many)}: the intervals of their times "
            f"overlap ({interval})."
        )
    if many.speedup.middle < 1:
        return f"{_name(many)} are slower than one: {many.speedup.middle:.2f}× its speed ({interval})."
    share = percent(many.efficiency.middle)
    return (
        f"{_name(many)} are {many.speedup.middle:.2f}× as fast as one ({interval}): {share} of the ideal "
        f"{many.devices}×."
    )


def _name(setting: MeasuredSetting) -> str:
    same = setting.label == f"{setting.devices} devices"
    return setting.label if same else f"{setting.devices} devices ({setting.label})"


def excess_s(one: MeasuredSetting, many: MeasuredSetting) -> dict[str, float]:
    """Seconds of each part on N devices beyond 1/N of one device's.

    In the mean over the ranks.
    """
    return excess_of(_parts(one), _parts(many), many.devices)


def _parts(setting: MeasuredSetting) -> dict[str, float]:
    return {part: fmean(rank.parts_s[part] for rank in setting.ranks) for part in setting.ranks[0].parts_s}


_LAST = 10  # steps whose mean loss is compared
_SAME = {"fp64": 1e-8, "fp32": 1e-3, "bf16": 2e-2}  # how far rounding alone drives losses apart within the first steps


def caveats(
    job: Job, settings: Sequence[Setting], runs: Mapping[str, Sequence[FinishedRun]], *, repeat: int, cores: int
) -> list[str]:
    """Everything that a reader should know before believing the figures. `runs`: those of each setting that has any."""
    found = [s for s in settings if runs.get(s.key)]
    return [
        *_unfinished(settings, runs, repeat),
        *_other_load(found, runs, cores),
        *_losses(job, found, runs),
        *_targets(found, runs),
        *_small_data(found, runs),
    ]


def _unfinished(settings: Sequence[Setting], runs: Mapping[str, Sequence[FinishedRun]], repeat: int) -> Iterator[str]:
    done, due = sum(len(r) for r in runs.values()), repeat * len(settings)
    if done < due:
        yield f"{done} of {due} runs were measured."
    if repeat < LEAST_REPEATS:
        yield f"With {count(repeat, 'repeat')} there is no interval to speak of, so no difference is claimed."


def _other_load(settings: Sequence[Setting], runs: Mapping[str, Sequence[FinishedRun]], cores: int) -> Iterator[str]:
    loads = {s.key: [run.other_cores for run in runs[s.key] if run.other_cores is not None] for s in settings}
    known = [load for each in loads.values() for load in each]
    if not known:
        yield "Other load on the machine is not known: the system does not tell how busy the cores are."
        return
    if max(known) < WARN_CORES:
        return
    stolen = {
        s.title: stolen_share(statistics.median(loads[s.key]), devices=s.devices, cores=cores)
        for s in settings
        if loads[s.key]
    }
    widened = [f"{title} by {percent(share)}" for title, share in stolen.items() if share]
    text = (
        f"Other processes kept {statistics.median(known):.2f} cores busy in the median over the runs, and "
        f"{max(known):.2f} at most."
    )
    if widened:
        text += (
            " They may have slowed the ranks, so the intervals reach further towards shorter times: "
            f"{', '.join(widened)}."
        )
    yield text


def _losses(job: Job, settings: Sequence[Setting], runs: Mapping[str, Sequence[FinishedRun]]) -> Iterator[str]:
    """Caveats where plans' losses differ.

    Plans of one job do the same work, so their losses agree; else the times compare different work.
    """
    strong = [s for s in settings if s.scaling == "strong"]
    first = next((runs[s.key][0] for s in strong if s.key == ONE), runs[strong[0].key][0] if strong else None)
    if first is None:
        return
    differing: dict[str, tuple[float, int]] = {}
    for setting in strong:
        for run in runs[setting.key]:
            steps, apart = _apart(first.losses, run.losses)
            if apart > _SAME[setting.plan.precision_for(job)] and apart > differing.get(setting.label, (0.0, 0))[0]:
                differing[setting.label] = (apart, steps)
    if not differing:
        return
    named = ", ".join(
        f"{label} by {percent(apart, 2)} after {steps} steps" for label, (apart, steps) in differing.items()
    )
    yield (
        f"The losses are not those of the first run of one device ({named}), so the runs do not do quite the same "
        "work: layers that look at a replica's share only (dropout, batch_norm: local), other precisions, and sync "
        "rules that compress or agree only now and then do that."
    )


def _apart(one: Sequence[float | None], other: Sequence[float | None]) -> tuple[int, float]:
    """The last step compared of two losses, and their relative difference before it.

    The difference is that of the means over the last steps.
    """
    steps = min(len(one), len(other))
    pairs = [(a, b) for a, b in zip(one[:steps], other[:steps], strict=True) if a is not None and b is not None][
        -_LAST:
    ]
    if not pairs:
        return steps, 0.0
    a, b = (statistics.fmean(column) for column in zip(*pairs, strict=True))
    return steps, abs(a - b) / max(abs(a), abs(b), 1e-12)


def _targets(settings: Sequence[Setting], runs: Mapping[str, Sequence[FinishedRun]]) -> Iterator[str]:
    to_target = [s for s in settings if s.steps is None]
    for setting in to_target:
        missed = [run for run in runs[setting.key] if not run.reached]
        if missed:
            yield (
                f"{len(missed)} of {len(runs[setting.key])} runs of {setting.label} did not reach the target "
                f"({missed[0].reason})."
            )
    needed = {s.label: sorted({run.steps for run in runs[s.key]}) for s in to_target}
    if len({steps for each in needed.values() for steps in each}) > 1:
        named = ", ".join(f"{label} {_span(steps)}" for label, steps in needed.items())
        yield (
            f"The runs needed different numbers of steps ({named}): training times compare that, too; step times "
            "compare speed alone."
        )


def _span(steps: list[int]) -> str:
    return f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


def _small_data(settings: Sequence[Setting], runs: Mapping[str, Sequence[FinishedRun]]) -> Iterator[str]:
    for setting in settings:
        samples = min(run.samples for run in runs[setting.key])
        if samples < setting.global_batch:
            yield (
                f"{setting.title}: most steps had {samples:g} samples, not {setting.global_batch}, for the training "
                "set is small; throughput counts those there were."
            )
