"""`--plan auto`: predictions, trials on real ranks, caching, and failing trials."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commands import ended, losses, paceline, started, wait_for, write_job
from paceline.cluster.cluster import Cluster
from paceline.cluster.discover import discover
from paceline.cluster.host import Emulate, Host
from paceline.errors import LaunchError
from paceline.files import cache_folder
from paceline.job.job import Job
from paceline.job.stop import StopSpec
from paceline.planning import history as cache
from paceline.planning.check.plan_errors import auto_plan
from paceline.planning.history import pairs
from paceline.planning.plan import Plan
from paceline.planning.shortlist import ONE_CORE, Forecast, Trial
from paceline.run.record.run import Run
from paceline.run.train import choice_of
from paceline.run.tuning import auto
from paceline.run.tuning.auto import AutoChoice, choose, predicted, remember_run, why_one_process

CLUSTER = discover()
TWO_CORES = Cluster(hosts=(Host(name="a", cpu="AMD EPYC", cores=2, memory_bytes=2**34),))
WITHOUT_BOUND = {"stop": {"loss_below": -1.0}}  # so compiling, which takes long, is not tried
IMAGES = {"kind": "synthetic", "samples": 64, "shape": [3, 8, 8], "held_out": 0}

# A network that is slow or broken by the layout of its input. On ranks, trials go by a clock that it alone moves, so
# that what wins does not depend on the machine.
NETWORK = """
import os, signal, time
import torch
from torch import nn
from paceline.run.tuning import trial

class Clock:
    now = 0.0

    def monotonic(self):
        return self.now

    perf_counter = monotonic

clock = Clock()
if "RANK" in os.environ:
    trial.time = clock

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 10)

    def forward(self, x):
        channels_last = not x.is_contiguous()
        clock.now += 0.005
        {body}
        return self.last(self.convolution(x).flatten(1)).view(len(x), 10)
"""


def network(folder: Path, body: str, **changes: Any) -> Job:
    """A job whose model does `body` in its forward pass."""
    (folder / "net.py").write_text(NETWORK.replace("{body}", body))
    return Job.load(
        write_job(folder / "job.yaml", **({"model": "net.py:Net", "data": IMAGES, **WITHOUT_BOUND} | changes))
    )


def verdicts(choice: AutoChoice) -> dict[str, str]:
    """What was said of each plan and change."""
    left = [line.strip() for line in choice.lines if line.startswith("  not tried (")]
    rows = [re.split(r" {2,}", line.strip()) for line in choice.lines if line.startswith("  ")]
    found = {row[0]: row[-1] for row in rows[1:] if len(row) > 1}
    for why, _, what in (line.removeprefix("not tried (").rpartition("): ") for line in left):
        found |= dict.fromkeys(what.split(", "), f"not tried: {why}")
    return found


def measured_with(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Have plans measured with these settings of the trial."""
    measure = auto.measure
    monkeypatch.setattr(
        auto, "measure", lambda job, cluster, found, tell: measure(job, cluster, replace(found, **settings), tell)
    )


def forecasts(monkeypatch: pytest.MonkeyPatch, *found: Forecast) -> None:
    """Have these be predicted."""
    monkeypatch.setattr(auto, "forecast", lambda *_: list(found))


def steps_of_1_ms(plan: str, ms: float = 1.0) -> Forecast:
    return Forecast(plan, ms / 1e3, ms / 1e3)


def does_not_begin(*_: object, **__: object) -> None:
    pytest.fail("nothing is to be started")


def kept() -> list[Path]:
    """The files of what was measured."""
    return list((cache_folder() / "tuning").glob("*.json"))


def test_a_mistake_in_the_job_is_raised_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    job = Job.load(write_job(tmp_path / "job.yaml", model="cifar_cn"), set=["stop={epochs: 1000}"])
    with pytest.raises(LaunchError) as caught:
        choose(job, CLUSTER, said.append)
    assert (caught.value.code, said) == ("model.unknown", [])


