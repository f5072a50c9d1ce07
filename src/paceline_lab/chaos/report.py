"""Costs of each fault: when it was named and healed, gap, lost steps."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline.run.record.run import read_lines
from paceline_lab.chaos.faults import Injected
from paceline_lab.chaos.invariants import Invariant, Reference, difference, losses_of
from paceline_lab.chaos.play import Played
from paceline_lab.chaos.schedule import Fault

_AGAIN = ("resume", "start")
_HEALED: Mapping[str, tuple[str, ...]] = {
    "slow": ("slow_rank_over",),
    "disk-full": ("checkpoint_saved", *_AGAIN),
    "corrupt": ("corruption", "checkpoint_saved", *_AGAIN),
}
_NAMED: Mapping[str, tuple[str, ...]] = {
    "slow": ("slow_rank", "balance"),
    "disk-full": ("checkpoint_failed", "lines_lost"),
    "corrupt": ("corruption", "checkpoint_damaged"),
}
_NAMED_LOSS = ("lost", "host_lost", "restart")
_WITHIN_S = 60.0  # what comes later is not taken for an answer to a fault


@dataclass(frozen=True)
class Row:
    """One fault and what came of it.

    Times are seconds from the fault on; None where it did not come to that.
    """

    fault: str
    step: int
    hit: str
    named_s: float | None
    gap_s: float | None
    steps_lost: int
    healed_s: float | None
    losses_differ: float | None


def rows(played: Played, reference: Reference) -> list[Row]:
    """Outcome of each fault, in their order."""
    lines = [line for file in played.run.glob("steps/rank-*.jsonl") for line in _numbered(file)]
    events = list(read_lines(played.run / "events.jsonl"))
    losses = losses_of(played.run)
    until = [*(injected.time for injected in played.made[1:]), float("inf")]
    limits = [named_until(injected, played.made[i:]) for i, injected in enumerate(played.made, 1)]
    made = zip(played.made, until, limits, strict=False)
    return [_row(*fault, lines, events, losses, played, reference) for fault in made]


def named_until(injected: Injected, later: Sequence[Injected]) -> float:
    """Time from which on events may answer to a later fault.

    That is one which is named by the same events, and hits the same.
    """
    fault, kinds = injected.fault, _NAMED.get(injected.fault.kind, _NAMED_LOSS)
    for other in later:
        of_ranks = fault.target == other.fault.target == "rank"
        alike = _NAMED.get(other.fault.kind, _NAMED_LOSS) == kinds
        if alike and not (of_ranks and fault.number != other.fault.number):
            return min(other.time, injected.time + _WITHIN_S)
    return injected.time + _WITHIN_S


def is_about(event: Mapping[str, Any], fault: Fault) -> bool:
    """False for what an event tells of another rank or host."""
    name, rank, host = str(event["event"]), event.get("rank", -1), event.get("number", -1)
    if fault.target in ("rank", "weights", "others"):
        if name in ("lost", "healed", "slow_rank", "corruption"):
            return bool(fault.number == rank) != (fault.target == "others")
        return name != "host_lost"
    if fault.target == "host" and fault.kind != "partition" and name == "host_lost":
        return bool(fault.number == host)
    return True


def as_json(
    played: Played, reference: Reference, invariants: Sequence[Invariant], faults: Sequence[Row]
) -> dict[str, Any]:
    """All that is known of a run, for machines."""
    return {
        "schedule": msgspec.to_builtins(played.schedule),
        "held": all(invariant.held for invariant in invariants),
        "invariants": [asdict(invariant) for invariant in invariants],
        "losses": reference.why,
        "faults": [asdict(row) for row in faults],
        "not_made": [str(fault) for fault in played.not_made],
        "sizes": [asdict(course) for course in played.grown],
        "commands": [{"code": end.code, "time": end.time} for end in played.ends],
    }


def _row(
    injected: Injected,
    until: float,
    limit: float,
    lines: Sequence[dict[str, Any]],
    events: Sequence[dict[str, Any]],
    losses: Mapping[int, float],
    played: Played,
    reference: Reference,
) -> Row:
    begin = injected.time
    ends = [end.time for end in played.ends if end.code]
    about = [event for event in events if is_about(event, injected.fault)]
    named = _first([*_times(about, _NAMED.get(injected.fault.kind, _NAMED_LOSS)), *ends], begin, limit)
    kinds = _HEALED.get(injected.fault.kind, ("healed", *_AGAIN))
    healed = _first(_times(about, kinds), begin + (named or 0.0), begin + _WITHIN_S) if named is not None else None
    healed = healed if healed is None or named is None else round(healed + named, 3)
    commits = sorted(line["time"] for line in lines)
    gaps = [(a, b) for a, b in itertools.pairwise(commits) if b > a]
    typical_s = statistics.median([line["step_s"] for line in lines]) if lines else 0.0
    window = min(until, begin + max((healed or named or 0.0), injected.fault.for_s) + 1.0)
    near = [b - a for a, b in gaps if a <= begin < b or (begin < a and b <= window)]
    again = [line["step"] for line in lines if line["again"] and begin < line["time"] < until]
    return Row(
        str(injected.fault),
        injected.step,
        injected.hit,
        named,
        round(max(max(near) - typical_s, 0.0), 3) if near else None,
        len(set(again)),
        healed,
        _differ(injected, until, lines, losses, reference),
    )


def _differ(
    injected: Injected,
    until: float,
    lines: Sequence[dict[str, Any]],
    losses: Mapping[int, float],
    reference: Reference,
) -> float | None:
    """Largest difference of losses from a fault to the next."""
    steps = {line["step"] for line in lines if injected.time < line["time"] < until} & reference.losses.keys()
    first = reference.losses[min(reference.losses)]
    by = [difference(losses[step], reference.losses[step], first) for step in steps & losses.keys()]
    return float(f"{max(by):.3g}") if by else None


def _numbered(file: Path) -> list[dict[str, Any]]:
    """Steps of a rank, with whether it had taken each before."""
    seen: set[int] = set()
    found = []
    for line in read_lines(file):
        found.append(
            {"step": line["step"], "time": line["time"], "step_s": line["step_s"], "again": line["step"] in seen}
        )
        seen.add(line["step"])
    return found


def _times(events: Sequence[dict[str, Any]], kinds: Sequence[str]) -> list[float]:
    return [event["time"] for event in events if event["event"] in kinds]


def _first(times: Sequence[float], begin: float, limit: float) -> float | None:
    later = [time - begin for time in times if begin <= time < limit]
    return round(min(later), 3) if later else None
