"""Timeline and critical path as a file of Chrome's trace events, which Perfetto opens.

The format is that of the Trace Event Format document: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from paceline.errors import RunError
from paceline.files import write_whole
from paceline.report.definitions import PARTS as DEFINITIONS
from paceline.report.timeline.critical_path import BETWEEN, CriticalPath, Piece
from paceline.report.timeline.timeline import RankStep, Timeline
from paceline.run.record.progress import event_sentence

# Processes of the trace. Perfetto keeps 0 for a process of its own.
_PATH, _RUN, _FIRST_RANK = 1, 2, 10
_COUNTERS = {
    "memory_bytes": ("memory", "bytes"),
    "gpu_memory_bytes": ("device memory", "bytes"),
    "cpu_cores": ("cores", "busy"),
}
_SHOWN = ("loss", "lr", "grad_norm", "epoch", "samples", "local_samples")

Event = dict[str, Any]


def write_trace(path: CriticalPath, file: Path, about: Mapping[str, Any]) -> Path:
    """Write the trace of a timeline.

    Args:
        about: what it is of, for the trace's metadata.

    Raises:
        RunError: the file cannot be written.
    """
    trace = {
        "displayTimeUnit": "ms",
        "otherData": {**about, "critical_path": path.sentences, "started_at_unix_s": path.timeline.origin_s},
        "traceEvents": list(trace_events(path)),
    }
    try:
        write_whole(file, json.dumps(trace, separators=(",", ":"), allow_nan=False))
    except OSError as error:
        raise RunError(f"{file} cannot be written: {error.strerror or error}. Name another file with --out.") from error
    return file


def trace_events(path: CriticalPath) -> Iterator[Event]:
    """Trace events of a timeline and its critical path.

    A process of the trace is a rank. Its steps are slices, in which its parts are nested.
    """
    timeline = path.timeline
    yield from _track(_PATH, "critical path", "what is waited for")
    for piece in path.pieces:
        yield _slice(
            _PATH, _name_on_path(piece, timeline), "critical path", piece.start_s, piece.end_s, step=piece.step
        )
    yield from _track(_RUN, "run", "events")
    for seconds, event in timeline.events:
        yield {"ph": "i", "s": "g", "name": event["event"], "cat": "event", **_at(_RUN, seconds), "args": _told(event)}
    for rank, steps in timeline.ranks.items():
        host = f" (host {timeline.hosts[rank]})" if rank in timeline.hosts else ""
        yield from _track(_FIRST_RANK + rank, f"rank {rank}{host}", timeline.noun + "s")
        for step in steps:
            yield from _step(step, timeline.noun)
        for before, after in pairwise(steps):
            if after.start_s > before.end_s:
                what = ", ".join(timeline.events_between(before.end_s, after.start_s)) or f"between {timeline.noun}s"
                yield _slice(_FIRST_RANK + rank, what, "between", before.end_s, after.start_s)
    yield from _losses(timeline)
    yield from _arrows(path)


def _track(process: int, name: str, thread: str) -> Iterator[Event]:
    where = {"ph": "M", "pid": process, "tid": process}
    yield {**where, "name": "process_name", "args": {"name": name}}
    yield {**where, "name": "process_sort_index", "args": {"sort_index": process}}
    yield {**where, "name": "thread_name", "args": {"name": thread}}


def _step(step: RankStep, noun: str) -> Iterator[Event]:
    process = _FIRST_RANK + step.rank
    told = {name: step.line[name] for name in _SHOWN if _is_finite(step.line.get(name))}
    yield _slice(process, f"{noun} {step.step}", noun, step.start_s, step.end_s, step=step.step, **told)
    for part in step.parts_s:
        start_s, end_s = step.place(part)
        if _ns(end_s) > _ns(start_s):
            yield _slice(process, DEFINITIONS[part].name, "part", start_s, end_s, about=DEFINITIONS[part].text)
    for key, (name, unit) in _COUNTERS.items():
        if key in step.line.get("use", {}):
            yield {"ph": "C", "name": name, **_at(process, step.end_s), "args": {unit: step.line["use"][key]}}


def _losses(timeline: Timeline) -> Iterator[Event]:
    """The loss, as the lowest rank has it."""
    for step in timeline.ranks[min(timeline.ranks)]:
        if step.line.get("loss") is not None:
            yield {"ph": "C", "name": "loss", **_at(_RUN, step.end_s), "args": {"of the batch": step.line["loss"]}}


def _arrows(path: CriticalPath) -> Iterator[Event]:
    """Arrows from the rank that came last to an exchange to those that waited.

    From what it did until then to what they went on with. An end of an arrow belongs to the slice that is open there.
    """
    numbers = count(1)
    for arrival in path.arrivals:
        steps = {rank: step for rank, of in path.timeline.ranks.items() for step in of if step.step == arrival.step}
        names = list(steps[arrival.last].parts_s)
        at = names.index("imbalance")
        last = _first_drawn(steps[arrival.last], reversed(names[:at]))
        for rank, waited_s in arrival.waited_s.items():
            then = _first_drawn(steps[rank], names[at + 1 :])
            if last is None or then is None or waited_s <= 0 or then <= last:
                continue
            flow = {"name": "waits for", "cat": "wait", "id": next(numbers)}
            yield {"ph": "s", **flow, **_at(_FIRST_RANK + arrival.last, last + 1e-9)}
            yield {"ph": "f", "bp": "e", **flow, **_at(_FIRST_RANK + rank, then + 1e-9)}


def _first_drawn(step: RankStep, parts: Iterable[str]) -> float | None:
    """Start of the first of some parts that an arrow fits into, or None."""
    places = (step.place(part) for part in parts)
    return next((start_s for start_s, end_s in places if _ns(end_s) - _ns(start_s) > 1), None)


def _name_on_path(piece: Piece, timeline: Timeline) -> str:
    if piece.part == BETWEEN:
        return ", ".join(piece.events) or f"between {timeline.noun}s"
    of = f" of rank {piece.rank}" if piece.part != "comm" and len(timeline.ranks) > 1 else ""
    return f"{DEFINITIONS[piece.part].name}{of}"


def _slice(process: int, name: str, category: str, start_s: float, end_s: float, **told: Any) -> Event:
    begin = _at(process, start_s)
    return {"ph": "X", "name": name, "cat": category, **begin, "dur": (_ns(end_s) - _ns(start_s)) / 1e3, "args": told}


def _at(process: int, seconds: float) -> Event:
    return {"pid": process, "tid": process, "ts": _ns(seconds) / 1e3}


def _ns(seconds: float) -> int:
    """Whole nanoseconds, so that slices which meet do so exactly."""
    return round(seconds * 1e9)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _told(event: Mapping[str, Any]) -> dict[str, Any]:
    """Values of an event, and its sentence for people."""
    try:
        sentence = event_sentence(dict(event))
    except (KeyError, TypeError, ValueError, AttributeError):  # of another version, or made by hand
        sentence = None
    plain = {
        key: value
        for key, value in event.items()
        if key not in ("event", "time") and (isinstance(value, str) or _is_finite(value))
    }
    return {**plain, **({"sentence": sentence} if sentence else {})}