@pytest.mark.slow
def test_the_change_that_helps_is_found_told_kept_and_used_by_the_next_start(tmp_path: Path) -> None:
    slow = "clock.now += 0.0 if channels_last else 0.02"
    network(tmp_path, slow, stop={"loss_below": 1e9})
    first = paceline("train", "job.yaml", folder=tmp_path)
    assert first.code == 0, first.err
    assert first.says("plan auto: measuring plans and settings for this job", "ratio to the first, in the same rounds")
    assert first.says("the plan to begin with")
    row = next(line for line in first.err.splitlines() if line.endswith("  kept"))
    assert "memory_format=channels_last" in row
    assert re.search(
        r"plan auto: .*memory_format=channels_last.*, whose step takes 0\.\d\d of that of (dp=\d+|threads=1); "
        r"measured in [\d.]+ s",
        first.err,
    )
    assert "memory_format=channels_last" in re.search(r"^plan (.*) · run", first.err, re.MULTILINE)[1]  # type: ignore[index]
    [run] = (tmp_path / "runs").iterdir()
    assert Run(run).plan.memory_format == "channels_last"
    assert Run(run).plan.precision is None, "the job's precision is kept"

    if kept():  # else the machine was busy with other tests, and the command said so
        again = choose(Job.load(tmp_path / "job.yaml"), CLUSTER)
        assert again.seconds == 0
        assert again.plan == Run(run).plan
        assert f"as measured before ({kept()[0]}; delete it to measure again)" in again.lines[-1]
        assert verdicts(again)[str(again.plan)] == "kept"
    else:
        assert first.says("not saved, because other processes used")


@pytest.mark.slow
def test_what_was_measured_holds_for_the_same_work_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_OTHER_WORK", 2.0)  # other tests may be at work beside this one
    forecasts(monkeypatch)
    job = network(tmp_path, "pass", stop={"steps": 1000})
    assert choose(job, CLUSTER).seconds > 0
    [file] = kept()
    renamed = job.model_copy(update={"seed": 5, "deadline_s": 20.0})
    again = choose(renamed, CLUSTER)
    assert again.seconds == 0
    assert "as measured before" in again.lines[-1]
    file.write_text("{ not what was written")
    (tmp_path / "net.py").write_text(NETWORK.replace("{body}", "raise RuntimeError('it is measured again')"))
    again = choose(job, CLUSTER)
    default = auto_plan(job, CLUSTER)
    assert (
        again.lines[-1]
        == f"nothing could be measured (RuntimeError: it is measured again); going on with plan {default}"
    )
    assert again.plan == default
    assert kept() == [file], "an edited model is another one, and a trial that fails leaves nothing"


