"""Timelines and critical paths of records made by hand, whose answers are known."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from handmade_search import cluster
from handmade_steps import MS, NOW, happens, machines, record
from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Emulate
from paceline.errors import RunError
from paceline.report.critical_path import CriticalPath, critical_path
from paceline.report.timeline import StepRange, timeline_of
from paceline.report.traces import trace_events, write_operations, write_trace
from paceline.run.record.run import Run
from refusals import raises

# Rank 1 computes 6 ms longer than rank 0, which waits for it.
SLOW_RANK = {
    0: {"data": 1, "compute": 19, "imbalance": 6, "comm": 8, "optimizer": 2},
    1: {"data": 1, "compute": 25, "comm": 8, "optimizer": 2},
}


def path_of(run: Run, steps: str = "3") -> CriticalPath:
    return critical_path(timeline_of(run, StepRange.parse(steps)))


def milliseconds_of(path: CriticalPath, part: str) -> dict[int, Any]:
    return {rank: pytest.approx(1e3 * s) for rank, s in path.seconds_of(part).items()}


def test_a_slow_rank_is_on_the_path_and_who_waits_for_it_is_not(tmp_path: Path) -> None:
    path = path_of(record(tmp_path, SLOW_RANK))
    assert milliseconds_of(path, "compute") == {1: 75.0}
    assert milliseconds_of(path, "imbalance") == {}
    assert path.total_s == pytest.approx(3 * 36 * MS)
    assert path.sentences == [
        "Steps 6 to 8 took 36.0 ms each. Critical path: 69 % compute on rank 1 (25.0 ms a step), 22 % exposed "
        "communication (8.00 ms a step), 5.6 % optimizer updates on rank 1 (2.00 ms a step) and 2.8 % waiting for data "
        "on rank 1 (1.00 ms a step).",
        "Rank 1 arrives last at all 3 exchanges. Rank 0 waits 6.00 ms for it, mainly because it spends 6.00 ms more on "
        "compute.",
    ]


def test_of_many_ranks_it_is_told_how_much_a_faster_last_one_could_save(tmp_path: Path) -> None:
    others = {rank: {"compute": 20 - rank, "imbalance": 10 + rank, "comm": 5} for rank in range(3)}
    path = path_of(record(tmp_path, {**others, 3: {"compute": 30, "comm": 5}}, plan="dp=4"))
    assert path.sentences[1] == (
        "Rank 3 arrives last at all 3 exchanges. The other ranks wait 11.0 ms for it, mainly because it spends 11.0 ms "
        "more on compute. The second-to-last rank arrives 10.0 ms earlier, so a faster rank 3 saves no more."
    )


def test_ranks_that_come_together_are_not_blamed(tmp_path: Path) -> None:
    same = {rank: {"compute": 20, "comm": 5, "optimizer": 1} for rank in (0, 1)}
    assert path_of(record(tmp_path, same)).sentences[1:] == [
        "The ranks arrive at the exchange together: they wait 0 µs for the last one."
    ]


def test_a_stall_of_a_checkpoint_and_a_wait_for_data_are_on_the_path_of_the_rank_that_has_them(tmp_path: Path) -> None:
    stalled = {
        0: {"checkpoint": 30, "data": 10, "compute": 20, "comm": 5},
        1: {"data": 1, "compute": 20, "imbalance": 39, "comm": 5},
    }
    path = path_of(record(tmp_path, stalled))
    assert milliseconds_of(path, "checkpoint") == {0: 90.0}
    assert milliseconds_of(path, "data") == {0: 30.0}
    assert "mainly because it spends 30.0 ms more on checkpoints" in path.sentences[1]


def test_an_evaluation_between_two_steps_is_on_the_path(tmp_path: Path) -> None:
    run = record(tmp_path, SLOW_RANK, pauses_ms={7: 50.0})
    happens(run, "evaluation", NOW + (6 * 36 + 49) * MS, step=6, metrics={"loss": 1.0})
    path = path_of(run)
    assert sum(path.seconds_of("between").values()) == pytest.approx(50 * MS)
    assert path.total_s == pytest.approx((3 * 36 + 50) * MS)
    assert "32 % between steps (evaluation)" in path.sentences[0]


def test_the_bubble_of_a_pipeline_is_told_with_its_longest_stage(tmp_path: Path) -> None:
    stages = {
        0: {"compute": 30, "bubble": 10, "comm": 2},
        1: {"compute": 12, "bubble": 27, "imbalance": 1, "comm": 2},
    }
    path = path_of(record(tmp_path, stages, plan="pp=2 microbatches=4"))
    assert milliseconds_of(path, "bubble") == {0: 30.0}
    assert any(
        "stage of rank 0 computes longest, 30.0 ms a step. The shortest takes 12.0 ms" in s for s in path.sentences
    )


def test_replicas_that_step_alone_wait_only_where_they_agree(tmp_path: Path) -> None:
    alone = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]
    other = [1.1, 0.9, 0.7, 0.6, 0.5, 0.4, 0.2, 0.3]  # agreed in steps 2 and 8
    parts = {0: {"compute": 20, "comm": 1, "optimizer": 3}, 1: {"compute": 19, "comm": 2, "optimizer": 3}}
    run = record(tmp_path, parts, plan="dp=2 sync=local:6", losses={0: alone, 1: other})
    timeline = timeline_of(run, StepRange.parse("3-8"))
    assert sorted(timeline.exchanged) == [2, 8]
    path = critical_path(timeline)
    assert [arrival.step for arrival in path.arrivals] == [8]
    assert milliseconds_of(path, "compute") == {0: 120.0}
    alone_path = path_of(run, "4-6")
    assert alone_path.arrivals == []
    assert alone_path.sentences[-1].startswith("The replicas did not communicate in any of these steps")


def test_what_the_record_cannot_tell_is_said(tmp_path: Path) -> None:
    said = path_of(record(tmp_path, SLOW_RANK, plan="fsdp=2", on=cluster())).sentences[2:]
    assert said == [
        "Communication inside the layers (fsdp=2) is counted as compute.",
        "On accelerators, the rank that arrives last is inferred from the times of the previous step.",
    ]


def test_hosts_whose_clocks_are_seconds_apart_are_aligned_by_what_they_leave_together(tmp_path: Path) -> None:
    timeline = timeline_of(
        record(tmp_path, SLOW_RANK, on=machines("ab", cores=1), clock_s={1: 5.0}), StepRange.parse("3")
    )
    for mine, other in zip(timeline.ranks[0], timeline.ranks[1], strict=True):
        assert mine.synced_s == pytest.approx(other.synced_s, abs=1e-5)
    assert timeline.spread_s == pytest.approx(0.0, abs=1e-5)
    assert timeline.hosts == {0: "a", 1: "b"}


def test_emulated_hosts_have_one_clock(tmp_path: Path) -> None:
    on = Cluster(name="two", emulate=Emulate(hosts=2))
    timeline = timeline_of(record(tmp_path, SLOW_RANK, on=on, clock_s={1: 0.01}), StepRange.parse("3"))
    assert timeline.spread_s is None
    assert timeline.ranks[1][0].synced_s - timeline.ranks[0][0].synced_s == pytest.approx(0.01, abs=1e-5)


def test_steps_follow_each_other_without_holes_where_times_of_day_are_in_milliseconds(tmp_path: Path) -> None:
    odd = {rank: {"compute": 3.217, "comm": 0.641} for rank in (0, 1)}
    timeline = timeline_of(record(tmp_path, odd, decimals=3, steps=200), StepRange.parse("150"))
    for steps in timeline.ranks.values():
        assert all(later.start_s == pytest.approx(before.end_s, abs=1e-9) for before, later in pairwise(steps))


def test_a_line_that_was_written_late_moves_no_step(tmp_path: Path) -> None:
    run = record(tmp_path, SLOW_RANK)
    file = run.path / "steps" / "rank-0.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[5]["time"] += 0.02
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    timeline = timeline_of(run, StepRange.parse("3"))
    for mine, other in zip(timeline.ranks[0], timeline.ranks[1], strict=True):
        assert mine.synced_s == pytest.approx(other.synced_s, abs=1e-5)


def test_the_newest_steps_are_those_that_all_ranks_have(tmp_path: Path) -> None:
    run = record(tmp_path, SLOW_RANK)
    file = run.path / "steps" / "rank-1.jsonl"
    file.write_text("".join(f"{line}\n" for line in file.read_text().splitlines()[:-2]))
    timeline = timeline_of(run, StepRange.parse("2"))
    assert (timeline.first, timeline.last) == (5, 6)


def test_steps_that_are_not_there_are_refused_with_those_that_are(tmp_path: Path) -> None:
    run = record(tmp_path, SLOW_RANK)
    with raises(RunError, "report.steps_not_recorded", earliest=1, first=20, last=30, latest=8):
        timeline_of(run, StepRange.parse("20-30"))
    (tmp_path / "none").mkdir()
    with raises(RunError, "report.no_timeline"):
        timeline_of(record(tmp_path / "none", {}), StepRange.parse("3"))


@pytest.mark.parametrize("text", ["0", "-3", "5-4", "three", "1-", "", "0-2"])
def test_other_words_for_steps_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="neither a number of steps"):
        StepRange.parse(text)


def slices_by_process(events: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    for process in {event["pid"] for event in events}:
        yield [event for event in events if event["pid"] == process and event["ph"] == "X"]


def test_slices_are_nested_and_arrows_lie_inside_of_them(tmp_path: Path) -> None:
    run = record(tmp_path, SLOW_RANK, pauses_ms={7: 50.0}, use={"memory_bytes": 2**20})
    happens(run, "slow_rank", NOW + 7 * 36 * MS, rank=1)
    events = list(trace_events(path_of(run, "2-8")))
    for slices in slices_by_process(events):
        open_until: list[float] = []
        for one in sorted(slices, key=lambda s: (s["ts"], -s["dur"])):
            while open_until and open_until[-1] <= one["ts"] + 1e-6:
                open_until.pop()
            assert not open_until or one["ts"] + one["dur"] <= open_until[-1] + 1e-6, one
            open_until.append(one["ts"] + one["dur"])
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(starts) == 7
    assert starts.keys() == ends.keys()
    for number, start in starts.items():
        assert slice_at(events, start)["name"] == "compute"
        assert slice_at(events, ends[number])["name"] == "exposed communication"
        assert (start["pid"], ends[number]["pid"]) == (11, 10)
    assert {event["name"] for event in events if event["ph"] == "C"} == {"memory", "loss"}
    assert [event["name"] for event in events if event["ph"] == "i"] == ["slow_rank"]


def slice_at(events: Sequence[dict[str, Any]], arrow: dict[str, Any]) -> dict[str, Any]:
    """The innermost slice at an arrow's end."""
    around = [
        event
        for event in events
        if event["ph"] == "X" and event["pid"] == arrow["pid"]
        if event["ts"] < arrow["ts"] < event["ts"] + event["dur"]
    ]
    return min(around, key=lambda event: float(event["dur"]))


