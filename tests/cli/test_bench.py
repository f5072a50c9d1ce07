"""`paceline bench`: real runs from command to report, interruptions, failures."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from commands import ended, paceline, started, wait_for, wait_for_step, write_job
from paceline_lab.scaling.result import Report

TWO_DEVICES = ("--devices", "1,2", "--out", "b")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path / "job.yaml")


def measured(folder: Path) -> list[dict[str, Any]]:
    file = folder / "b" / "measured.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_benchmark_is_scaling_compare_or_simulate(job: Path, tmp_path: Path) -> None:
    shown = paceline("bench", job, folder=tmp_path, columns=200)
    assert shown.code == 2
    told = " ".join(shown.err.replace("│", " ").split())
    assert all(f"bench {name}" in told for name in ("scaling", "compare", "simulate"))
    assert not (tmp_path / "bench").exists()


def test_options_that_mean_nothing_for_a_comparison_of_systems_are_refused(job: Path, tmp_path: Path) -> None:
    for options in (("--devices", "1,2"), ("--hosts", "a,b")):
        assert paceline("bench", "compare", job, *options, folder=tmp_path).code == 2
    assert paceline("bench", "scaling", job, "--kill-rank", folder=tmp_path).code == 2
    unknown = paceline("bench", "compare", job, "--systems", "dpd", folder=tmp_path)
    assert 'Did you mean "ddp"?' in unknown.error
    assert not (tmp_path / "bench").exists()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_comparison_that_ctrl_c_ends_keeps_what_it_measured_and_goes_on(job: Path, tmp_path: Path) -> None:
    command = ("paceline", "bench", "compare", job, "--systems", "plain", "--repeat", 2, "--steps", 12, "--out", "c")
    kept = tmp_path / "c" / "measured.jsonl"
    with started(*command, folder=tmp_path) as process:
        wait_for(lambda: kept.exists() and kept.read_text().count("\n") > 0, process)
        process.send_signal(signal.SIGINT)
        outcome = ended(process, deadline_s=60)
    assert outcome.code == 130
    assert outcome.says("SIGINT", "paceline bench compare", "--out c")
    assert list((tmp_path / "c" / "runs").iterdir()) == []
    before = kept.read_text().splitlines()
    with started(*command, folder=tmp_path) as process:
        assert ended(process, deadline_s=200).code == 0
    assert kept.read_text().splitlines()[: len(before)] == before
    assert json.loads((tmp_path / "c" / "report.json").read_text())["repeats"] == 2


@pytest.mark.slow
@pytest.mark.timeout(400)  # fourteen starts
def test_a_weak_comparison_trains_the_batch_of_all_ranks_to_the_losses_of_one_process(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", data={"kind": "synthetic", "samples": 4096, "held_out": 0})
    command = (
        "paceline",
        "bench",
        "compare",
        job,
        "--systems",
        "plain,ddp",
        "--repeat",
        1,
        "--steps",
        12,
        "--out",
        "c",
    )
    with started(*command, "--weak", "--json", folder=tmp_path) as process:
        outcome = ended(process, deadline_s=360)
    assert outcome.code == 0, outcome.err
    found = json.loads((tmp_path / "c" / "report.json").read_text())
    assert found["scaling"] == "weak"
    assert found["global_batch"] == 16 * found["ranks"]
    assert found["left_out"] == {}
    assert {way["way"] for way in found["ways"]} >= {"paceline", "plain", "ddp", "ddp-tuned"}
    assert all(way["same"] for way in found["ways"])
    assert outcome.says("weak speedup", "one core, batch 16", f"{16 * found['ranks']}, 16 a rank")
    figures = json.loads(outcome.out.splitlines()[-1])["figures"]
    assert {"weak_efficiency_paceline", "weak_efficiency_ddp", "weak_speedup_ddp_tuned"} <= figures.keys()
    assert "weak scaling" in (tmp_path / "c" / "report.html").read_text()
    assert "scaling" in paceline(*command[1:], folder=tmp_path).error, "the strong one does not mix with it"


@pytest.mark.timeout(240)  # six starts of ranks
def test_one_and_two_devices_are_measured_in_turn_and_reported(job: Path, tmp_path: Path) -> None:
    with started(
        "paceline", "bench", "scaling", job, *TWO_DEVICES, "--repeat", 2, "--steps", 12, "--json", folder=tmp_path
    ) as process:
        outcome = ended(process, deadline_s=200)
    assert outcome.code == 0, outcome.err
    assert outcome.says("run 6 of 6", "1 core ·", "strong  1 core", "weak    2 cores")
    assert outcome.says("report   b/report.html", "on synthetic data", "--steps 12")
    assert outcome.says("With 2 repeats there is no confidence interval"), "so two runs claim no speedup"
    assert "×" not in outcome.out
    assert "\x1b" not in outcome.out + outcome.err

    runs = measured(tmp_path)
    assert [run["setting"] for run in runs] == [
        "1-device",
        "2-devices",
        "2-devices-weak",
        "2-devices",
        "2-devices-weak",
        "1-device",
    ]
    assert [run["samples"] for run in runs[:3]] == [16, 16, 16]
    # an epoch of 48 is a batch of 32 and one of 16
    assert outcome.says("2 cores, weak: most steps had 16 samples")
    assert all(run["steps"] == 12 and len(run["ranks"]) == (2 if run["setting"] != "1-device" else 1) for run in runs)
    assert not list(tmp_path.glob("b/runs/*/checkpoints"))

    report = Report.load(tmp_path / "b" / "report.json")
    assert report.complete
    assert [(s.devices, s.scaling, len(s.runs)) for s in report.settings] == [
        (1, "strong", 2),
        (2, "strong", 2),
        (2, "weak", 2),
    ]
    last = json.loads(outcome.out.splitlines()[-1])
    assert last["figures"]["throughput_2_devices"] == report.settings[1].throughput.middle
    assert last["environment"]["cores"] == report.environment["cores"]
    assert "<html" in (tmp_path / "b" / "report.html").read_text()


@pytest.mark.slow
def test_an_interrupted_benchmark_keeps_what_it_measured_and_goes_on(job: Path, tmp_path: Path) -> None:
    command = ("bench", "scaling", job, *TWO_DEVICES, "--repeat", 1, "--steps", 600, "--no-weak")
    with started("paceline", *command, folder=tmp_path) as process:
        wait_for_step(1, tmp_path / "b" / "runs" / "2-devices-r1", process)
        process.send_signal(signal.SIGINT)
        outcome = ended(process)
    assert outcome.code == 130, outcome.err
    assert outcome.says(
        "1 of 2 runs were measured",
        "stopped  SIGINT; the finished runs are kept. To continue: paceline bench",
        "--out b",
    )
    before = measured(tmp_path)
    assert [run["setting"] for run in before] == ["1-device"]
    assert not Report.load(tmp_path / "b" / "report.json").complete

    outcome = paceline(*command, folder=tmp_path)
    assert outcome.code == 0, outcome.err
    assert outcome.says("run 2 of 2")
    assert "run 1 of 2" not in outcome.err
    assert measured(tmp_path)[:1] == before
    assert [run["setting"] for run in measured(tmp_path)] == ["1-device", "2-devices"]
    assert Report.load(tmp_path / "b" / "report.json").complete


def test_an_interrupt_before_the_first_step_leaves_a_benchmark_to_go_on_with_for_the_same_job(
    job: Path, tmp_path: Path
) -> None:
    with started("paceline", "bench", "scaling", job, *TWO_DEVICES, folder=tmp_path) as process:
        wait_for((tmp_path / "b" / "runs" / "1-device-r1" / "events.jsonl").exists, process)
        process.send_signal(signal.SIGINT)
        outcome = ended(process)
    assert outcome.code == 130, outcome.err
    assert outcome.says("stopped  SIGINT", "paceline bench scaling", "--out b")
    assert "failed" not in outcome.err
    assert (tmp_path / "b" / "protocol.json").exists()

    write_job(job, global_batch=24)
    outcome = paceline("bench", "scaling", job, "--devices", "1", "--out", "b", folder=tmp_path)
    assert outcome.code == 1
    assert outcome.error.startswith("b belongs to another benchmark: job.global_batch was 16, is 24; settings.")


def test_a_setting_that_fails_is_told_and_the_others_are_kept(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\nfrom torch import nn\n\n\n"
        "def net() -> nn.Module:\n"
        "    assert os.environ['WORLD_SIZE'] == '1', 'made for one'\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))\n"
    )
    job = write_job(
        tmp_path / "job.yaml",
        model={"factory": "mine.py:net"},
        data={"kind": "synthetic", "samples": 48, "shape": [1, 28, 28]},
    )
    outcome = paceline("bench", "scaling", job, *TWO_DEVICES, "--repeat", 2, "--steps", 8, "--no-weak", folder=tmp_path)
    assert outcome.code == 1
    assert outcome.says("2 cores: failed", "made for one", "warning  2 cores could not be measured")
    assert outcome.says("paceline: 2 cores could not be measured: rank")
    assert "Traceback" not in outcome.out + outcome.err
    assert "AssertionError: made for one" in (tmp_path / "b" / "failed-1.txt").read_text()
    assert [run["setting"] for run in measured(tmp_path)] == ["1-device", "1-device"]
    assert (tmp_path / "b" / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--devices", "one"], 2, "is not a list of numbers such as 1,2"),
        (["--devices", ""], 1, "no number of devices is given"),
        (["--devices", "0"], 1, "the number of devices must be at least 1, not 0"),
        (["--plans", "dp=1 speed=high"], 1, 'unknown key "speed"'),
        (["--repeat", "0"], 2, "--repeat"),
        (["--steps", "5"], 2, "--steps"),
        (["--out", "job.yaml"], 1, "job.yaml is not a benchmark's directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_work_is_told_before_anything_runs(
    arguments: list[str], code: int, text: str, job: Path, tmp_path: Path
) -> None:
    outcome = paceline("bench", "scaling", job, *arguments, folder=tmp_path, columns=200)
    assert outcome.code == code
    assert outcome.says(text)
    assert not (tmp_path / "bench").exists()