@pytest.mark.slow
def test_a_change_that_fails_is_told_and_the_others_are_tried_until_a_second_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an error of one rank, while the others wait for it; then by a death."""
    forecasts(monkeypatch)
    job = network(
        tmp_path,
        "if channels_last and os.environ['RANK'] == '0': raise ValueError('only rows please')\n"
        "        if os.environ['OMP_NUM_THREADS'] != str(torch.get_num_threads()): os.kill(os.getpid(), "
        "signal.SIGKILL)",
    )
    choice = choose(job, CLUSTER)
    found = verdicts(choice)
    failed = {plan: verdict for plan, verdict in found.items() if verdict.startswith("failed")}
    assert [verdict for plan, verdict in failed.items() if "memory_format=channels_last" in plan] == [
        "failed: ValueError: only rows please"
    ]
    assert choice.plan.memory_format == "contiguous"
    default = auto_plan(job, CLUSTER)
    if default.dp > 1:  # fewer ranks have more threads each
        assert "was killed by SIGKILL" in found[f"dp={default.dp // 2}"]
        assert found["threads=1"].startswith(("kept", "not kept"))
        assert found["compile=on"] == "not tried: others failed"
    assert "measured in" in choice.lines[-1]


@pytest.mark.slow
def test_failures_before_and_after_the_search_leave_its_choice_and_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """channels_last fails during the search; bf16 fails afterwards, because it is measured last."""
    forecasts(monkeypatch)
    two = Cluster(hosts=(TWO_CORES.hosts[0].model_copy(update={"cpu_bf16": True}),))
    choice = choose(
        network(
            tmp_path,
            "clock.now += 0.02 if torch.get_num_threads() == 1 else 0.0\n"
            "        if channels_last or torch.is_autocast_enabled('cpu'): raise ValueError('no')",
        ),
        two,
    )
    rows = [row.change for row in choice.tried]
    assert len(rows) == len(set(rows)), choice.lines
    assert verdicts(choice)["precision=bf16"] == "failed: ValueError: no", choice.lines
    assert verdicts(choice)[str(choice.plan)] == "kept", choice.lines
    assert choice.plan.dp == 1
    assert choice.plan.threads == 0
    assert not any(change.startswith("memory_format") and "no time" in why for change, why in verdicts(choice).items())


def test_a_run_of_a_few_steps_starts_no_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "forecast", does_not_begin)
    monkeypatch.setattr(auto, "measure", does_not_begin)
    choice = choose(Job.load(write_job(tmp_path / "job.yaml")), TWO_CORES)
    why = "a run of 6 steps is too short to benefit from measured settings (at least 400 steps)"
    assert choice.lines == [f"plan auto: dp=2; nothing is measured: {why}"]
    assert choice.plan == Plan(dp=2)
    assert choice.seconds == 0


def test_a_run_of_a_few_steps_takes_what_an_earlier_start_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forecasts(monkeypatch, steps_of_1_ms("dp=2", 2), steps_of_1_ms("dp=1", 0.5), steps_of_1_ms("threads=1", 0.55))
    monkeypatch.setattr(auto, "measure", does_not_begin)
    file = tmp_path / "job.yaml"
    assert choose(Job.load(write_job(file, stop={"steps": 1000})), TWO_CORES).plan == ONE_CORE
    choice = choose(Job.load(write_job(file)), TWO_CORES)
    assert "threads=1, predicted 550 µs a step (dp=2 2.00 ms); one process, because" in choice.lines[0]


def test_measuring_begins_with_a_plan_that_is_clearly_faster_than_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short run has time for the first plan only."""
    forecasts(monkeypatch, steps_of_1_ms("dp=2", 2), steps_of_1_ms("threads=1", 0.5))
    monkeypatch.setattr(auto, "measure", lambda job, cluster, found, tell: found)
    assert choose(network(tmp_path, "pass", stop={"epochs": 2}), TWO_CORES).plan == ONE_CORE


