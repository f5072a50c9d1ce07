"""A plan that runs, but slower than it need be or with other losses than expected, says so.

Else users blame the machine.
"""

from typing import Any

import pytest

from paceline.cluster.cluster import Cluster, cluster_from
from paceline.cluster.host import Device, Host
from paceline.job.job import Job
from paceline.planning.check.plan_errors import plan_errors, warnings_about
from paceline.planning.plan import Plan
from planner_jobs import job_on_digits as job

LAPTOP = Cluster(
    name="this machine", hosts=(Host(name="a", cores=2, memory_bytes=2**34, cpu="Old CPU", cpu_bf16=False),)
)
GPUS = tuple(Device(index=i, name="T4", memory_bytes=2**34, bf16=False) for i in range(4))
SERVERS = Cluster(hosts=tuple(Host(name=name, cores=2, memory_bytes=2**36, cpu_bf16=True, gpus=GPUS) for name in "ab"))
UNEVEN = Cluster(hosts=tuple(Host(name=f"h{n}", cores=8, memory_bytes=2**36, gpus=GPUS[:n]) for n in (2, 3)))


def gpt(**changes: Any) -> Job:
    return job(**({"model": "gpt", "data": {"kind": "synthetic", "vocab": 256, "shape": [12]}} | changes))


RESNET = job(model={"zoo": "resnet50", "args": {"image_size": 32}})


@pytest.mark.parametrize(
    ("plan", "work", "cluster"),
    [
        ("dp=1", job(), LAPTOP),
        ("dp=2 microbatches=4 transport=shm", job(), LAPTOP),
        ("memory_format=channels_last fused=on pin=on compile=on transport=gloo", job(), LAPTOP),
        ("dp=4", job(), SERVERS),
        ("fsdp=2", gpt(), SERVERS),
        ("dp=2 tp=4 sequence=on", gpt(), SERVERS),
        ("pp=4 microbatches=8", gpt(), SERVERS),
        ("cp=2", gpt(), SERVERS),
        ("fsdp=2 zero=2 microbatches=4", gpt(), SERVERS),
        ("fsdp=2 offload=on", gpt(), SERVERS),
    ],
)
def test_a_plan_without_need_for_warnings_has_none(plan: str, work: Job, cluster: Cluster) -> None:
    assert plan_errors(work, Plan.parse(plan), cluster=cluster) == []
    assert warnings_about(Plan.parse(plan), work, cluster) == []


@pytest.mark.parametrize(
    ("plan", "cluster", "work", "advice"),
    [
        ("sync=local:8", LAPTOP, job(), "so sync=local:8 has no effect; use dp=2 or more."),
        (
            "dp=2 sync=diloco:8",
            LAPTOP,
            job(stop={"steps": 6}),
            "the job ends after 6; with a period of 1, replicas synchronize during the run.",
        ),
        ("dp=2 threads=2", LAPTOP, job(), "2 × 2 threads on a host with 2 cores; threads=1 fits."),
        (
            "precision=bf16",
            LAPTOP,
            job(),
            "Old CPU does only in software; precision=fp32 is likely faster on this hardware.",
        ),
        (
            "dp=5",
            SERVERS,
            job(precision="bf16"),
            "T4 does only in software; precision=fp32 is likely faster on this hardware.",
        ),
        ("dp=8 pin=on", SERVERS, job(), "4 ranks to 2 cores of a host, so some ranks share a core; pin=off lets"),
        ("dp=5 threads=2", SERVERS, job(), "4 × 2 threads on a host with 2 cores; threads=1 fits."),
        (
            "dp=4",
            LAPTOP,
            job(),
            "0.50 of a core each, and every rank keeps a copy of the model. dp=2, which gives each",
        ),
        ("dp=3", LAPTOP, job(partition={"weights": [1, 1, 1]}), "0.67 of a core each, and every rank keeps a copy"),
        ("tp=4", LAPTOP, gpt(), "0.50 of a core each; use degrees whose product is 2 to give each rank a core."),
        (
            "tp=4",
            UNEVEN,
            gpt(),
            "divides matrices across hosts, which must then communicate in every layer; tp=2 stays within",
        ),
        (
            "fsdp=2 microbatches=4",
            SERVERS,
            gpt(),
            "zero=2 gathers them once per step, but needs memory for a full copy.",
        ),
        ("pp=4 schedule=gpipe microbatches=2", SERVERS, gpt(), "microbatches=16 keeps all ranks busy."),
        ("pp=2 schedule=gpipe", SERVERS, RESNET, "microbatches=8 keeps all ranks busy."),
        (
            "pp=2 schedule=gpipe microbatches=4",
            SERVERS,
            gpt(),
            "schedule=1f1b keeps the activations of at most 2 microbatches",
        ),
        ("pp=2 dp=3 microbatches=2", SERVERS, gpt(), "so 1 will be used; a global batch of 12 divides evenly."),
        ("cp=4", SERVERS, gpt(), "the last of 4 ranks has the most work; sequences of 16 tokens are divided evenly."),
        ("fsdp=2 offload=on", LAPTOP, gpt(), "offload=off has the same effect."),
        ("dp=2 offload_activations=on", LAPTOP, gpt(), "offload_activations=off has the same effect."),
        ("tp=2", SERVERS, gpt(model="bert"), "257 is not a multiple of 2; a vocabulary of 258 would be divided."),
        (
            "dp=2 microbatches=2",
            LAPTOP,
            RESNET,
            "resnet.embedder.embedder.normalization and 52 more normalize with the statistics of 2 samples of a "
            "microbatch, not of the whole share, and update the running statistics 2 times per step",
        ),
        (
            "fsdp=2 zero=2 microbatches=4",
            LAPTOP,
            RESNET.model_copy(update={"batch_norm": "sync"}),
            "with the statistics of one microbatch of each of 2 data-parallel ranks, not",
        ),
    ],
)
def test_a_plan_that_runs_slower_or_otherwise_than_expected_is_warned_of(
    plan: str, cluster: Cluster, work: Job, advice: str
) -> None:
    assert plan_errors(work, Plan.parse(plan), cluster=cluster) == []
    (warning,) = warnings_about(Plan.parse(plan), work, cluster)
    assert warning.startswith(f"plan {Plan.parse(plan)}")
    assert advice in warning


def test_a_model_that_cannot_be_built_is_no_matter_of_warnings() -> None:
    """The ranks say so, with its traceback."""
    assert warnings_about(Plan.parse("dp=2 microbatches=2"), job(model="no_such_module:model"), LAPTOP) == []


@pytest.mark.parametrize(("name", "warned"), [("4x4xGB200", False), ("4x4xGH200-96", True), ("2x8xH100-SXM", False)])
def test_matrices_may_be_divided_across_machines_that_fast_links_join(name: str, warned: bool) -> None:
    """In an NVL72 a group of 8 ranks is on two machines and within one domain."""
    found = warnings_about(Plan.parse("tp=8 dp=2"), job(), cluster_from(name))
    assert any("divides matrices across hosts" in warning for warning in found) == warned
