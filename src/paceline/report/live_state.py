"""State of a run for the live page, as sections of values and text."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.cluster.host import Host
from paceline.engine.meter import PARTS
from paceline.errors import PacelineError
from paceline.report.charts import DASHES, Axis, Figure, Points
from paceline.report.figures import reason_words
from paceline.report.live_run import STATES, LiveRun, RankNow
from paceline.report.page import not_by_paceline
from paceline.report.svg import chart
from paceline.run.record.goodput import PARTS as WALL
from paceline.text import printable
from paceline.units import bandwidth, clock, digits, percent, rate, seconds, size

Section = Any  # consists of JSON types
_LONGEST = 2000  # largest number of characters of a text
_CURVE_PX = 190
_IN_SIGHT_S = 365 * 86_400.0


def told_apart(paths: Sequence[Path]) -> list[str]:
    """Return unique names for directories, with as few parent folders as possible."""
    whole = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, whole), default=0)):
        if len({parts[-length:] for parts in whole}) == len(set(whole)):
            break
    return [_text("/".join(parts[-length:])) for parts in whole]


def look_at(run: LiveRun, name: str) -> dict[str, Section]:
    """Read new data of a run, and return its sections or the error."""
    try:
        with not_by_paceline(run.run.path, "run"):
            run.look()
            return state_of(run, name)
    except PacelineError as error:
        return {"name": name, "problem": _text(str(error))}


def state_of(run: LiveRun, name: str, now: float | None = None) -> dict[str, Section]:
    """Return the sections that the page shows for a run, as JSON values."""
    now = time.time() if now is None else now
    ranks = run.ranks()
    return {
        "name": name,
        "head": _head(run),
        "progress": _progress(run, now),
        "ranks": [_rank(one, takes_part=run.members.take_part(one.rank)) for one in ranks],
        "steps": _steps(ranks),
        "members": _members(run),
        "links": _links(run, ranks),
        "goodput": _goodput(run),
        "events": _events(run),
    }


def curves_of(runs: Sequence[tuple[str, str, LiveRun]]) -> Section:
    """Draw the losses of runs over steps.

    Returns the chart as HTML with a description. Both are empty until a run has two losses.

    Args:
        runs: for each curve, its name, its colour and the run.
    """
    figure = Figure(Axis("step"), Axis("loss"), height=_CURVE_PX, legend=False)
    words = []
    for number, (name, colour, run) in enumerate(runs):
        curve = run.curve
        if len(curve.values) < 2:
            continue
        steps = [run.curve_from + (at + 1) * curve.each - 1 for at in range(len(curve.values))]
        line = Points(name, steps, curve.values, colour, dash=DASHES[number % len(DASHES)])
        if curve.each > 1:
            line.low, line.high, line.fill = curve.low, curve.high, "band"
        figure.traces.append(line)
        words.append(f"{name}: {_loss(curve.values[0])} to {_loss(curve.values[-1])}")
    low, high = (pick((y for _, _, run in runs for y in run.curve.values), default=0.0) for pick in (min, max))
    figure.y.log = low > 0 and high > 30 * low
    drawn = str(chart(figure)) if words else ""
    return {"drawn": drawn, "label": f"Training loss from {'; '.join(words)}." if words else ""}


def changes(before: Mapping[str, Section], after: Mapping[str, Section]) -> dict[str, Section]:
    """Return the sections that have changed. The value of a removed section is None."""
    gone = dict.fromkeys(before.keys() - after.keys())
    return {name: section for name, section in after.items() if name not in before or before[name] != section} | gone


def _head(run: LiveRun) -> Section:
    return {
        "job": _text(run.run.job.name),
        "plan": _text(str(run.run.plan)),
        "machine": _text(run.run.cluster.describe()),
        "batch": f"{run.run.job.global_batch:,}",
        "began": run.began,
    }


def _progress(run: LiveRun, now: float) -> Section:
    recent = run.recent
    left_s = recent.left_s
    ended = run.end["time"] if run.end else None
    phase = "ended" if run.ended else "late" if run.late(now) else "running" if recent.steps else "starting"
    return {
        "phase": phase,
        "state": _text(f"ended: {reason_words(str(run.end.get('reason')))}" if run.end else run.state(now)),
        "step": recent.step,
        "total": run.total_steps,
        "epoch": recent.steps[-1]["epoch"] + 1 if recent.steps else None,
        "loss": None if recent.loss is None else _loss(recent.loss),
        "speed": None if recent.samples_per_s is None else str(rate(recent.samples_per_s)),
        "step_time": None if recent.step_s is None else str(seconds(recent.step_s)),
        "left": None if left_s is None or left_s > _IN_SIGHT_S else clock(left_s),
        "ended": ended,
        "slow": _text(recent.slow),
        "metrics": [[_text(name), digits(value)] for name, value in run.metrics.items()],
    }


def _loss(loss: float) -> str:
    return digits(loss) if abs(loss) >= 1e-3 or not loss else f"{loss:.2e}"


def _rank(one: RankNow, *, takes_part: bool) -> Section:
    """Return a row: rank, step, steps behind, step time, parts, samples, share, memory, sent, share.

    The parts and the last share are integers in tenths of a percent. The last share is 0 if the rank does not take
    part.
    """
    return [
        one.rank,
        one.step,
        one.behind,
        str(seconds(one.step_s)),
        [round(1000 * one.parts[part]) for part in PARTS],
        one.samples,
        str(percent(one.share)),
        "" if one.memory_bytes is None else str(size(one.memory_bytes)),
        "" if one.sent is None else str(size(one.sent.per_step)),
        round(1000 * one.share) if takes_part else 0,
    ]


def _steps(ranks: Sequence[RankNow]) -> Section:
    """Return the parts, averaged over all ranks.

    A sentence names the rank for which the other ranks wait, if there is one.
    """
    if not ranks:
        return {"parts": [], "said": ""}
    mean = [statistics.fmean(one.parts[part] for one in ranks) for part in PARTS]
    waits = {one.rank: one.parts["imbalance"] * one.step_s for one in ranks}
    least = min(waits, key=lambda rank: waits[rank])
    others_s = statistics.fmean([wait for rank, wait in waits.items() if rank != least] or [0.0])
    step_s = statistics.median(one.step_s for one in ranks)
    said = ""
    # the report of a run uses the same criterion
    if len(ranks) > 1 and step_s and others_s > 0.05 * step_s and waits[least] <= others_s / 3:
        said = f"The others wait for rank {least}: {seconds(others_s)} of each step, {percent(others_s / step_s)}."
    return {"parts": [round(1000 * share) for share in mean], "said": said}


def _members(run: LiveRun) -> Section:
    """List the ranks of each host with their states, in the order of the hosts."""
    hosts: dict[str, list[Section]] = {}
    for rank, member in sorted(run.members.ranks.items()):
        hosts.setdefault(member.host, []).append([rank, member.state, STATES[member.state], member.slow])
    states = [member.state for member in run.members.ranks.values()]
    return {
        "in": states.count("in"),
        "of": len(states) - states.count("left"),
        "generation": run.members.generation,
        "hosts": [[_text(name), ranks] for name, ranks in hosts.items()],
    }


def _links(run: LiveRun, ranks: Sequence[RankNow]) -> Section:
    """List the hosts. A row has the name, the link, the bytes sent by the ranks and by the host, and the carried bytes.

    The carried bytes, sent and received, are recorded at the end of an attempt with emulated hosts.
    """
    cluster = run.run.cluster
    of_host = {rank: member.host for rank, member in run.members.ranks.items()}
    rates = cluster.emulate.rates_bps if cluster.emulate else ()
    rows = []
    for number, host in enumerate(cluster.hosts):
        sent = [one.sent for one in ranks if one.sent is not None and of_host.get(one.rank) == host.name]
        speed = _bits(rates[number]) if number < len(rates) else _link(host)
        per_step = str(size(sum(each.per_step for each in sent))) if sent else ""
        per_s = str(bandwidth(max(each.host_per_s for each in sent))) if sent else ""
        carried = [str(size(each)) for each in run.carried.get(host.name, [])]
        rows.append([_text(host.name), speed, per_step, per_s, *(carried or ["", ""])])
    return {"transport": _text(run.transport), "rows": rows}


def _link(host: Host) -> str:
    """Describe a host's fastest recorded link to other hosts."""
    found = [link for link in host.links if link.kind in ("ethernet", "measured") and link.bandwidth_gbps]
    best = max(found, key=lambda link: link.bandwidth_gbps or 0.0, default=None)
    return "" if best is None else _text(f"{best.name}, {best.bandwidth_gbps:g} Gbit/s")


def _bits(per_s: int | None) -> str:
    if per_s is None:
        return "as fast as the machine"
    return f"{per_s / 1e6:g} Mbit/s" if per_s < 1e9 else f"{per_s / 1e9:g} Gbit/s"


def _goodput(run: LiveRun) -> Section:
    so_far = run.goodput.goodput()
    if not so_far.wall_s:
        return None
    parts = [[part, WALL[part], str(seconds(s)), round(1000 * s / so_far.wall_s)] for part, s in so_far.parts_s.items()]
    return {"share": str(percent(so_far.share)), "said": so_far.sentence(), "parts": [p for p in parts if p[3]]}


def _events(run: LiveRun) -> Section:
    """Return the number of events, and a row for each recent event or failure."""
    began = run.began or (run.events[0].time if run.events else 0.0)
    kept = {one.number: one for one in (*run.troubles, *run.events)}
    told = [
        [number, clock(kept[number].time - began), _text(kept[number].sentence), kept[number].trouble]
        for number in sorted(kept)
    ]
    return {"count": run.happened, "told": told}


def _text(text: str) -> str:
    """Sanitize a text that may come from another program."""
    return printable(text[:_LONGEST])
