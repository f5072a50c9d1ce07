"""Limits of scaling in two or three sentences from the numbers, or none."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from paceline.benchmark.result import MeasuredSetting
from paceline.benchmark.words import listed
from paceline.stats import LEAST_REPEATS
from paceline.units import percent

NAMES = {
    "data": "waiting for data",
    "compute": "compute that became slower",
    "bubble": "waiting in the pipeline",
    "comm": "exposed communication",
    "imbalance": "waiting for the slowest rank",
    "optimizer": "the optimizer",
    "checkpoint": "checkpoints",
}
_WORTH_NAMING = 0.05  # of what is lost


def limits_of(settings: list[MeasuredSetting]) -> list[str]:
    """The sentences about the largest number of devices at the same global batch."""
    one = next((s for s in settings if s.devices == 1), None)
    strong = [s for s in settings if s.scaling == "strong" and s.devices > 1]
    many = max(strong, key=lambda s: (s.devices, s.throughput.middle), default=None)
    if one is None or many is None or many.speedup is None or many.efficiency is None:
        return ["One device and several are needed to say how the job scales."]
    if min(len(one.runs), len(many.runs)) < LEAST_REPEATS:
        return [
            (
                f"Fewer than {LEAST_REPEATS} repeats tell no difference from chance: nothing is claimed here. "
                "--repeat 5 is the default."
            )
        ]
    weak = next((s for s in settings if s.scaling == "weak" and s.devices == many.devices), None)
    sentences = [_headline(many)]
    if many.efficiency.high >= 1:
        enough = "Within the interval that is the ideal: nothing that could be measured is lost."
        return [
            *sentences,
            enough
            if many.is_speedup
            else "The intervals are too wide to say what limits it: more repeats would tell, or less other load.",
        ]
    if one.ranks and many.ranks:
        sentences += _where_it_goes(one, many, weak)
    return sentences


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


def _where_it_goes(one: MeasuredSetting, many: MeasuredSetting, weak: MeasuredSetting | None) -> list[str]:
    """Sentences on the step's time beyond the ideal by part, and on the largest part."""
    lost = where_it_goes(_parts(one), _parts(many), many.devices)
    if lost is None:
        return []
    sentence, largest = lost
    return [sentence, _advice(largest, one, many, weak)]


def where_it_goes(one: Mapping[str, float], many: Mapping[str, float], devices: int) -> tuple[str, str] | None:
    """Sentence on the step's time beyond the ideal, and the largest part of it.

    None if nothing is lost.


    Args:
        one, many: seconds of each part of a step, on one device and on several.
    """
    lost_s = excess_of(one, many, devices)
    total_s = sum(lost_s.values())
    gross_s = {part: lost for part, lost in lost_s.items() if lost > 0}
    if total_s <= 0 or not gross_s:
        return None
    whole_s = sum(gross_s.values())
    largest = sorted(gross_s, key=lambda part: -gross_s[part])
    shares = {part: gross_s[part] / whole_s for part in largest}
    named = [f"{percent(share, 0)} {NAMES[part]}" for part, share in shares.items() if share > _WORTH_NAMING]
    step_ms, ideal_ms = sum(many.values()) * 1e3, sum(one.values()) * 1e3 / devices
    where = f"A step takes {step_ms:.3g} ms where 1/{devices} of one device's is {ideal_ms:.3g} ms; of what is lost, "
    return f"{where}{listed(named)}.", largest[0]


def excess_s(one: MeasuredSetting, many: MeasuredSetting) -> dict[str, float]:
    """Seconds of each part on N devices beyond 1/N of one device's.

    In the mean over the ranks.
    """
    return excess_of(_parts(one), _parts(many), many.devices)


def excess_of(one: Mapping[str, float], many: Mapping[str, float], devices: int) -> dict[str, float]:
    """Seconds of each part on several devices beyond its fraction of one device's."""
    return {part: many[part] - one[part] / devices for part in many}


def _parts(setting: MeasuredSetting) -> dict[str, float]:
    return {part: fmean(rank.parts_s[part] for rank in setting.ranks) for part in setting.ranks[0].parts_s}


def _advice(part: str, one: MeasuredSetting, many: MeasuredSetting, weak: MeasuredSetting | None) -> str:
    kept = ""
    if weak is not None and weak.efficiency is not None:
        kept = f" With the same batch per device (weak scaling) {percent(weak.efficiency.middle)} of the ideal remains."
    match part:
        case "compute":
            return _advice_on_compute(one, many, weak)
        case "bubble":
            return (
                "The stages wait for each other: more microbatches, or another schedule (interleaved, "
                "zero-bubble, dualpipe), fill the pipeline."
            )
        case "comm":
            return f"A larger global batch computes more between two exchanges.{kept}"
        case "imbalance":
            return (
                "The ranks do not finish together: look at the breakdown per rank, other load on the machine and "
                "uneven samples."
            )
        case "data":
            return (
                "Samples are read more slowly than they are trained on: raise data.num_workers in the job, or make "
                "them cheaper to read."
            )
        case "optimizer":
            return (
                "Every replica updates all weights, which does not shrink with dp; a larger global batch makes it "
                f"weigh less.{kept}"
            )
        case _:
            return (
                "Checkpoints are written as often by many devices as by one: raise checkpoint.every_seconds or "
                "every_steps in the job."
            )


def _advice_on_compute(one: MeasuredSetting, many: MeasuredSetting, weak: MeasuredSetting | None) -> str:
    """Advice on slow compute: the share is too small, or devices slow each other.

    Weak scaling tells them apart, as it has the share of one device.
    """
    if weak is None or not weak.ranks:
        return (
            "Either a device's share of the batch is too small, or the devices slow each other; weak scaling "
            "(--weak) tells which."
        )
    ratio = _parts(weak)["compute"] / _parts(one)["compute"]
    shrink = _parts(many)["compute"] / (_parts(one)["compute"] / many.devices)
    if ratio - 1 > (shrink - 1) / 2:
        return (
            f"With the same batch per device compute is still {ratio:.2f}× that of one device: the devices share "
            "caches, memory bandwidth or clock rate, which no larger batch mends."
        )
    return (
        f"With the same batch per device compute is {ratio:.2f}× that of one device, so it is the small share of the "
        "batch that is computed less efficiently: a larger global batch helps."
    )