def test_losses_that_are_not_finite_leave_a_file_that_is_json(tmp_path: Path) -> None:
    run = record(tmp_path, SLOW_RANK, loss=None, lr=float("nan"), epoch=[1])
    file = write_trace(path_of(run), tmp_path / "trace.json", {"run": "run"})
    trace = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert trace["otherData"]["critical_path"][0].startswith("Steps 6 to 8 took 36.0 ms each")


def test_a_collective_that_outlives_its_step_has_a_track_of_its_own(tmp_path: Path) -> None:
    def slice_of(name: str, ts: float, dur: float) -> dict[str, Any]:
        about = {"ph": "X", "cat": "user_annotation", "pid": 77, "tid": 77}
        return {**about, "name": name, "ts": 5e12 + ts, "dur": dur}

    slices = [slice_of("paceline step 1", 0, 100), slice_of("aten::mm", 10, 20), slice_of("shm:all_reduce", 60, 80)]
    arrow = {"ph": "s", "id": 5, "pid": 77, "tid": 77, "ts": 5e12 + 11, "cat": "fwdbwd", "name": "fwdbwd"}
    trace = {"baseTimeNanoseconds": 10**18, "traceEvents": [*slices, arrow]}
    file = write_operations([trace, trace | {"baseTimeNanoseconds": 10**18 + 50_000}], tmp_path / "both.json", {})
    events = json.loads(file.read_text())["traceEvents"]
    places = {(e["pid"], e["name"]): (e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert places[1000, "aten::mm"] == (77, 10, 20)
    assert places[1000, "shm:all_reduce"] == (1 << 24, 60, 80)
    assert places[2000, "paceline step 1"] == (77, 50, 100)
    arrows = [event["id"] for event in events if event["ph"] == "s"]
    assert len(set(arrows)) == 2
