"""Problems of a plan's sync rule are reported before a rank starts, with a fix."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Host
from paceline.planning.check.check_plan import check_plan
from paceline.planning.plan import Plan
from planner_jobs import job_on_digits

HOST = Cluster(name="this machine", hosts=(Host(name="a", cores=4, memory_bytes=2**34),))


job = partial(job_on_digits, model="mlp")


@pytest.mark.parametrize(
    "plan",
    [
        "dp=2 sync=allreduce:ring",
        "dp=2 compress=topk:0.01+bf16",
        "dp=2 compress=auto",
        "dp=2 sync=local:4",
        "dp=2 fsdp=2 sync=server:servers=2",
        "dp=2 sync=server:staleness=inf",
        "dp=2 sync=server:staleness=inf compress=topk:0.01+bf16",
        "dp=2 sync=server compress=int8",
        "dp=2 sync=diloco:8,fragments=2,overlap=1 compress=int4",
        "dp=2 fsdp=2 sync=allreduce:hierarchical compress=powersgd:2",
    ],
)
def test_a_rule_that_can_work_has_no_reason_against_it(plan: str) -> None:
    assert check_plan(Plan.parse(plan), job(), HOST) == []


@pytest.mark.parametrize(
    ("plan", "changes", "reason", "nearest"),
    [
        (
            "dp=2 sync=local:4 compress=int8",
            {},
            "averages parameters, whose every bit counts: compress=none",
            "dp=2 sync=local:4",
        ),
        (
            "dp=2 sync=diloco:4 compress=auto",
            {},
            "which sync=diloco:4 does not take: compress=int8",
            "dp=2 sync=diloco:4",
        ),
        (
            "dp=2 compress=int8 precision=fp64",
            {},
            "in fp64, which is asked for where every digit counts: compress=none",
            None,
        ),
        ("dp=2 sync=local:4", {"nonfinite": "rewind"}, "nonfinite: skip in the job, or sync=allreduce", "dp=2"),
        ("dp=2 sync=local:4", {"spike": "skip"}, "spike: off in the job, or sync=allreduce", "dp=2"),
        ("dp=2 sync=diloco:4", {"batch_norm": "sync"}, "batch_norm: local, or sync=allreduce", "dp=2"),
        ("dp=2 sync=server compress=auto", {}, "compress=int8", None),
        ("dp=2 sync=server:staleness=1 compress=powersgd:4", {}, "compress=topk:0.01", None),
        ("dp=2 sync=server:servers=3", {}, "servers=2 at most, or a staleness", None),
        ("dp=3 sync=server:staleness=inf", {"global_batch": 64}, "the global batch is 64: dp=2, for example", None),
        ("dp=2 sync=server:staleness=inf num_workers=1", {}, "without loader processes: num_workers=0", None),
        ("dp=2 sync=server:staleness=inf", {"nonfinite": "rewind"}, "nonfinite: skip in the job", None),
    ],
)
def test_a_rule_that_cannot_work_is_refused_with_what_would(
    plan: str, changes: dict[str, Any], reason: str, nearest: str | None
) -> None:
    reasons = check_plan(Plan.parse(plan), job(**changes), HOST)
    assert any(reason in r for r in reasons), reasons
    if nearest is not None:
        assert reasons[-1] == f"Nearest plan that works: {nearest}."
