"""`paceline trace`: the timeline of real runs, and what it says of them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from commands import (
    ended,
    events,
    kill_rank,
    paceline,
    training,
    wait_for_events,
    wait_for_step,
    write_job,
    write_long_job,
    write_slow_job,
)


def test_the_slow_one_of_two_ranks_is_named_and_drawn(tmp_path: Path) -> None:
    job = write_slow_job(tmp_path, stop={"steps": 20})
    assert paceline("train", job, "--plan", "dp=2 balance=off", "--run", "run", folder=tmp_path).code == 0
    shown = paceline("trace", "run", "--steps", "10", folder=tmp_path)
    assert shown.code == 0
    assert shown.says(
        "Steps 11 to 20 took", "compute on rank 1 (", "Rank 1 arrives last at all 10 exchanges. Rank 0 waits",
        "more on compute", "trace run/trace.json",
    )  # fmt: skip
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    told = trace["traceEvents"]
    waits = [event for event in told if event["name"] == "imbalance wait" and event["dur"] > 20_000]
    assert {event["pid"] for event in waits} == {10}
    arrows = [(event["ph"], event["pid"]) for event in told if event["ph"] in "sf" and event["name"] == "waits for"]
    assert arrows == 10 * [("s", 11), ("f", 10)]
    assert trace["otherData"]["critical_path"] == shown.out.splitlines()[:-1]


def test_a_run_is_traced_while_it_trains(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", stop={"steps": 100_000})
    with training(job, tmp_path, "dp=2") as (process, run):
        wait_for_step(20, run, process)
        shown = paceline("trace", run, "--steps", "5-9", "--out", "five.json", folder=tmp_path)
    assert shown.says("Steps 5 to 9 took", "trace five.json")
    steps = [e for e in json.loads((tmp_path / "five.json").read_text())["traceEvents"] if e.get("cat") == "step"]
    assert sorted(event["name"] for event in steps) == sorted(2 * [f"step {number}" for number in range(5, 10)])
    assert not (run / "trace.json").exists()


def test_a_run_that_lost_a_rank_is_traced_through_the_loss(tmp_path: Path) -> None:
    healed = tmp_path / "healed"
    with training(write_long_job(tmp_path, until=healed), tmp_path, "dp=2") as (process, run):
        wait_for_step(5, run, process)
        kill_rank(1, process)
        wait_for_events(run, "healed", 1, process)
        healed.touch()
        assert ended(process).code == 0
    [event] = events(run, "healed")
    around = f"{max(event['step'] - 60, 1)}-{event['step'] + 5}"
    shown = paceline("trace", run, "--steps", around, "--out", "trace.json", folder=tmp_path)
    assert shown.code == 0
    told = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"lost", "healed"} <= {event["name"] for event in told if event["ph"] == "i"}
    for process_id in (1, 10, 11):
        slices = [(event["ts"], event["dur"]) for event in told if event["ph"] == "X" and event["pid"] == process_id]
        assert slices
        assert all(dur >= 0 for _, dur in slices)
    path = sorted((e["ts"], e["ts"] + e["dur"]) for e in told if e.get("cat") == "critical path")
    assert all(before[1] <= later[0] + 0.001 for before, later in pairwise(path))


def test_what_cannot_be_traced_is_an_error_that_says_why(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml")
    assert paceline("train", job, "--plan", "dp=1", "--run", "run", folder=tmp_path).code == 0
    assert "[report.steps_not_recorded]" in paceline("trace", "run", "--steps", "7-9", folder=tmp_path).error
    assert "[run.not_a_run]" in paceline("trace", "absent", folder=tmp_path).error
    assert paceline("trace", "run", "--out", "no/t.json", folder=tmp_path).code == 2, "there is no folder no"
    wrong = paceline("trace", "run", "--steps", "few", folder=tmp_path, columns=200)
    assert wrong.code == 2
    assert wrong.says("'few' is neither a number of steps, such as 3, nor a range of steps")


def test_operations_of_both_ranks_are_in_one_trace_by_name(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", stop={"steps": 12})
    assert paceline("train", job, "--plan", "dp=2", "--run", "run", folder=tmp_path).code == 0
    before = (tmp_path / "run" / "steps" / "rank-0.jsonl").read_bytes()
    shown = paceline("trace", "run", "--steps", "2", "--operations", folder=tmp_path)
    assert shown.code == 0
    assert shown.says("2 steps under the profiler took", "Rank 0 spends most time in", "trace run/operations.json")
    told = json.loads((tmp_path / "run" / "operations.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in told if event["name"] == "process_name"}
    assert names == {1000: "rank 0", 2000: "rank 1"}
    for process in names:
        own = [event for event in told if event["pid"] == process and event["ph"] == "X"]
        steps = [event for event in own if event["name"].startswith("paceline step")]
        assert [event["name"] for event in steps] == ["paceline step 1", "paceline step 2"]
        for step in steps:
            until = step["ts"] + step["dur"]
            # a collective may be told to be over by another thread, a little later
            inside = {event["name"] for event in own if step["ts"] < event["ts"] < until}
            assert {
                "paceline compute",
                "paceline sync",
                "paceline optimizer",
                "shm:all_reduce",
                "aten::addmm",
            } <= inside
    # one clock: the ranks take each step at the same time
    for number in (1, 2):
        [mine, other] = [event for event in told if event["name"] == f"paceline step {number}"]
        assert mine["ts"] < other["ts"] + other["dur"]
        assert other["ts"] < mine["ts"] + mine["dur"]
    assert (tmp_path / "run" / "steps" / "rank-0.jsonl").read_bytes() == before


def test_too_many_operations_and_runs_of_servers_are_refused(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", stop={"steps": 12})
    plan = "dp=2 sync=server:staleness=2"
    assert paceline("train", job, "--plan", plan, "--run", "run", folder=tmp_path).code == 0
    assert "[trace.too_many_steps]" in paceline("trace", "run", "--steps", "51", "--operations", folder=tmp_path).error
    assert "[calibrate.servers]" in paceline("trace", "run", "--operations", folder=tmp_path).error