def test_a_run_that_turns_out_to_be_short_ends_the_trial_after_its_first_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the data tells how many steps two epochs have."""
    forecasts(monkeypatch)
    choice = choose(network(tmp_path, "pass", stop={"epochs": 2}), CLUSTER)
    assert verdicts(choice)["memory_format=channels_last"] == "not tried: no time was left to measure it"
    assert verdicts(choice)["fused=on"] == "not tried: no time was left to measure it"
    assert "nothing that was tried is faster" in choice.lines[-1]


def test_plans_that_divide_the_model_are_measured_and_the_fastest_is_kept_beside_what_was_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A network that is slow unless FSDP2 divides it, whatever was predicted.

    One plan cannot be built, and is passed over.
    """
    monkeypatch.setattr(cache, "MOST_OTHER_WORK", 2.0)
    predictions = [steps_of_1_ms(plan, ms) for plan, ms in (("dp=2", 20), ("ep=2", 21), ("fsdp=2", 22), ("dp=1", 23))]
    forecasts(monkeypatch, *predictions)
    measured_with(monkeypatch, settings=False)
    two = Cluster(hosts=(CLUSTER.hosts[0].model_copy(update={"cores": 2, "affinity": ()}),))
    job = network(tmp_path, "clock.now += 0.0 if type(self).__name__ == 'FSDPNet' else 0.02")
    choice = choose(job, two)
    assert "FSDP2-wrapped" not in capfd.readouterr().err, "torch's warning of views, which nothing changes here"
    found = verdicts(choice)
    assert found["ep=2"].startswith("failed: plan ep=2 divides experts, but the model has no mixture of experts"), (
        choice.lines
    )
    assert found["fsdp=2"] == "kept", choice.lines
    assert found["dp=1"].startswith("not kept"), choice.lines
    assert choice.plan.fsdp == 2
    row = next(line for line in choice.lines if line.startswith("  fsdp=2 "))
    assert re.match(r"  fsdp=2 +22\.0 ms +5\.00 ms .* 0\.20 .* of 25\.0 ms +kept", row)
    measured = {pair.plan: pair for pair in pairs(two)}
    assert set(measured) == {"dp=2", "fsdp=2", "dp=1"}, "what failed is not a measurement"
    assert measured["dp=2"].predicted_s == 0.02
    assert measured["dp=2"].measured_s == pytest.approx(0.025)


