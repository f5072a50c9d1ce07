"""The page of a run: what its files say, in a real browser, and a word on whatever is missing or broken in them."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest

from browser import Browser
from paceline import units
from paceline.cli.train import summary
from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Device, Host
from paceline.engine.meter import PARTS
from paceline.errors import RunError
from paceline.report.advice import measured
from paceline.report.charts import Points
from paceline.report.diagnosis import diagnosis_of
from paceline.report.run_page import losses, shares, staleness, view_of, write_run_page
from paceline.report.run_record import RunRecord
from paceline.run.record.run import WARM_UP_STEPS, Run, Speed
from paceline.run.record.utilization import FLOPS, PEAK, flops_of, peak_of
from ranks import Ranks
from refusals import raises
from small_jobs import new_run, points, small_job, train_as_rank, train_here


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 steps with validation measurements; tests change copies of it."""
    job = small_job(data=points(held_out=0.2), metrics=["accuracy"], evaluate={"every_steps": 5})
    return train_here(tmp_path_factory.mktemp("trained") / "run", job).path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Run:
    return Run(shutil.copytree(trained, tmp_path / "run"))


def shorten(run: Run, steps: int) -> None:
    """Cut the record of rank 0 after so many steps, as a crash would."""
    file = run.path / "steps" / "rank-0.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:steps]))


