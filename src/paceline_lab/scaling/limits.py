"""Sentences on what limits the scaling, from measured numbers.

A plan or a batch is recommended only if the interval of its measured gain excludes zero.
"""

from __future__ import annotations

from statistics import fmean

from paceline.report.parts import excess_of, where_it_goes
from paceline.stats import LEAST_REPEATS, Interval, differ, median_interval
from paceline.units import digits, percent
from paceline_lab.scaling.result import AUTO, MeasuredSetting


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
