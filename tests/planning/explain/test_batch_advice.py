"""The advice on the global batch.

The knee of the throughput, the learning rate by the optimizer's rule, and nothing that is not said.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handmade_search import candidate, cluster, job
from paceline.cluster.cluster import Cluster
from paceline.errors import PlanError
from paceline.job.job import Job
from paceline.planning.explain.questions import USEFUL, BatchAdvice, advise
from paceline.planning.search.result import SearchResult


@pytest.fixture(autouse=True)
def _steps_with_a_fixed_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes half a second and 10 ms for each sample, so the throughput rises to 100 samples/s.

    100,000 samples fit nowhere.
    """

    def search(job: Job, cluster: Cluster, **_: Any) -> SearchResult:
        if job.global_batch > 100_000:
            raise PlanError("test.planted", "a batch of {global_batch:,} fits nowhere", global_batch=job.global_batch)
        return SearchResult((_with_throughput(job.global_batch),))

    monkeypatch.setattr("paceline.planning.explain.advice.search", search)


def _with_throughput(batch: int) -> Any:
    from dataclasses import replace

    one = candidate("dp=2", compute=0.5 + 0.01 * batch)
    return replace(one, prediction=replace(one.prediction, throughput=batch / (0.5 + 0.01 * batch)))


def advice(**changes: Any) -> BatchAdvice:
    return advise(job(**changes), cluster())


def test_the_useful_batch_is_the_smallest_with_95_percent_of_the_best_throughput() -> None:
    found = advice(global_batch=64)
    best = max(point.throughput for point in found.points)
    enough = [point.global_batch for point in found.points if point.throughput >= USEFUL * best]
    assert found.useful.global_batch == min(enough) == 1024
    assert [point.global_batch for point in found.points] == sorted(point.global_batch for point in found.points)
    assert found.now.global_batch == 64
    assert found.stopped == "two more doublings are hardly faster"


@pytest.mark.parametrize(
    ("optimizer", "rule"),
    [
        ("sgd", "linear"),
        ("lars", "linear"),
        ("adam", "square root"),
        ("lamb", "square root"),
        ("NAdam", "square root"),
    ],
)
def test_the_learning_rate_follows_the_rule_of_its_optimizer(optimizer: str, rule: str) -> None:
    found = advice(optimizer={"name": optimizer, "lr": 0.01})
    assert found.rule == rule
    expected = 0.01 * (found.factor if rule == "linear" else math.sqrt(found.factor))
    assert found.lr == pytest.approx(expected, rel=1e-3)
    assert any(("Goyal" if rule == "linear" else "Malladi") in caution for caution in found.cautions)
    assert any("critical batch size" in caution and "cannot be known" in caution for caution in found.cautions)


def test_a_batch_that_is_large_enough_is_kept_or_made_smaller_and_never_larger() -> None:
    kept = advice(global_batch=1024)
    assert kept.keeps
    assert kept.job(job(global_batch=1024)) == job(global_batch=1024)
    assert "is already large enough" in kept.line
    smaller = advice(global_batch=16_384)
    assert smaller.useful.global_batch < 16_384
    assert smaller.lr < 0.001


def test_no_batch_is_larger_than_the_data_or_than_any_plan_can_run() -> None:
    limited = advice(data={"kind": "synthetic", "limit": 3000})
    assert max(point.global_batch for point in limited.points) == 128
    assert limited.stopped == "an epoch of 3,000 samples would have fewer than 20 steps"
    assert "fits nowhere" in advice(global_batch=60_000).stopped
    digits = advice(model="cifar_cnn", data="digits", precision="fp32", global_batch=32)
    assert max(point.global_batch for point in digits.points) == 64, "of 1,438 training images"
    absent = advice(model="cifar_cnn", data={"kind": "cifar10", "path": "absent"}, precision="fp32")
    assert "how many samples the data has is not known here" in absent.cautions[0]


@given(steps=st.integers(1, 10**6), warm_up=st.integers(0, 1000), batch=st.sampled_from([32, 64, 128]))
def test_the_accepted_job_sees_as_many_samples_and_reads_back_from_its_text(
    steps: int, warm_up: int, batch: int
) -> None:
    before = job(global_batch=batch, stop={"steps": steps}, schedule={"name": "constant", "warmup_steps": warm_up})
    text = before.to_yaml()
    found = advise(before, cluster())
    after = found.job(before)
    assert before.to_yaml() == text, "a suggestion changes nothing by itself"
    assert after.global_batch == found.useful.global_batch
    assert after.optimizer.lr == found.lr
    assert after.stop.steps is not None
    assert steps * batch <= after.stop.steps * after.global_batch < steps * batch + after.global_batch
    assert min(warm_up, 10) <= after.schedule.warmup_steps <= warm_up


def test_the_accepted_job_is_a_file_that_can_be_trained(tmp_path: Path) -> None:
    before = job(optimizer={"name": "sgd", "lr": 0.1}, evaluate={"every_steps": 100})
    after = advice(optimizer={"name": "sgd", "lr": 0.1}).job(before)
    (tmp_path / "out.yaml").write_text(after.to_yaml())
    assert Job.load(tmp_path / "out.yaml") == after
    assert after.schedule.warmup_steps >= 10, "linear scaling diverges without a warm-up"
    assert after.evaluate.every_steps == math.ceil(100 / 16)


def test_the_advice_is_plain_json() -> None:
    values = advice().to_json()
    assert values["now"] == 64
    assert values["useful"] == 1024
    assert [entry["global_batch"] for entry in values["batches"]][-1] == values["batches"][-1]["global_batch"]
