"""Sentences on a simulated curve: how far it pays, its limits, changes of plan."""

from __future__ import annotations

from itertools import pairwise

from paceline.planning.cost.layout import PART_NAMES
from paceline.planning.plan import Plan
from paceline.report.words import listed
from paceline.units import count, digits, percent
from paceline_lab.simulated.curve import Point, SimulatedCurve

PAYS = 0.5  # efficiency below which more devices are said not to pay
_WORTH_NAMING = 0.02  # of a step
_LOST = 0.02  # of the ideal: less is nothing
_FAR_OFF = 0.02  # of the goodput, what checkpoints at another interval have to gain to be told
_KIND = ("tp", "pp", "cp", "ep", "remat", "offload", "sequence", "schedule")  # keys whose change is told


def limit_of(point: Point, base: Point) -> str:
    """Parts of a step beyond the ideal in words, the largest first.

    "" for the base itself. Where a plan leaves devices unused, that and why.
    """
    if point.candidate is None or base.candidate is None or point is base:
        return ""
    if point.used < point.devices:
        return f"only {_used(point)}: with more a step takes longer, as {_largest_part(point)} does not shrink"
    excess = excess_shares(point, base)
    named = [f"{PART_NAMES[part]} +{percent(share)}" for part, share in excess if share > _WORTH_NAMING]
    return " · ".join(named[:3]) or "no part is, by the cost model"


def limits(curve: SimulatedCurve) -> list[tuple[str, str]]:
    """Numbers of devices with their `limit_of`; neighbours with the same words stand together."""
    grouped: list[tuple[list[Point], str]] = []
    for point in curve.fitting[1:]:
        words = limit_of(point, curve.base)
        if grouped and grouped[-1][1] == words:
            grouped[-1][0].append(point)
        else:
            grouped.append(([point], words))
    return [
        (f"{points[0].devices:,}" + (f" to {points[-1].devices:,}" if len(points) > 1 else ""), words)
        for points, words in grouped
    ]


def excess_shares(point: Point, base: Point) -> list[tuple[str, float]]:
    """Parts of a step beyond the ideal, relative to the step, the largest first.

    The ideal is the base's part for as many samples per device.
    """
    assert point.candidate is not None
    assert base.candidate is not None
    now, before = point.candidate.prediction, base.candidate.prediction
    work = (point.global_batch / point.devices) / (base.global_batch / base.devices)
    shares = {part: (s - work * before.breakdown[part]) / now.step_time_s for part, s in now.breakdown.items()}
    return sorted(shares.items(), key=lambda one: -one[1])


def sentences(curve: SimulatedCurve) -> list[str]:
    """Sentences on a curve, in the order of what a reader asks."""
    return [*_fits_from(curve), _headline(curve), *_pays(curve), *_limits(curve), *_changes(curve), *_failures(curve)]


def _fits_from(curve: SimulatedCurve) -> list[str]:
    too_few = [point for point in curve.points if point.devices < curve.base.devices]
    if not too_few:
        return []
    fits = f"It fits from {count(curve.base.devices, 'device')} on, which speedups are against."
    # the weak curve's reason is the same
    return (
        [f"{fits} {'. '.join(too_few[-1].why.split('. ')[:2]).rstrip('.')}."] if curve.scaling == "strong" else [fits]
    )


def _headline(curve: SimulatedCurve) -> str:
    last, base = curve.last, curve.base
    if last is base:
        return f"It is predicted on {count(base.devices, 'device')} alone, so there is no curve."
    if last.used == base.used and curve.scaling == "strong":
        return f"More than {count(base.devices, 'device')} make it no faster, up to {last.devices:,}."
    assert last.speedup is not None
    assert last.efficiency is not None
    gain, share = last.speedup, last.efficiency
    than = "1 device" if base.devices == 1 else f"{base.devices:,}"
    samples = last.global_batch / last.devices
    each = f"{count(round(samples), 'sample') if samples >= 1 else f'{samples:.2g} samples'} per device"
    work = "" if curve.scaling == "strong" else f", at {each}"
    return (
        f"{last.devices:,} devices are predicted to be {digits(gain.middle)}× as fast as {than} "
        f"({digits(gain.low)} to {digits(gain.high)} with a probability of 80 %){work}: an efficiency of "
        f"{percent(share.middle, 0)} ({percent(share.low, 0)} to {percent(share.high, 0)})."
    )


def _pays(curve: SimulatedCurve) -> list[str]:
    """Sentence on the devices up to which the efficiency stays above one half."""
    known = [(point.devices, point.efficiency) for point in curve.fitting if point.efficiency is not None]
    paying = [devices for devices, share in known if share.middle >= PAYS]
    surely = [devices for devices, share in known if share.low >= PAYS]
    if len(known) < 2:
        return []
    if len(paying) == len(known):
        sure = "" if len(surely) == len(known) else f", by the low end of its interval up to {max(surely):,}"
        return [f"The efficiency is above 50 % on all of them{sure}."]
    return [f"It pays up to {count(max(paying), 'device')}: with more, the efficiency is below 50 %."]


