"""Traces for Perfetto: the timeline of a run with its critical path, or torch operations.

The files have the Trace Event Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.errors import RunError
from paceline.files import write_whole
from paceline.report.critical_path import BETWEEN, CriticalPath, Piece
from paceline.report.figures import PARTS
from paceline.report.timeline import RankStep, Timeline
from paceline.run.record.progress import UNKNOWN_EVENT, event_sentence
from paceline.run.tuning.calibrate import PHASE, STEP
from paceline.text import listed
from paceline.units import count, percent, seconds

# Process numbers in the trace. Perfetto reserves process 0.
_PATH, _RUN, _FIRST_RANK = 1, 2, 10
_COUNTERS = {
    "memory_bytes": ("memory", "bytes"),
    "gpu_memory_bytes": ("device memory", "bytes"),
    "cpu_cores": ("cores", "busy"),
}
_SHOWN = ("loss", "lr", "grad_norm", "epoch", "samples", "local_samples")

TraceEvent = dict[str, Any]


def write_trace(path: CriticalPath, file: Path, about: Mapping[str, Any]) -> Path:
    """Write a timeline and its critical path as a trace file.

    Args:
        about: metadata that the trace includes, such as the job and the plan.

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
        raise RunError(
            "report.unwritable",
            "{file} cannot be written: {reason}. Name another file with --out.",
            file=file,
            reason=error.strerror or error,
        ) from error
    return file


def trace_events(path: CriticalPath) -> Iterator[TraceEvent]:
    """Yield the trace events of a timeline and its critical path.

    Each rank is a process in the trace. Each step is a slice that contains the slices of its parts.
    """
    timeline = path.timeline
    yield from _track(_PATH, "critical path", "what is waited for")
    for piece in path.pieces:
        yield _slice(
            _PATH, _name_on_path(piece, timeline), "critical path", piece.start_s, piece.end_s, step=piece.step
        )
    yield from _track(_RUN, "run", "events")
    for at_s, event in timeline.events:
        yield {"ph": "i", "s": "g", "name": event["event"], "cat": "event", **_at(_RUN, at_s), "args": _told(event)}
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


def _track(process: int, name: str, thread: str) -> Iterator[TraceEvent]:
    where = {"ph": "M", "pid": process, "tid": process}
    yield {**where, "name": "process_name", "args": {"name": name}}
    yield {**where, "name": "process_sort_index", "args": {"sort_index": process}}
    yield {**where, "name": "thread_name", "args": {"name": thread}}


def _step(step: RankStep, noun: str) -> Iterator[TraceEvent]:
    process = _FIRST_RANK + step.rank
    told = {name: step.line[name] for name in _SHOWN if _is_finite(step.line.get(name))}
    yield _slice(process, f"{noun} {step.step}", noun, step.start_s, step.end_s, step=step.step, **told)
    for part in step.parts_s:
        start_s, end_s = step.place(part)
        if _ns(end_s) > _ns(start_s):
            yield _slice(process, PARTS[part].name, "part", start_s, end_s, about=PARTS[part].text)
    for key, (name, unit) in _COUNTERS.items():
        if key in step.line.get("use", {}):
            yield {"ph": "C", "name": name, **_at(process, step.end_s), "args": {unit: step.line["use"][key]}}


def _losses(timeline: Timeline) -> Iterator[TraceEvent]:
    """Yield the losses that the lowest rank has recorded."""
    for step in timeline.ranks[min(timeline.ranks)]:
        if step.line.get("loss") is not None:
            yield {"ph": "C", "name": "loss", **_at(_RUN, step.end_s), "args": {"of the batch": step.line["loss"]}}


def _arrows(path: CriticalPath) -> Iterator[TraceEvent]:
    """Yield arrows from the last rank at each exchange to the ranks that waited.

    An arrow begins in the last rank's slice before the exchange. It ends in the waiting rank's slice after the wait.
    """
    numbers = iter(range(1, 2**31))
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
    """Return the start of the first part that is long enough for an arrow."""
    places = (step.place(part) for part in parts)
    return next((start_s for start_s, end_s in places if _ns(end_s) - _ns(start_s) > 1), None)