def rewrite(run: Run, rank: int, change: Any) -> None:
    """Change every step's record of a rank."""
    source = run.path / "steps" / "rank-0.jsonl"
    lines = [change(json.loads(line)) for line in source.read_text().splitlines()]
    (run.path / "steps" / f"rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.needs_chromium
def test_the_page_of_a_run_on_two_ranks_shows_what_they_wrote(ranks: Ranks, browser: Browser, tmp_path: Path) -> None:
    run = new_run(
        tmp_path / "run",
        small_job(data=points(held_out=0.2), metrics=["accuracy"], evaluate={"every_steps": 5}),
        plan="dp=2",
    )
    ranks(2, train_as_rank, run.path)
    browser.open(write_run_page(Run(run.path)))

    assert browser.one("#verdict").text.startswith("Trained 20 steps in ")
    figures = {card.get_attribute("data-figure"): card for card in browser.all(".card")}
    assert list(figures) == ["throughput", "training_time", "step_time", "held_out"]
    shown = {
        name: float(card.find_element("css selector", ".value").get_attribute("data-value") or "nan")
        for name, card in figures.items()
    }
    assert shown["throughput"] == Run(run.path).throughput
    assert shown["training_time"] == Run(run.path).training_time_s
    assert shown["held_out"] == Run(run.path).metrics["accuracy"]

    charts = [node.get_attribute("id") for node in browser.all(".plot")]
    assert charts == [
        f"plot-{n}"
        for n in (
            "breakdown",
            "goodput",
            "loss-steps",
            "loss-time",
            "metric-0",
            "throughput",
            "parts",
            "memory_now",
            "wire",
        )
    ]
    assert len(browser.all("#plot-breakdown .trace.bars")) == len(PARTS)
    assert len(browser.all("#plot-breakdown [data-name=compute] .point")) == 2
    assert len(browser.all("#plot-loss-steps .trace.points")) == 2, "training and held out"
    assert len(browser.all("#plot-parts .trace.points")) == len(PARTS)
    assert len(browser.all("#plot-memory_now .trace.points")) == 2
    assert browser.all("#plot-memory_now .ytitle")[0].text == "MiB", "as everywhere else"
    assert browser.console() == []
    assert browser.requests() == []
    browser.open(run.path / "report.html", width=400)
    assert browser.run("return document.documentElement.scrollWidth") == 400
    assert len(browser.all("#events tr")) > 3


def test_one_step_time_stands_in_cards_sentences_the_breakdown_and_in_why(run: Run) -> None:
    view = view_of(run)
    [parts] = view["parts_s"].values()
    median_s = statistics.median(s["step_s"] for s in run.steps()[WARM_UP_STEPS:])
    assert sum(parts.values()) == pytest.approx(median_s, rel=1e-3)
    speed = run.speed
    assert speed is not None
    assert speed.step_s == median_s
    assert view["speed"] == speed
    assert measured(run).speed == speed
    took = str(units.seconds(median_s))
    assert took in view["sentences"][0]
    assert took in diagnosis_of(run, predicts=False).sentences[0]
    [card] = [card for card in view["cards"] if card.term == "step_time"]
    assert str(card.cell) == took


def test_the_overall_speed_is_told_where_it_is_another(run: Run) -> None:
    lines, samples = run.steps(), sum(step["samples"] for step in run.steps())
    speed = Speed.of(lines, training_time_s=samples / 100.0)
    assert speed is not None
    assert speed.overall == pytest.approx(100.0)
    assert speed.overall_if_other == speed.overall
    same = Speed.of(lines, training_time_s=samples / (0.95 * speed.throughput))
    assert same is not None
    assert same.overall_if_other is None


def test_the_mfu_is_shown_where_the_peak_of_the_devices_is_known(run: Run) -> None:
    assert "mfu" not in [card.term for card in view_of(run)["cards"]], "the run is on a CPU"
    assert "\nmfu " not in summary(run)
    file = run.path / "events.jsonl"
    events = [json.loads(line) for line in file.read_text().splitlines()]
    start = next(event for event in events if event["event"] == "start")
    gpu = Host(name="a", cores=8, memory_bytes=2**38, gpus=(Device(index=0, name="H100-SXM", memory_bytes=2**36),))
    start[FLOPS], start[PEAK] = flops_of(run.job), peak_of(run.job, run.plan, Cluster(hosts=(gpu,)))
    file.write_text("".join(json.dumps(event) + "\n" for event in events))
    [card] = [card for card in view_of(run)["cards"] if card.term == "mfu"]
    assert card.cell.value == pytest.approx(run.throughput * start[FLOPS]["weights"] / start[PEAK], rel=0.01)
    assert "\nmfu " in summary(run)


def test_shares_that_followed_speeds_are_drawn_in_percent_of_full_batches_and_others_are_not(run: Run) -> None:
    assert list(shares(RunRecord.read(run))) == []
    tail = {7: {"samples": 6}, 1: {"local_samples": "five"}}
    for rank, own in ((1, 3), (0, 5)):
        rewrite(run, rank, lambda line, own=own: line | {"local_samples": own} | tail.get(line["step"], {}))
    event = {"event": "balance", "time": 1e9, "step": 2, "shares": [5, 3], "slow": [], "slow_changed": True}
    with (run.path / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    [chart] = shares(RunRecord.read(run))
    full = [step for step in range(2, 21) if step != 7]
    assert [list(line.x) for line in chart.figure.traces] == [full, full]
    assert [set(line.y) for line in chart.figure.traces] == [{62.5}, {37.5}]
    told = [sentence for _, sentence, _ in view_of(run)["happened"]]
    assert "the shares of the batch follow the replicas' speeds from step 2 on: 5, 3 samples" in told


def as_replicas(run: Run, plan: str, use: dict[str, float], events: list[dict[str, Any]], comm_s: float) -> Run:
    """The run as two ranks would have written it that sent so much in every step."""
    (run.path / "plan.txt").write_text(f"{plan}\n")
    times = {f"{part}_s": 0.0 for part in PARTS} | {"step_s": 0.2, "comm_s": comm_s, "compute_s": 0.2 - comm_s}
    for rank in (1, 0):
        rewrite(
            run,
            rank,
            lambda line, rank=rank: line | times | {"use": {name: value * (1 + rank) for name, value in use.items()}},
        )
    with (run.path / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event | {"time": 1e9}) + "\n" for event in events)
    return Run(run.path)


@pytest.mark.needs_chromium
def test_what_replicas_send_and_compression_saves_stands_in_the_page(run: Run, browser: Browser) -> None:
    links = {
        "host-0": {"sent_bytes": 2_000_000, "received_bytes": 1_500_000},
        "host-1": {"sent_bytes": 7, "received_bytes": 9},
    }
    events: list[dict[str, Any]] = [
        {"event": "sync", "said": ["ring, for it is <fast>"]},
        *[{"event": "links", "links": links}] * 2,
    ]
    use = {"wire_bytes": 2500, "saved_bytes": 7500, "compression_error": 0.02}
    browser.open(write_run_page(as_replicas(run, "dp=2 compress=int8", use, events, comm_s=0.15)), width=400)
    paragraphs = [p.text for p in browser.all("#sync .lead p")]
    assert paragraphs == [
        "ring, for it is <fast>",
        "Communication takes 75 % of a step, even with this sync rule or codec.",
    ]
    shown = {
        row.get_attribute("data-figure"): row.find_element("css selector", "td").get_attribute("data-value")
        for row in browser.all("#sync tr[data-figure]")
    }
    assert {name: float(value or "nan") for name, value in shown.items()} == {
        "wire": 5000,
        "saved": 15000,
        "compression_error": 0.02,
    }
    cells = [cell.text for cell in browser.all("#links td[data-value]")]
    assert cells == ["3.81 MiB", "2.86 MiB", "14 B", "18 B"], "of both attempts"
    assert len(browser.all("#plot-wire .trace.points")) == 2, "sent, and what it would be without compression"
    assert len(browser.all("#plot-error .trace.points")) == 1
    assert browser.run("return document.documentElement.scrollWidth") == 400
    assert browser.console() == []


def test_where_communication_dominates_a_page_says_what_sends_less_and_how_to_measure_it(run: Run) -> None:
    text = write_run_page(as_replicas(run, "dp=2", {"wire_bytes": 2500, "saved_bytes": 0}, [], comm_s=0.15)).read_text()
    assert "of a step. Replicas send less with compress= (int8 about a quarter)" in text
    assert 'id="plot-error"' not in text
    text = write_run_page(as_replicas(run, "dp=2", {"wire_bytes": 2500, "saved_bytes": 0}, [], comm_s=0.05)).read_text()
    assert 'id="sync"' in text
    assert "Replicas send less" not in text


def test_a_run_of_one_replica_says_nothing_of_agreement(run: Run) -> None:
    text = write_run_page(run).read_text()
    assert 'id="sync"' not in text
    assert 'id="plot-wire"' not in text


@pytest.mark.parametrize(
    ("waits", "sentence"),
    [
        ([0.08, 0.001, 0.08], "The others wait for rank 1: 80.0 ms of each step, 40 %."),
        ([0.04, 0.04, 0.05], "Each rank waits for others, up to 50.0 ms a step"),
        ([0.001, 0.0, 0.001], None),
    ],
    ids=["one rank is slow", "in turn", "none"],
)
def test_the_rank_that_others_wait_for_is_named(waits: list[float], sentence: str | None, run: Run) -> None:
    (run.path / "plan.txt").write_text("dp=3\n")
    for rank in (1, 2, 0):
        times = {f"{part}_s": 0.0 for part in PARTS} | {
            "step_s": 0.2,
            "imbalance_s": waits[rank],
            "compute_s": 0.2 - waits[rank],
        }
        rewrite(run, rank, lambda line, times=times: line | times)
    sentences = view_of(Run(run.path))["sentences"]
    assert sentences[0].startswith("A step takes 200 ms in the median: ")
    assert sentence is None or sentence in sentences[1]
    assert len(sentences) == (1 if sentence is None else 2)


def test_a_run_without_a_step_is_an_error_that_says_how_many_are_needed(run: Run) -> None:
    shorten(run, 0)
    with raises(RunError, "report.no_steps", needed=6):
        write_run_page(run)
    (run.path / "steps" / "rank-0.jsonl").unlink()
    with raises(RunError, "report.no_steps"):
        write_run_page(run)
    assert not (run.path / "report.html").exists()


@pytest.mark.parametrize("steps", [1, WARM_UP_STEPS])
def test_a_run_no_longer_than_the_warm_up_shows_its_loss_and_says_what_is_not_shown(steps: int, run: Run) -> None:
    shorten(run, steps)
    text = write_run_page(run).read_text()
    assert f"they need 6 timed steps, as the first 5 are warm-up, and this run has {steps}." in text
    assert 'id="plot-loss-steps"' in text
    assert 'id="plot-breakdown"' not in text
    assert "needs 6 steps" in text


def test_one_step_more_than_the_warm_up_is_enough(run: Run) -> None:
    shorten(run, WARM_UP_STEPS + 1)
    text = write_run_page(run).read_text()
    assert 'id="plot-breakdown"' in text
    assert 'id="warnings"' not in text


@pytest.mark.parametrize(
    "broken",
    [b'{"step": 12, "lo', b"\xff\xfe\x00\n", b"42\n", b'{"step": 12}\n', b'{"step": "x", "loss": []}\n'],
    ids=["cut short", "no text", "no record", "no times", "no numbers"],
)
def test_broken_lines_are_left_out_and_counted(broken: bytes, run: Run) -> None:
    file = run.path / "steps" / "rank-0.jsonl"
    whole = RunRecord.read(run)
    file.write_bytes(file.read_bytes() + broken)
    record = RunRecord.read(run)
    assert record.gaps == [
        *whole.gaps,
        "1 line of steps/rank-0.jsonl cannot be read and is left out. A crash may cut a line short.",
    ]
    assert record.ranks == whole.ranks
    assert record.gaps[-1] in write_run_page(run).read_text()


def test_missing_files_are_named_and_the_rest_is_shown(run: Run) -> None:
    (run.path / "plan.txt").write_text("dp=2\n")
    (run.path / "environment.json").write_text("{")
    (run.path / "events.jsonl").unlink()
    text = write_run_page(run).read_text()
    for words in (
        "steps/rank-1.jsonl is missing: rank 1 is not shown.",
        "environment.json is missing or cannot be read",
        "has no event",
    ):
        assert words in text
    assert "20 steps so far: the run has not ended, or it crashed." in text
    assert 'id="plot-breakdown"' in text


def test_losses_and_metrics_that_are_not_finite_are_gaps(run: Run) -> None:
    rewrite(run, 0, lambda line: line | ({"loss": None} if line["step"] > 7 else {}))
    events = run.path / "events.jsonl"
    events.write_text(re.sub(r'"accuracy": [\d.]+', '"accuracy": NaN', events.read_text()))
    write_run_page(run)
    drawn = next(losses(RunRecord.read(run))).figure.traces[0]
    assert list(drawn.y)[6:9] == [pytest.approx(run.losses[6], rel=1e-5), None, None]
    rewrite(run, 0, lambda line: line | {"loss": None})
    assert 'id="plot-loss-steps"' in write_run_page(run).read_text()


def test_the_time_between_two_attempts_is_left_out_and_the_resume_is_marked(tmp_path: Path) -> None:
    path = train_here(tmp_path / "run", small_job(stop={"steps": 9})).path
    run = train_here(path, small_job(stop={"steps": 20}))
    late = {step: (3600.0 if step > 9 else 0.0) for step in range(1, 21)}
    rewrite(run, 0, lambda line: line | {"time": line["time"] + late[line["step"]]})
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    resumed = next(i for i, e in enumerate(events) if e["event"] == "resume")
    for event in events[resumed:]:
        event["time"] += 3600
    (path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    record = RunRecord.read(Run(path))
    assert record.clock_s == sorted(record.clock_s)
    assert record.clock_s[-1] < 600
    text = write_run_page(Run(path)).read_text()
    assert ">resume</text>" in text
    assert "resumed at step 9" in text


@pytest.mark.needs_chromium
def test_a_run_that_was_disturbed_shows_what_that_cost(run: Run, browser: Browser) -> None:
    """Ten seconds are lost before step 11, six of them to a restart of ranks that had lost a step."""
    first = run.steps()[0]["time"] - 1
    times = {f"{part}_s": 0.0 for part in PARTS} | {"step_s": 1.0, "compute_s": 1.0}
    rewrite(run, 0, lambda line: line | times | {"time": first + line["step"] + (10 if line["step"] > 10 else 0)})
    file = run.path / "steps" / "rank-0.jsonl"
    again = json.loads(file.read_text().splitlines()[9]) | {"time": first + 20}
    with file.open("a") as lines:
        lines.write(json.dumps(again) + "\n")
    events: list[dict[str, Any]] = [
        {"event": "launch", "time": first - 2},
        {"event": "start", "time": first, "total_steps": 20},
        {"event": "restart", "time": first + 16, "reason": "rank 1 was killed.", "attempt": 1},
        {"event": "resume", "time": first + 18, "step": 9, "total_steps": 20},
        {"event": "lost", "time": first + 23.5, "rank": 1, "reason": "killed", "generation": 1, "again": True},
        {"event": "healed", "time": first + 25.5, "rank": "<script>"},
        {"event": "end", "time": first + 30, "reason": "steps", "step": 20, "elapsed_s": 30},
    ]
    (run.path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))

    browser.open(write_run_page(Run(run.path)))
    assert browser.one("#goodput .lead p").text.startswith("Goodput is 61 % of 32.0 s; lost: restarts 9.00 s, ")
    shown = {
        row.get_attribute("data-figure"): [
            float(cell.get_attribute("data-value") or "nan") for cell in row.find_elements("css selector", "td")
        ]
        for row in browser.all("#wall tr")
    }
    assert {name: cells[0] for name, cells in shown.items()} == pytest.approx(
        {"wall_useful": 19.5, "wall_start": 2.0, "wall_restart": 9.0, "wall_recovery": 0.5, "wall_replay": 1.0},
        abs=0.01,
    )
    assert sum(cells[1] for cells in shown.values()) == pytest.approx(1)
    marks = [text.text for text in browser.all("#plot-goodput .note")]
    assert marks == ["restart", "rank 1 lost", "rank <script> healed"]
    assert {"rank lost", "healed"} <= {text.text for text in browser.all("#plot-loss-steps .note")}
    assert browser.console() == []


def test_what_happened_at_the_same_moment_is_one_mark(run: Run) -> None:
    moment = run.steps()[9]["time"] - 1e-3
    rewound = [
        {"event": "nonfinite", "time": moment, "step": 10, "problem": "the loss of step 10 is NaN", "policy": "rewind"},
        {"event": "rewind", "time": moment, "from_step": 10, "to_step": 8},
    ]
    with (run.path / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in rewound)
    text = write_run_page(run).read_text()
    assert text.count(">not finite, rewind</text>") == 2, "over steps and over time"
    assert "went back from step 10 to step 8" in text


def test_long_runs_are_thinned_and_the_page_says_so(run: Run) -> None:
    rewrite(run, 0, lambda line: line)
    first = json.loads((run.path / "steps" / "rank-0.jsonl").read_text().splitlines()[0])
    lines = [
        json.dumps(first | {"step": n, "time": first["time"] + 0.01 * n, "loss": float(n)}) for n in range(1, 5001)
    ]
    (run.path / "steps" / "rank-0.jsonl").write_text("\n".join(lines) + "\n")
    page = write_run_page(run)
    assert "The line is the mean of each 13 steps" in page.read_text()
    drawn = next(losses(RunRecord.read(run))).figure.traces[0]
    assert isinstance(drawn, Points)
    assert (drawn.x[0], drawn.y[0]) == (13, 7.0)
    assert drawn.low is not None
    assert drawn.high is not None
    assert (drawn.low[0], drawn.high[0]) == (1.0, 13.0), "no spike is lost"
    assert len(drawn.x) == 385
    assert page.stat().st_size < 400_000


def test_synthetic_data_is_labelled(tmp_path: Path) -> None:
    data = {"kind": "synthetic", "samples": 70, "held_out": 0}
    run = train_here(tmp_path / "run", small_job(model={"zoo": "mlp", "args": {"hidden": 8}}, data=data))
    text = write_run_page(run).read_text()
    assert 'loud">synthetic data' in text
    assert "The data is synthetic" in text


def test_a_run_that_reached_its_target_says_the_time_to_it(tmp_path: Path) -> None:
    run = train_here(tmp_path / "run", small_job(stop={"steps": 200, "loss_below": 0.9}))
    text = write_run_page(run).read_text()
    assert "Reached its target (" in text
    assert 'data-figure="time_to_target"' in text


def test_the_staleness_of_each_worker_is_shown_and_what_is_damaged_is_left_out(run: Run) -> None:
    assert not list(staleness(RunRecord.read(run)))
    whole = {"pushes": 4, "bytes": 2**20, "late": 1, "staleness": {"0": 3, "2": 1}}
    damaged = [None, {"pushes": 3}, whole | {"staleness": {"x": 1}}, whole | {"bytes": "many"}]
    workers = {"rank 0": whole, **{f"rank {n}": counts for n, counts in enumerate(damaged, 1)}}
    with open(run.path / "events.jsonl", "a") as file:
        file.write(json.dumps({"event": "served", "time": 1.0, "step": 2, "workers": workers}) + "\n")
    [chart] = staleness(RunRecord.read(run))
    assert chart.note == "rank 0: 4 pieces, 1 MiB pushed, 1 too late."
    [line] = chart.figure.traces
    assert (list(line.x), list(line.y)) == ([0, 2], [75.0, 25.0])
