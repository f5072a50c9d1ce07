"""What planner_local.py predicts and measures.

Four jobs, each under plans for one worker, two, and two emulated hosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.cluster.cluster import Cluster
from paceline.cluster.discover import discover
from paceline.cluster.host import Emulate
from paceline.job.job import Job
from paceline.planning.plan import Plan

ONE, TWO, GIGABIT, SLOW = "1 worker", "2 workers", "2 hosts, 1 Gbit/s", "2 hosts, 100 Mbit/s"
RATES = {GIGABIT: "1gbit", SLOW: "100mbit"}
ENDLESS = {
    "stop": {"steps": 10**9},
    "checkpoint": {"every_seconds": 1e9},
    "evaluate": {"every_epochs": 10**6},
    "deadline_s": 300,
}


def _job(name: str, model: Any, data: dict[str, Any], global_batch: int) -> dict[str, Any]:
    return {
        "name": name,
        "model": model,
        "data": {"kind": "synthetic", "held_out": 0, **data},
        "loss": "cross_entropy",
        "optimizer": {"name": "adamw", "lr": 0.0001},
        "global_batch": global_batch,
        **ENDLESS,
    }


_TOKENS = {"samples": 512, "shape": [128], "vocab": 256}
_TRANSFORMER = {"layers": 4, "hidden": 256, "heads": 4, "context": 128}
JOBS: dict[str, dict[str, Any]] = {
    "mlp": _job("mlp", {"zoo": "mlp", "args": {"hidden": 2048}}, {"samples": 5120}, 512),
    "cnn": _job("cnn", "cifar_cnn", {"samples": 2560}, 128),
    "gpt": _job("gpt", {"zoo": "gpt", "args": _TRANSFORMER}, _TOKENS, 16),
    "bert": _job(
        "bert", {"zoo": "bert", "args": _TRANSFORMER | {"vocab": 256, "hidden": 384, "heads": 6}}, _TOKENS, 16
    ),
}
PLANS: dict[str, dict[str, tuple[str, ...]]] = {
    "mlp": {
        ONE: ("dp=1", "microbatches=4"),
        TWO: ("dp=2", "dp=2 transport=gloo", "dp=2 microbatches=4", "fsdp=2", "tp=2"),
        GIGABIT: ("dp=2", "tp=2"),
        SLOW: ("dp=2",),
    },
    "cnn": {
        ONE: ("dp=1", "microbatches=4", "precision=bf16"),
        TWO: ("dp=2", "dp=2 transport=gloo", "dp=2 microbatches=4", "dp=2 precision=bf16", "pp=2 microbatches=4"),
        GIGABIT: ("dp=2",),
        SLOW: ("dp=2", "pp=2 microbatches=4"),
    },
    "gpt": {
        ONE: ("dp=1", "microbatches=4", "remat=block", "precision=bf16"),
        TWO: (
            "dp=2",
            "dp=2 transport=gloo",
            "dp=2 microbatches=2 remat=block",
            "dp=2 precision=bf16",
            "fsdp=2",
            "fsdp=2 transport=gloo",
            "fsdp=2 microbatches=2",
            "tp=2",
            "tp=2 transport=gloo",
            "pp=2 microbatches=8",
        ),
        GIGABIT: ("dp=2", "fsdp=2", "tp=2", "pp=2 microbatches=4"),
        SLOW: ("dp=2", "fsdp=2", "pp=2 microbatches=4"),
    },
    "bert": {
        ONE: ("dp=1", "remat=selective"),
        TWO: (
            "dp=2",
            "dp=2 microbatches=4",
            "fsdp=2 zero=2",
            "tp=2 microbatches=2",
            "pp=2 microbatches=4",
            "pp=2 microbatches=4 schedule=gpipe",
        ),
        GIGABIT: ("dp=2", "pp=2 microbatches=8"),
        SLOW: ("dp=2",),
    },
}


@dataclass(frozen=True)
class Case:
    """One plan of a job at a place."""

    model: str
    place: str
    plan: Plan

    @property
    def group(self) -> tuple[str, str]:
        """Those that a user would choose from."""
        return self.model, self.place


def cases(model: str) -> Iterator[Case]:
    """Those of a model."""
    for place, plans in PLANS[model].items():
        for text in plans:
            yield Case(model, place, Plan.parse(text))


def job_of(model: str) -> Job:
    """The job."""
    return Job.model_validate(JOBS[model])


def precisions_of(model: str) -> list[str]:
    """In which its plans compute."""
    return sorted({case.plan.precision for case in cases(model) if case.plan.precision})


def cluster_at(place: str) -> Cluster:
    """The cluster of a place."""
    return Cluster(name=place, emulate=Emulate(hosts=2, rate=RATES[place])) if place in RATES else discover()