def _name_on_path(piece: Piece, timeline: Timeline) -> str:
    if piece.part == BETWEEN:
        return ", ".join(piece.events) or f"between {timeline.noun}s"
    of = f" of rank {piece.rank}" if piece.part != "comm" and len(timeline.ranks) > 1 else ""
    return f"{PARTS[piece.part].name}{of}"


def _slice(process: int, name: str, category: str, start_s: float, end_s: float, **told: Any) -> TraceEvent:
    begin = _at(process, start_s)
    return {"ph": "X", "name": name, "cat": category, **begin, "dur": (_ns(end_s) - _ns(start_s)) / 1e3, "args": told}


def _at(process: int, seconds: float) -> TraceEvent:
    return {"pid": process, "tid": process, "ts": _ns(seconds) / 1e3}


def _ns(seconds: float) -> int:
    """Round to whole nanoseconds. Adjacent slices then meet exactly."""
    return round(seconds * 1e9)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _told(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of an event, with a sentence that describes the event."""
    try:
        sentence = event_sentence(dict(event))
    except UNKNOWN_EVENT:
        sentence = None
    plain = {
        key: value
        for key, value in event.items()
        if key not in ("event", "time") and (isinstance(value, str) or _is_finite(value))
    }
    return {**plain, **({"sentence": sentence} if sentence else {})}


_EACH = 1000  # process numbers per rank in the trace: one for the rank, the others for its devices
_NOT_ITS_OWN = ("Spans", "Traces")  # processes with which the profiler marks its own start and end
_ARROWS = "stf"
_BESIDE = 1 << 24  # number of the first thread for slices that would overlap others
_ROUNDING_US = 0.01


def write_operations(traces: Sequence[Mapping[str, Any]], file: Path, about: Mapping[str, Any]) -> Path:
    """Merge the traces of all ranks into one file.

    Args:
        traces: traces of torch's profiler, one for each rank. All ranks must share the clock of one machine.
        about: metadata that the trace includes, such as the job and the plan.

    Raises:
        RunError: the file cannot be written.
    """
    base_ns = min(int(trace["baseTimeNanoseconds"]) for trace in traces)
    events = [
        event
        for rank, trace in enumerate(traces)
        for event in _of_rank(rank, trace, (int(trace["baseTimeNanoseconds"]) - base_ns) / 1e3)
    ]
    # times since 1970 in microseconds would lose precision
    first_us = min(event["ts"] for event in events if event["ph"] == "X")
    for event in events:
        event["ts"] = max(round(event["ts"] - first_us, 3), 0.0)
    devices = {f"devices_of_rank_{rank}": trace.get("deviceProperties", []) for rank, trace in enumerate(traces)}
    merged = {
        "displayTimeUnit": "ms",
        "otherData": {**about, **devices},
        "traceEvents": [*_nested(events), *events],
    }
    try:
        write_whole(file, json.dumps(merged, separators=(",", ":")))
    except OSError as error:
        raise RunError(
            "report.unwritable",
            "{file} cannot be written: {reason}. Name another file with --out.",
            file=file,
            reason=error.strerror or error,
        ) from error
    return file


def _of_rank(rank: int, trace: Mapping[str, Any], shift_us: float) -> Iterator[TraceEvent]:
    """Yield a rank's events on the common clock, with unique process and arrow numbers."""
    steps = [event for event in trace["traceEvents"] if _is_step(event)]
    own = steps[0]["pid"] if steps else None
    processes: dict[Any, int] = {own: (rank + 1) * _EACH}
    for event in trace["traceEvents"]:
        if event.get("pid") in (*_NOT_ITS_OWN, "") or (event["ph"] == "M" and event["name"] == "process_sort_index"):
            continue
        process = processes.setdefault(event["pid"], (rank + 1) * _EACH + len(processes))
        changes: TraceEvent = {"pid": process, "ts": event.get("ts", 0.0) + shift_us}
        if event["ph"] in _ARROWS and isinstance(event.get("id"), int):
            changes["id"] = event["id"] + (rank << 32)  # Perfetto requires numeric ids of arrows
        if event["ph"] == "M" and event["name"] == "process_name":
            what = "" if event["pid"] == own else f": {event['args'].get('name', '')}"
            changes["args"] = {"name": f"rank {rank}{what}"}
        yield event | changes
    for process in processes.values():
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "ts": 0.0, "args": {"sort_index": process}}