def test_one_rank_that_is_predicted_to_need_one_core_is_measured_on_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that is slow wherever a rank has one thread."""
    forecasts(monkeypatch, steps_of_1_ms(str(ONE_CORE)), steps_of_1_ms("dp=2", 2.5))
    slow = "clock.now += 0.02 if torch.get_num_threads() == 1 else 0.0"
    choice = choose(network(tmp_path, slow), TWO_CORES)
    found = verdicts(choice)
    assert next(iter(found)) == "threads=1", choice.lines
    assert found["dp=1"] == "kept", choice.lines
    assert found["dp=2"].startswith("not kept"), choice.lines
    assert choice.plan.ranks == 1
    assert choice.plan.threads == 0


def test_a_short_run_takes_what_is_predicted_and_the_next_start_predicts_nothing_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = network(tmp_path, "pass", stop={"steps": 1000})
    forecasts(monkeypatch, steps_of_1_ms("dp=2", 2), steps_of_1_ms("dp=1", 0.5))
    monkeypatch.setattr(auto, "measure", does_not_begin)
    choice = choose(job, CLUSTER)
    assert choice.plan == Plan(), "which is certain to be faster"
    assert choice.lines == [
        "plan auto: dp=1, predicted 500 µs a step (dp=2 2.00 ms); one process, because a step of 500 µs is too short "
        "to share among 2 processes; not measured: the predicted duration of the run is at most 2 s, "
        "and measuring takes 7 s or more to save about 1 s"
    ]
    monkeypatch.setattr(auto, "forecast", does_not_begin)
    assert choose(job, CLUSTER).plan == Plan()


@pytest.mark.parametrize(
    ("plan", "step_s", "ranks", "told"),
    [("threads=1", 1e-3, 2, True), ("dp=2", 1e-3, 2, False), ("dp=1", 1.0, 2, False), ("dp=1", 1e-3, 1, False)],
)
def test_one_process_is_explained_where_steps_are_tiny(plan: str, step_s: float, ranks: int, told: bool) -> None:
    assert bool(why_one_process(Plan.parse(plan), step_s, ranks)) == told


def test_a_job_that_is_started_often_enough_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = network(tmp_path, "pass", stop={"steps": 1000})
    forecasts(monkeypatch, steps_of_1_ms("dp=2", 25), steps_of_1_ms("dp=1", 26))
    monkeypatch.setattr(
        auto,
        "measure",
        lambda job, cluster, found, tell: replace(found, tried=[Trial("dp=2", "the plan to begin with")]),
    )
    choices = [choose(job, CLUSTER) for _ in range(3)]
    assert [choice.lines[0].startswith("plan auto: measuring") for choice in choices] == [False, False, True]
    assert choose(job, CLUSTER, runs=1).plan == choices[0].plan
    cache_folder().rename(tmp_path / "before")
    assert choose(job, CLUSTER, runs=10).lines[0].startswith("plan auto: measuring"), (
        "as a benchmark asks, which makes many runs"
    )


def test_what_cannot_be_predicted_is_said_and_measured_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise LaunchError(
            "test.planted", "rank 0 (host a, pid 3) raised: JobError: the model cannot be traced\n\nTraceback …"
        )

    monkeypatch.setattr(auto, "forecast", fails)
    monkeypatch.setattr(auto, "measure", lambda job, cluster, found, tell: found)
    default = auto_plan(job := network(tmp_path, "pass"), CLUSTER)
    choice = choose(job, CLUSTER)
    assert (
        choice.lines[0]
        == f"the plans could not be predicted (JobError: the model cannot be traced); going on from plan {default}"
    )
    assert choice.plan == default


def test_a_sample_that_raises_ends_the_choice_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text(BROKEN_DATA)
    job = network(tmp_path, "pass", data={"kind": "dataset", "factory": f"{tmp_path}/broken.py:Broken", "held_out": 0})
    forecasts(monkeypatch, steps_of_1_ms("dp=2"), steps_of_1_ms("dp=1"))
    with pytest.raises(LaunchError) as raised:
        choose(job, CLUSTER)
    assert raised.value.code == "data.first_sample_raised"


BROKEN_DATA = """
class Broken:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        raise ValueError("cannot decode")
"""


@pytest.mark.slow
def test_a_trial_on_emulated_hosts_takes_their_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: object
) -> None:
    two = Cluster(emulate=Emulate(hosts=2, rate="20mbit"))
    forecasts(monkeypatch, steps_of_1_ms("dp=2"), steps_of_1_ms("dp=1"))
    choice = choose(network(tmp_path, "pass"), two)
    assert verdicts(choice)["dp=1"].startswith(("kept", "not kept")), choice.lines


def test_the_default_and_one_rank_are_predicted_beside_the_best(tmp_path: Path) -> None:
    job = Job.load(write_job(tmp_path / "job.yaml"))
    default = auto_plan(job, CLUSTER)
    found = {row.plan: row for row in predicted(job, CLUSTER, default, None)}
    assert {str(default), "dp=1", "threads=1"} <= set(found)
    assert all(row.raw_s > 0 and row.fits and not row.calibrated for row in found.values())


@pytest.mark.parametrize(("steps", "kept_pairs"), [(40, 1), (10, 0)])
def test_a_run_tells_what_its_prediction_was_worth(tmp_path: Path, steps: int, kept_pairs: int) -> None:
    job = Job.load(write_job(tmp_path / "job.yaml"))
    run: Any = SimpleNamespace(steps=lambda: [{}] * steps, throughput=job.global_batch / 0.002)
    remember_run(AutoChoice(Plan(), forecast=steps_of_1_ms("dp=1")), job, CLUSTER, run)
    remember_run(AutoChoice(Plan()), job, CLUSTER, run)
    assert [(pair.plan, pair.predicted_s, pair.measured_s) for pair in pairs(CLUSTER)] == [
        ("dp=1", 0.001, 0.002)
    ] * kept_pairs


@pytest.mark.slow
def test_a_plan_of_fewer_ranks_that_divides_the_model_has_a_start_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forecasts(monkeypatch, steps_of_1_ms("dp=4", 20), steps_of_1_ms("fsdp=2", 21), steps_of_1_ms("tp=2", 22))
    # On a busy machine plan changes take all the time, and a start of three plans more than there is.
    measured_with(monkeypatch, settings=False, spent_s=-300.0)
    four = Cluster(hosts=(Host(name="a", cores=4, memory_bytes=2**34),))
    choice = choose(network(tmp_path, "clock.now += 0.0 if type(self).__name__ == 'FSDPNet' else 0.02"), four)
    found = verdicts(choice)
    assert found["fsdp=2"] == "kept", choice.lines
    assert found["tp=2"].startswith("not kept"), choice.lines
    assert choice.plan == Plan(fsdp=2)


@pytest.mark.slow
def test_compiling_is_tried_where_the_run_is_long_enough_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forecasts(monkeypatch)
    choice = choose(network(tmp_path, "pass", stop={"steps": 10_000_000}), CLUSTER)
    assert verdicts(choice)["compile=on"].startswith(("kept", "not kept", "not tried: torch.compile needs")), (
        choice.lines
    )
    assert (
        verdicts(choice)["compile=reduce-overhead"]
        == "not tried: replays graphs of kernels, but this machine has no GPU that supports this"
    )


def test_a_resumed_run_keeps_its_plan_and_measures_nothing(tmp_path: Path) -> None:
    """So that it goes on bit for bit; unless that plan no longer fits."""
    job = network(tmp_path, "pass")
    before = Run.create(tmp_path / "run", job, CLUSTER, Plan(dp=1, fused=True, memory_format="channels_last"))
    assert choice_of(job, CLUSTER, "auto", before, pytest.fail).plan == before.plan
    short = job.model_copy(update={"stop": StopSpec(steps=1)})
    larger = Run.create(tmp_path / "larger", short, CLUSTER, Plan(dp=CLUSTER.devices + 1))
    assert choice_of(short, CLUSTER, "auto", larger).plan.dp <= CLUSTER.devices


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(1, marks=pytest.mark.slow, id="while predicting"),
        pytest.param(2, marks=pytest.mark.slow, id="while measuring"),
    ],
)
def test_ctrl_c_ends_the_measuring_and_trains_nothing(tmp_path: Path, ranks: int) -> None:
    body = f"if os.environ['WORLD_SIZE'] == '{1 if ranks == 1 else min(CLUSTER.devices, 8)}': "
    network(tmp_path, body + "open('under_way', 'w').close(); time.sleep(0.2)")
    with started("paceline", "train", "job.yaml", folder=tmp_path) as process:
        wait_for((tmp_path / "under_way").exists, process)
        process.send_signal(signal.SIGINT)
        outcome = ended(process)
    assert outcome.code == 130, outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.says("SIGINT: the ranks end.")
    assert "checkpoint" not in outcome.err
    assert not (tmp_path / "runs").exists()
    assert not list(tmp_path.glob("paceline-*"))


@pytest.mark.slow
def test_more_ranks_than_cores_train_the_same_and_are_told_what_it_costs(tmp_path: Path) -> None:
    write_job(tmp_path / "job.yaml")
    ranks = 2 * CLUSTER.devices if CLUSTER.devices <= 8 else 16
    outcome = paceline("train", "job.yaml", "--plan", f"dp={ranks}", "--run", "shared", folder=tmp_path)
    assert outcome.code == 0, outcome.err
    if ranks > CLUSTER.devices:
        assert outcome.says(f"note: plan dp={ranks}: {ranks} ranks share {CLUSTER.devices} cores, 0.50 of a core each")
    assert paceline("train", "job.yaml", "--plan", "dp=1", "--run", "alone", folder=tmp_path).code == 0
    assert losses(tmp_path / "shared") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


@pytest.mark.slow
def test_fewer_ranks_are_measured_beside_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four ranks, as on a machine of four cores: the others wait, and nobody hangs."""
    forecasts(monkeypatch)
    real = sorted(os.sched_getaffinity(0))
    four = Cluster(
        hosts=(Host(name="a", cores=4, memory_bytes=2**34, affinity=tuple((real[i % len(real)],) for i in range(4))),)
    )
    choice = choose(network(tmp_path, "pass"), four)
    found = verdicts(choice)
    assert found["dp=2"].startswith(("kept", "not kept")), choice.lines
    assert not any(verdict.startswith("failed") for verdict in found.values()), choice.lines