def _limits(curve: SimulatedCurve) -> list[str]:
    """Sentence on what is lost at the most devices."""
    last, base = curve.last, curve.base
    if last is base or last.efficiency is None:
        return []
    if last.used < last.devices:
        return [f"On {last.devices:,} devices {limit_of(last, base)}."]
    parts = [(PART_NAMES[part], share) for part, share in excess_shares(last, base) if share > _WORTH_NAMING]
    told = []
    if parts:
        named = listed([f"{name} ({percent(share)} of a step)" for name, share in parts[:3]])
        told.append(f"On {last.devices:,} devices what is more than ideal is {named}.")
    elif last.efficiency.middle < 1 - _LOST:
        told.append("What is lost is none of the parts that the cost model knows, but what published runs lose beside.")
    if last.efficiency.middle > 1 + _LOST:
        best = max(curve.fitting, key=lambda point: point.efficiency.middle if point.efficiency else 0.0)
        assert best.efficiency is not None
        share = last.efficiency.middle / best.efficiency.middle
        told.append(
            f"More than 100 % is no mistake: {_sacrifice(curve)} on {count(base.devices, 'device')}, and less or none "
            f"of that on more. Each device is fastest on {best.devices:,}; against these, {last.devices:,} reach "
            f"{percent(share, 0)}."
        )
    return told


def _sacrifice(curve: SimulatedCurve) -> str:
    """The parts that make the fewest devices slower than their share."""
    assert curve.base.candidate is not None
    assert curve.last.candidate is not None
    before, now = curve.base.candidate.prediction, curve.last.candidate.prediction
    more = {
        PART_NAMES[part]: seconds / before.step_time_s - now.breakdown[part] / now.step_time_s
        for part, seconds in before.breakdown.items()
    }
    named = [name for name, share in sorted(more.items(), key=lambda one: -one[1]) if share > _WORTH_NAMING]
    return f"a step has {listed(named[:3])}" if named else "a step is slower"


def _changes(curve: SimulatedCurve) -> list[str]:
    """Sentence on where another kind of plan becomes the best."""
    kinds = [(point.devices, kind_of_plan(point.candidate.plan)) for point in curve.fitting if point.candidate]
    told = [f"from {devices:,} on {kind}" for (_, before), (devices, kind) in pairwise(kinds) if kind != before]
    return [f"The best plan changes: {kinds[0][1]} on {kinds[0][0]:,}, {listed(told)}."] if told else []


def kind_of_plan(plan: Plan) -> str:
    """A plan without its numbers of data-parallel ranks and microbatches."""
    default = Plan()
    parts = ["fsdp"] if plan.fsdp > 1 else []
    parts += ["dp"] if plan.dp > 1 else []
    for key in _KIND:
        value = getattr(plan, key)
        if value != getattr(default, key) and not (key == "schedule" and plan.pp == 1):
            parts.append(f"{key}={'on' if value is True else value}")
    return " + ".join(parts[:2]) + (" " + " ".join(parts[2:]) if parts[2:] else "") if parts else "one rank"


def _failures(curve: SimulatedCurve) -> list[str]:
    last = curve.last
    if last.goodput is None:
        return []
    low, high = percent(last.goodput.low, 1), percent(last.goodput.high, 1)
    between = f"{low} to {high}" if str(low) != str(high) else str(low)
    told = f"With failures and checkpoints {between} of the time on {last.devices:,} devices is useful (goodput)."
    worst = max(curve.fitting, key=_gain_by_checkpoints)
    if _gain_by_checkpoints(worst) < _FAR_OFF or worst.goodput is None or worst.best_goodput is None:
        return [told]
    return [
        told,
        f"On {count(worst.devices, 'device')} the job's own checkpoints are far from the best: "
        f"{percent(worst.goodput.middle, 0)} is useful, and with checkpoint.every_steps: {worst.best_every_steps} it "
        f"would be {percent(worst.best_goodput, 0)}.",
    ]


def _gain_by_checkpoints(point: Point) -> float:
    """Goodput that the best interval of checkpoints adds."""
    if point.goodput is None or point.best_goodput is None:
        return 0.0
    return point.best_goodput - point.goodput.middle


def _used(point: Point) -> str:
    return "1 device is used" if point.used == 1 else f"{point.used:,} devices are used"


def _largest_part(point: Point) -> str:
    assert point.candidate is not None
    breakdown = point.candidate.prediction.breakdown
    return PART_NAMES[max(breakdown, key=lambda part: breakdown[part])]
