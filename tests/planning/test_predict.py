"""Predictions of a job's plans.

Wrong here: figures of another batch than the job's, or what was learned counted twice.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cluster.cluster import named_cluster
from paceline.job.job import Job
from paceline.planning.history import Pair, remember
from paceline.planning.plan import Plan
from paceline.planning.predict import layout_of, modelled, predict

DIMENSIONS = {"layers": 4, "hidden": 1024, "heads": 8, "seq": 512, "vocab": 4096}
CLUSTER = named_cluster("4xA100-SXM-80, 3/h")
JOB = Job.model_validate(
    {
        "model": {"transformer": DIMENSIONS},
        "data": {"kind": "synthetic", "samples": 1000, "shape": [512], "vocab": 4096},
        "loss": "causal_lm",
        "optimizer": "adamw",
        "global_batch": 30,
        "stop": {"steps": 1000},
    }
)


@pytest.fixture(autouse=True)
def _nothing_learned_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_the_reader_with_most_samples_sets_the_pace_and_only_samples_that_are_there_count() -> None:
    plan = Plan(dp=4)
    assert layout_of(JOB, CLUSTER, plan).samples == 8
    found = predict(JOB, CLUSTER, plan)
    assert found.throughput * found.step_time_s == pytest.approx(30)
    full = predict(JOB.model_copy(update={"global_batch": 32}), CLUSTER, plan)
    assert found.step_time_s == pytest.approx(full.step_time_s)
    assert found.mfu is not None
    assert full.mfu is not None
    assert found.mfu == pytest.approx(full.mfu * 30 / 32)


def test_a_run_costs_its_steps_on_all_devices_it_uses() -> None:
    found = predict(JOB, CLUSTER, "dp=2")
    assert found.cost_per_run == pytest.approx(found.step_time_s * 1000 / 3600 * 2 * 3)


@pytest.mark.parametrize(
    ("text", "byte"),
    [("compress=bf16", 2.0), ("compress=int8", 1.0), ("compress=topk:0.01", 0.08), ("compress=none", 4.0)],
)
def test_a_compressed_gradient_travels_in_fewer_bytes(text: str, byte: float) -> None:
    assert layout_of(JOB, CLUSTER, Plan.parse(f"dp=4 {text}")).sync_bytes == pytest.approx(byte)


def test_powersgd_sends_less_the_lower_its_rank() -> None:
    sent = [layout_of(JOB, CLUSTER, Plan.parse(f"dp=4 compress=powersgd:{rank}")).sync_bytes for rank in (1, 8)]
    assert 0 < sent[0] < sent[1] < 4


def test_local_rules_send_once_a_period() -> None:
    assert layout_of(JOB, CLUSTER, Plan.parse("dp=4 sync=local:8")).sync_every == 8
    assert (
        modelled(JOB, CLUSTER, Plan.parse("dp=4 sync=local:8")).breakdown["dp"]
        < modelled(JOB, CLUSTER, Plan(dp=4)).breakdown["dp"]
    )


def test_more_servers_share_what_replicas_push_and_a_staleness_waits_for_less() -> None:
    def dp_s(sync: str) -> float:
        return modelled(JOB, CLUSTER, Plan.parse(f"dp=4 sync={sync}")).breakdown["dp"]

    assert dp_s("server:servers=4") < dp_s("server:servers=2") < dp_s("server")
    assert dp_s("server:period=8") < dp_s("server")
    assert dp_s("server compress=int8") < dp_s("server")
    assert dp_s("server:staleness=4,servers=4") <= dp_s("server:staleness=4") < dp_s("server")


def test_what_was_measured_before_corrects_the_next_prediction_once() -> None:
    plan = Plan(dp=2)
    before = predict(JOB, CLUSTER, plan)
    for _ in range(20):
        pair = Pair.of(
            JOB, CLUSTER, plan, predicted_s=before.step_time_s, measured_s=2 * before.step_time_s, calibrated=False
        )
        assert remember(pair, CLUSTER)
    after = predict(JOB, CLUSTER, plan)
    assert 1.7 < after.step_time_s / before.step_time_s < 2
    assert sum(after.breakdown.values()) == pytest.approx(after.step_time_s)
    assert any("20 such plans of 20 on this hardware" in note for note in after.notes)
    assert modelled(JOB, CLUSTER, plan).step_time_s == before.step_time_s


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