def _nested(events: Sequence[TraceEvent]) -> Iterator[TraceEvent]:
    """Move slices that overlap other slices, but are not nested in them, to separate tracks.

    Perfetto drops overlapping slices. Such slices occur if another thread reports the end of a collective long after
    the operation that started it. The function yields the names of the new tracks.
    """
    threads: defaultdict[tuple[int, Any], list[TraceEvent]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    lanes: defaultdict[int, list[float]] = defaultdict(list)  # end of the last slice on each track, by process
    for (process, _), slices in threads.items():
        open_until: list[float] = []
        for event in sorted(slices, key=lambda one: (one["ts"], -one["dur"])):
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"] + _ROUNDING_US:
                open_until.pop()
            if not open_until or end <= open_until[-1] + _ROUNDING_US:
                end = min([end, *open_until[-1:]])
                event["dur"] = max(round(end - event["ts"], 3), 0.0)
                open_until.append(end)
                continue
            own = lanes[process]
            lane = next((i for i, until in enumerate(own) if until <= event["ts"]), len(own))
            own[lane:] = [end, *own[lane + 1 :]]
            event["tid"] = _BESIDE + lane
    for process, own in lanes.items():
        for lane in range(len(own)):
            where = {"ph": "M", "pid": process, "tid": _BESIDE + lane, "ts": 0.0}
            yield {**where, "name": "thread_name", "args": {"name": "beside"}}


def operations_in_words(traces: Sequence[Mapping[str, Any]], recorded_s: float) -> list[str]:
    """Describe the profiled step time, and the longest operations of each rank.

    Args:
        recorded_s: step time of the run without the profiler, in seconds.
    """
    lengths = [[event["dur"] / 1e6 for event in trace["traceEvents"] if _is_step(event)] for trace in traces]
    steps, step_s = len(lengths[0]), fmean(length for of in lengths for length in of)
    took = f"{count(steps, 'step')} under the profiler took {seconds(step_s)} each"
    sentences = [f"{took}. A step of the run took {seconds(recorded_s)}."]
    for rank, trace in enumerate(traces):
        whole_us = sum(lengths[rank]) * 1e6
        longest = [f"{name} {percent(us / whole_us)}" for name, us in _own_us(trace["traceEvents"]).most_common(4)]
        sentences.append(f"Rank {rank} spends most time in {listed(longest)}.")
    return sentences


def _own_us(events: Sequence[TraceEvent]) -> Counter[str]:
    """Return each operation's total microseconds within the steps, without nested operations.

    Time outside operations, such as waiting, is assigned to the phase of the step.
    """
    found: Counter[str] = Counter()
    for slices in _by_thread(events).values():
        stack: list[TraceEvent] = []
        for event in sorted(slices, key=lambda one: (one["ts"], -one["dur"])):
            while stack and event["ts"] >= stack[-1]["ts"] + stack[-1]["dur"]:
                stack.pop()
            if any(_is_step(one) for one in stack):
                found[_named(event)] += event["dur"]
                if not _is_step(stack[-1]):
                    found[_named(stack[-1])] -= event["dur"]
            stack.append(event)
    return found


def _by_thread(events: Sequence[TraceEvent]) -> dict[tuple[Any, Any], list[TraceEvent]]:
    threads: defaultdict[tuple[Any, Any], list[TraceEvent]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event.get("cat") in ("cpu_op", "user_annotation"):
            threads[event["pid"], event["tid"]].append(event)
    return threads


def _is_step(event: Mapping[str, Any]) -> bool:
    return event["ph"] == "X" and event["name"].startswith(STEP) and event.get("cat") == "user_annotation"


def _named(event: Mapping[str, Any]) -> str:
    name = str(event["name"])
    return f"{name.removeprefix(PHASE)} outside operations" if name.startswith(PHASE) else name
