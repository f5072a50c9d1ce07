"""What was measured before corrects the next prediction.

Lost, doubled or misread, every later choice would rest on it.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.cluster import Cluster, cluster_from
from paceline.cluster.host import Host
from paceline.job.job import Job
from paceline.planning import history
from paceline.planning.cost.layout import Prediction
from paceline.planning.history import Pair, corrected, correction, kind_of, pairs, remember
from paceline.planning.plan import Plan
from paceline.planning.prediction import estimate, layout_of, modelled
from planner_jobs import job_on_digits

HERE = Cluster(hosts=(Host(name="a", cores=4, memory_bytes=2**34, cpu="some CPU"),))
ELSEWHERE = Cluster(hosts=(Host(name="a", cores=8, memory_bytes=2**34, cpu="some CPU"),))
PREDICTED = Prediction(
    0.1, 2**30, 640.0, 0.4, {"compute": 0.08, "dp": 0.02}, {"parameters": 2.0**30}, cost_per_run=3.0, notes=("a note",)
)


job = partial(job_on_digits, model="mlp", global_batch=64)
JOB = job()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def pair_of(plan: str, ratio: float, of: Job = JOB, on: Cluster = HERE, predicted_s: float = 0.1) -> Pair:
    """A step that took `ratio` times what was predicted."""
    measured_s = predicted_s * ratio
    return Pair.of(of, on, Plan.parse(plan), predicted_s=predicted_s, measured_s=measured_s, calibrated=False)


def measured(plan: str, ratio: float, *, times: int = 1, of: Job = JOB) -> None:
    for _ in range(times):
        assert remember(pair_of(plan, ratio, of), HERE)


def test_without_history_a_prediction_stays_as_it_is() -> None:
    assert corrected(PREDICTED, JOB, HERE, Plan(dp=2)) is PREDICTED


def test_what_was_measured_corrects_all_that_follows_from_the_time_and_is_said() -> None:
    measured("dp=2", 2.0, times=10)
    found = corrected(PREDICTED, JOB, HERE, Plan(dp=4))
    factor = found.step_time_s / PREDICTED.step_time_s
    assert 1.8 < factor < 2.0, "drawn towards 1, but not by much after ten of ten"
    assert sum(found.breakdown.values()) == pytest.approx(found.step_time_s)
    assert (found.throughput, found.mfu, found.cost_per_run) == pytest.approx((640 / factor, 0.4 / factor, 3 * factor))
    assert found.memory == PREDICTED.memory
    assert found.notes == (
        "a note",
        f"corrected by what was measured before: times {factor:.2f}, by 10 such plans of 10 on this hardware",
    )
    assert corrected(found, JOB, HERE, Plan(dp=4)) is found, "not twice"


def test_other_hardware_and_other_kinds_of_predictions_know_nothing_of_it() -> None:
    measured("dp=2", 2.0, times=5)
    assert corrected(PREDICTED, JOB, ELSEWHERE, Plan(dp=2)) is PREDICTED
    assert corrected(PREDICTED, JOB, HERE, Plan(dp=2), calibrated=True) is PREDICTED


def test_a_machine_slower_than_thought_makes_no_plan_look_good_that_nobody_measured() -> None:
    measured("dp=2", 3.0)
    one, other = (correction(JOB, HERE, Plan.parse(plan)).factor for plan in ("dp=2", "fsdp=2"))
    assert one / other < 1.1


def test_a_kind_of_plan_that_is_slower_than_others_is_known_to_be() -> None:
    for _ in range(5):
        measured("dp=2", 1.0)
        measured("fsdp=2", 2.0)
    assert correction(JOB, HERE, Plan(fsdp=2)).factor / correction(JOB, HERE, Plan(dp=2)).factor > 1.6


def test_one_surprise_moves_less_than_many_and_the_same_job_counts_more() -> None:
    other = job(model="cifar_cnn")
    measured("dp=2", 4.0, of=other)
    once = correction(JOB, HERE, Plan(dp=2)).factor
    assert 1 < once < correction(other, HERE, Plan(dp=2)).factor < 4
    measured("dp=2", 4.0, times=20, of=other)
    assert once < correction(JOB, HERE, Plan(dp=2)).factor < 4


def test_the_newest_count() -> None:
    measured("dp=2", 4.0, times=history.NEWEST)
    measured("dp=2", 1.0, times=history.NEWEST)
    assert correction(JOB, HERE, Plan(dp=2)).factor == pytest.approx(1.0)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=12))
def test_the_correction_lies_between_1_and_what_was_measured(ratios: list[float]) -> None:
    history.file_of(HERE).unlink(missing_ok=True)
    for ratio in ratios:
        measured("tp=2", ratio)
    factor = correction(JOB, HERE, Plan(tp=2)).factor
    assert min(1.0, *ratios) - 1e-9 <= factor <= max(1.0, *ratios) + 1e-9


@given(st.binary(max_size=200))
def test_damage_costs_only_the_lines_that_it_is_in(damage: bytes) -> None:
    history.file_of(HERE).unlink(missing_ok=True)
    measured("dp=2", 2.0, times=2)
    with history.file_of(HERE).open("ab") as file:
        file.write(damage + b"\n")
    measured("dp=2", 2.0)
    assert len(pairs(HERE)) == 3


@pytest.mark.parametrize(
    "line", ["[]", "3", '{"plan": 1}', '{"plan": "dp=2", "predicted_s": "x", "measured_s": 1}', '{"plan": "warp=9"}']
)
def test_a_line_of_another_version_is_passed_over(line: str) -> None:
    measured("dp=2", 2.0)
    with history.file_of(HERE).open("a") as file:
        file.write(line + "\n")
    assert len(pairs(HERE)) == 1


def test_writers_at_the_same_time_lose_nothing() -> None:
    pair = pair_of("dp=2", 2.0)
    with ThreadPoolExecutor(8) as writers:
        assert all(writers.map(lambda i: remember(replace(pair, measured_s=0.1 + i / 1e4), HERE), range(200)))
    assert len({found.measured_s for found in pairs(HERE)}) == 200


@pytest.mark.parametrize("ratio", [0.0, -10.0, math.nan, math.inf, 1000.0])
def test_what_is_no_time_or_of_something_else_is_not_kept(ratio: float) -> None:
    assert not remember(pair_of("dp=2", ratio), HERE)
    assert pairs(HERE) == ()


def test_a_home_that_cannot_be_written_costs_the_history_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not remember(pair_of("dp=2", 2.0), HERE)
    assert corrected(PREDICTED, JOB, HERE, Plan(dp=2)) is PREDICTED


def test_a_long_history_is_read_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_TAIL_BYTES", 2000)
    measured("dp=2", 3.0, times=40)
    assert 0 < len(pairs(HERE)) < 10


@pytest.mark.parametrize(
    ("plan", "kind"), [("dp=1", "one rank"), ("dp=2 tp=4", "dp tp"), ("fsdp=2 remat=block fused=on", "fsdp block")]
)
def test_a_kind_is_what_is_divided_and_what_is_computed_again(plan: str, kind: str) -> None:
    assert kind_of(Plan.parse(plan)) == kind


DIMENSIONS = {"layers": 4, "hidden": 1024, "heads": 8, "seq": 512, "vocab": 4096}
CLUSTER = cluster_from("4xA100-SXM-80, 3/h")
SYNTHETIC = Job.model_validate(
    {
        "model": {"transformer": DIMENSIONS},
        "data": {"kind": "synthetic", "samples": 1000, "shape": [512], "vocab": 4096},
        "loss": "causal_lm",
        "optimizer": "adamw",
        "global_batch": 30,
        "stop": {"steps": 1000},
    }
)


def test_the_reader_with_most_samples_sets_the_pace_and_only_samples_that_are_there_count() -> None:
    plan = Plan(dp=4)
    assert layout_of(SYNTHETIC, CLUSTER, plan).samples == 8
    found = estimate(SYNTHETIC, plan, cluster=CLUSTER)
    assert found.throughput * found.step_time_s == pytest.approx(30)
    full = estimate(SYNTHETIC.model_copy(update={"global_batch": 32}), plan, cluster=CLUSTER)
    assert found.step_time_s == pytest.approx(full.step_time_s)
    assert found.mfu is not None
    assert full.mfu is not None
    assert found.mfu == pytest.approx(full.mfu * 30 / 32)


def test_a_run_costs_its_steps_on_all_devices_it_uses() -> None:
    found = estimate(SYNTHETIC, "dp=2", cluster=CLUSTER)
    assert found.cost_per_run == pytest.approx(found.step_time_s * 1000 / 3600 * 2 * 3)


@pytest.mark.parametrize(
    ("text", "byte"),
    [("compress=bf16", 2.0), ("compress=int8", 1.0), ("compress=topk:0.01", 0.08), ("compress=none", 4.0)],
)
def test_a_compressed_gradient_travels_in_fewer_bytes(text: str, byte: float) -> None:
    assert layout_of(SYNTHETIC, CLUSTER, Plan.parse(f"dp=4 {text}")).sync_bytes == pytest.approx(byte)


def test_powersgd_sends_less_the_lower_its_rank() -> None:
    sent = [layout_of(SYNTHETIC, CLUSTER, Plan.parse(f"dp=4 compress=powersgd:{rank}")).sync_bytes for rank in (1, 8)]
    assert 0 < sent[0] < sent[1] < 4


def test_local_rules_send_once_a_period() -> None:
    assert layout_of(SYNTHETIC, CLUSTER, Plan.parse("dp=4 sync=local:8")).sync_every == 8
    assert (
        modelled(SYNTHETIC, CLUSTER, Plan.parse("dp=4 sync=local:8")).breakdown["dp"]
        < modelled(SYNTHETIC, CLUSTER, Plan(dp=4)).breakdown["dp"]
    )


def test_more_servers_share_what_replicas_push_and_a_staleness_waits_for_less() -> None:
    def dp_s(sync: str) -> float:
        return modelled(SYNTHETIC, CLUSTER, Plan.parse(f"dp=4 sync={sync}")).breakdown["dp"]

    assert dp_s("server:servers=4") < dp_s("server:servers=2") < dp_s("server")
    assert dp_s("server:period=8") < dp_s("server")
    assert dp_s("server compress=int8") < dp_s("server")
    assert dp_s("server:staleness=4,servers=4") <= dp_s("server:staleness=4") < dp_s("server")


def test_servers_on_one_host_of_cores_are_priced_as_sums_in_shared_memory() -> None:
    one_host = Cluster(hosts=(Host(name="a", cores=4, memory_bytes=2**36),))

    def dp_s(sync: str) -> float:
        return modelled(SYNTHETIC, one_host, Plan.parse(f"dp=4 {sync}")).breakdown["dp"]

    assert dp_s("sync=server:servers=4") == dp_s("")
    assert dp_s("") < dp_s("sync=server:servers=2") < dp_s("sync=server")
    assert dp_s("sync=server") < dp_s("sync=server transport=gloo"), "messages through sockets take longer"


@pytest.mark.parametrize(
    ("optimizer", "on_gpus", "on_cpus"),
    [("adamw", True, True), ("sgd", True, False), ({"name": "sgd", "momentum": 0.9}, False, False)],
)
def test_predictions_take_the_fused_step_that_a_run_takes(optimizer: object, on_gpus: bool, on_cpus: bool) -> None:
    job = Job.model_validate(SYNTHETIC.model_dump() | {"optimizer": optimizer})
    assert layout_of(job, CLUSTER, Plan(dp=4)).fused is on_gpus
    cores = Cluster(hosts=(Host(name="a", cores=4, memory_bytes=2**36),))
    assert layout_of(job, cores, Plan(dp=4)).fused is on_cpus


def test_what_was_measured_before_corrects_the_next_prediction_once() -> None:
    plan = Plan(dp=2)
    before = estimate(SYNTHETIC, plan, cluster=CLUSTER)
    for _ in range(20):
        assert remember(pair_of("dp=2", 2.0, SYNTHETIC, CLUSTER, before.step_time_s), CLUSTER)
    after = estimate(SYNTHETIC, plan, cluster=CLUSTER)
    assert 1.7 < after.step_time_s / before.step_time_s < 2
    assert sum(after.breakdown.values()) == pytest.approx(after.step_time_s)
    assert any("20 such plans of 20 on this hardware" in note for note in after.notes)
    assert modelled(SYNTHETIC, CLUSTER, plan).step_time_s == before.step_time_s


def test_rows_of_sparse_tables_cost_an_asynchronous_server_what_is_looked_up(tmp_path: Path) -> None:
    (tmp_path / "tables.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Clicks(nn.Module):\n"
        "    def __init__(self, rows, sparse):\n        super().__init__()\n"
        "        self.table, self.top = nn.EmbeddingBag(rows, 64, sparse=sparse), nn.Linear(64, 4)\n\n"
        "    def forward(self, ids):\n        return self.top(self.table(ids))\n\n\n"
        "class Ids(torch.utils.data.Dataset):\n    def __init__(self, rows):\n        self.rows = rows\n\n"
        "    def __len__(self):\n        return 4096\n\n"
        "    def __getitem__(self, i):\n        return torch.arange(8) * i % self.rows, i % 4\n"
    )

    def dp_s(sync: str, rows: int, *, sparse: bool = True) -> float:
        job = Job.model_validate(
            {
                "model": {"factory": f"{tmp_path}/tables.py:Clicks", "args": {"rows": rows, "sparse": sparse}},
                "data": {"kind": "dataset", "factory": f"{tmp_path}/tables.py:Ids", "args": {"rows": rows}},
                "loss": "cross_entropy",
                "optimizer": {"name": "sgd", "lr": 0.1},
                "global_batch": 64,
                "stop": {"steps": 1},
            }
        )
        return modelled(job, CLUSTER, Plan.parse(f"dp=4 sync={sync}")).breakdown["dp"]

    served = "server:staleness=4"
    few, many = dp_s(served, 10_000), dp_s(served, 1_000_000)
    assert many == pytest.approx(few, rel=0.01), "16 samples look up 128 rows, of however many"
    assert many < 0.01 * dp_s(served, 1_000_000, sparse=False)
    assert many < 0.1 * dp_s("allreduce", 1_000_000), "whose gradients are dense"
