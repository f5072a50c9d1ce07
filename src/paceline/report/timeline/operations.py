"""Operations of all ranks in one trace, a process for each rank."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.errors import RunError
from paceline.files import write_whole
from paceline.report.words import listed
from paceline.run.tuning.operations import PHASE, STEP
from paceline.units import count, percent, seconds

_EACH = 1000  # processes of a rank in the trace: its own, and those that stand for its devices
_NOT_ITS_OWN = ("Spans", "Traces")  # processes that hold the profiler's own bounds
_ARROWS = "stf"
_BESIDE = 1 << 24  # the first of the threads that stand for what goes on beside others
_ROUNDING_US = 0.01
Event = dict[str, Any]


def write_operations(traces: Sequence[Mapping[str, Any]], file: Path, about: Mapping[str, Any]) -> Path:
    """Write the traces of all ranks as one.

    Args:
        traces: of torch's profiler, by rank; all on the clock of one machine.
        about: what it is of, for the trace's metadata.

    Raises:
        RunError: the file cannot be written.
    """
    base_ns = min(int(trace["baseTimeNanoseconds"]) for trace in traces)
    events = [
        event
        for rank, trace in enumerate(traces)
        for event in _of_rank(rank, trace, (int(trace["baseTimeNanoseconds"]) - base_ns) / 1e3)
    ]
    # times of a few steps since 1970 in microseconds would be rounded
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
        raise RunError(f"{file} cannot be written: {error.strerror or error}. Name another file with --out.") from error
    return file


def _of_rank(rank: int, trace: Mapping[str, Any], shift_us: float) -> Iterator[Event]:
    """Events of a rank on the common clock, with processes and arrows of its own."""
    steps = [event for event in trace["traceEvents"] if _is_step(event)]
    own = steps[0]["pid"] if steps else None
    processes: dict[Any, int] = {own: (rank + 1) * _EACH}
    for event in trace["traceEvents"]:
        if event.get("pid") in (*_NOT_ITS_OWN, "") or (event["ph"] == "M" and event["name"] == "process_sort_index"):
            continue
        process = processes.setdefault(event["pid"], (rank + 1) * _EACH + len(processes))
        changes: Event = {"pid": process, "ts": event.get("ts", 0.0) + shift_us}
        if event["ph"] in _ARROWS and isinstance(event.get("id"), int):
            changes["id"] = event["id"] + (rank << 32)  # a number: Perfetto takes no other names of arrows
        if event["ph"] == "M" and event["name"] == "process_name":
            what = "" if event["pid"] == own else f": {event['args'].get('name', '')}"
            changes["args"] = {"name": f"rank {rank}{what}"}
        yield event | changes
    for process in processes.values():
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "ts": 0.0, "args": {"sort_index": process}}


def _nested(events: Sequence[Event]) -> Iterator[Event]:
    """Move slices that overlap others, but are not inside them, to other tracks.

    Yields the names of these tracks. The end of a collective may be told by another thread, when the operation that
    began it is long over. Perfetto drops such slices.
    """
    threads: defaultdict[tuple[int, Any], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    lanes: defaultdict[int, list[float]] = defaultdict(list)  # of each process, when the last slice on each ends
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
    """Step time under the profiler, and each rank's longest operations and its collectives.

    Args:
        recorded_s: seconds of a step in the run.
    """
    lengths = [[event["dur"] / 1e6 for event in trace["traceEvents"] if _is_step(event)] for trace in traces]
    steps, step_s = len(lengths[0]), fmean(length for of in lengths for length in of)
    took = f"{count(steps, 'step')} under the profiler took {seconds(step_s)} each"
    said = [f"{took}; in the run one took {seconds(recorded_s)}."]
    for rank, trace in enumerate(traces):
        whole_us = sum(lengths[rank]) * 1e6
        longest = [f"{name} {percent(us / whole_us)}" for name, us in _own_us(trace["traceEvents"]).most_common(4)]
        said.append(f"Rank {rank} spends most time in {listed(longest)}.")
    return said


def _own_us(events: Sequence[Event]) -> Counter[str]:
    """Microseconds of each operation within the steps, without those that it calls.

    What is in no operation, such as waiting, stands under the phase of the step.
    """
    found: Counter[str] = Counter()
    for slices in _by_thread(events).values():
        stack: list[Event] = []
        for event in sorted(slices, key=lambda one: (one["ts"], -one["dur"])):
            while stack and event["ts"] >= stack[-1]["ts"] + stack[-1]["dur"]:
                stack.pop()
            if any(_is_step(one) for one in stack):
                found[_named(event)] += event["dur"]
                if not _is_step(stack[-1]):
                    found[_named(stack[-1])] -= event["dur"]
            stack.append(event)
    return found


def _by_thread(events: Sequence[Event]) -> dict[tuple[Any, Any], list[Event]]:
    threads: defaultdict[tuple[Any, Any], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event.get("cat") in ("cpu_op", "user_annotation"):
            threads[event["pid"], event["tid"]].append(event)
    return threads


def _is_step(event: Mapping[str, Any]) -> bool:
    return event["ph"] == "X" and event["name"].startswith(STEP) and event.get("cat") == "user_annotation"


def _named(event: Mapping[str, Any]) -> str:
    name = str(event["name"])
    return f"no operation of {name.removeprefix(PHASE)}" if name.startswith(PHASE) else name
