"""A plan that runs, but slower than it need be or with other losses than expected, says so.

Else users blame the machine.
"""

from typing import Any

import pytest

from paceline.cluster.cluster import Cluster, named_cluster
from paceline.cluster.host import Device, Host
from paceline.job.job import Job
from paceline.planning.check.check_plan import check_plan
from paceline.planning.check.warnings import warnings_about
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


@pytest.mark.parametrize(
    "plan",
    [
        "dp=1",
        "dp=2 microbatches=4 transport=shm",
        "memory_format=channels_last fused=on pin=on compile=on transport=gloo",
    ],
)
def test_a_plan_without_need_for_warnings_has_none(plan: str) -> None:
    assert warnings_about(Plan.parse(plan), job(), LAPTOP) == []


@pytest.mark.parametrize(
    "plan",
    [
        "fsdp=2",
        "dp=2 tp=4 sequence=on",
        "pp=4 microbatches=8",
        "cp=2",
        "fsdp=2 zero=2 microbatches=4",
        "fsdp=2 offload=on",
    ],
)
def test_a_split_without_need_for_warnings_has_none(plan: str) -> None:
    assert check_plan(Plan.parse(plan), gpt(), SERVERS) == []
    assert warnings_about(Plan.parse(plan), gpt(), SERVERS) == []


@pytest.mark.parametrize(
    ("plan", "cluster", "changes", "warnings"),
    [
        (
            "sync=local:8",
            LAPTOP,
            {},
            [
                (
                    "plan sync=local:8 has one replica, which agrees with nobody, so sync=local:8 does nothing; "
                    "dp=2 or more has it work."
                )
            ],
        ),
        (
            "dp=2 sync=diloco:8",
            LAPTOP,
            {"stop": {"steps": 6}},
            [
                (
                    "plan dp=2 sync=diloco:8 agrees every 8 steps, and the job ends after 6; a period of 1 "
                    "agrees four times."
                )
            ],
        ),
        (
            "dp=2 threads=2",
            LAPTOP,
            {},
            ["plan dp=2 threads=2 runs 2 × 2 threads on a host with 2 cores; threads=1 fits."],
        ),
        (
            "precision=bf16",
            LAPTOP,
            {},
            [
                (
                    "plan precision=bf16 computes in bf16, which Old CPU does only in software; precision=fp32 is "
                    "likely faster there."
                )
            ],
        ),
        (
            "dp=5",
            SERVERS,
            {"precision": "bf16"},
            ["plan dp=5 computes in bf16, which T4 does only in software; precision=fp32 is likely faster there."],
        ),
        (
            "dp=8 pin=on",
            SERVERS,
            {},
            ["plan dp=8 pin=on pins 4 ranks to 2 cores of a host, so that some share one; pin=off lets them move."],
        ),
        (
            "dp=5 threads=2",
            SERVERS,
            {},
            ["plan dp=5 threads=2 runs 4 × 2 threads on a host with 2 cores; threads=1 fits."],
        ),
        ("dp=4", SERVERS, {}, []),
        (
            "dp=4",
            LAPTOP,
            {},
            [
                "plan dp=4: 4 ranks share 2 cores, 0.50 of a core each, and every rank keeps a copy of the model. "
                "dp=2, with a core for each rank, is likely faster."
            ],
        ),
        (
            "dp=3",
            LAPTOP,
            {"partition": {"weights": [1, 1, 1]}},
            ["plan dp=3: 3 ranks share 2 cores, 0.67 of a core each, and every rank keeps a copy of the model."],
        ),
    ],
)
def test_a_plan_that_runs_slower_than_need_be_is_warned_of(
    plan: str, cluster: Cluster, changes: dict[str, Any], warnings: list[str]
) -> None:
    assert check_plan(Plan.parse(plan), job(**changes), cluster) == []
    assert warnings_about(Plan.parse(plan), job(**changes), cluster) == warnings


@pytest.mark.parametrize(
    ("plan", "cluster", "warning"),
    [
        (
            "tp=4",
            LAPTOP,
            "plan tp=4: 4 ranks share 2 cores, 0.50 of a core each; degrees that multiply to 2 give each rank one.",
        ),
        (
            "tp=4",
            UNEVEN,
            "plan tp=4 divides matrices across hosts, which then talk in every layer; tp=2 stays within a host.",
        ),
        (
            "fsdp=2 microbatches=4",
            SERVERS,
            "plan fsdp=2 microbatches=4 gathers the parameters anew for each of 4 microbatches; "
            "zero=2 gathers them once a step, for the memory of one whole copy.",
        ),
        (
            "pp=4 schedule=gpipe microbatches=2",
            SERVERS,
            "plan pp=4 schedule=gpipe microbatches=2 has fewer microbatches than pipeline ranks, so some always wait; "
            "microbatches=16 keeps them busy.",
        ),
        (
            "pp=2 schedule=gpipe microbatches=4",
            SERVERS,
            "plan pp=2 schedule=gpipe microbatches=4 keeps the activations of all 4 microbatches until the "
            "backward pass; "
            "schedule=1f1b keeps those of 2 at most, at the same speed.",
        ),
        (
            "pp=2 dp=3 microbatches=2",
            SERVERS,
            "plan dp=3 pp=2 microbatches=2 has shares of 2 and 3 samples, which cannot be divided into 2 equal "
            "microbatches, so 1 will be "
            "used; a global batch of 12 would divide.",
        ),
        (
            "cp=4",
            SERVERS,
            "plan cp=4: 12 tokens are not a multiple of 8, so with causal attention the last of 4 ranks has "
            "the most work; "
            "sequences of 16 tokens are divided evenly.",
        ),
        (
            "fsdp=2 offload=on",
            LAPTOP,
            (
                "plan fsdp=2 offload=on keeps shards in host memory, where ranks without a GPU keep them anyway; "
                "offload=off does the same."
            ),
        ),
    ],
)
def test_a_split_that_runs_slower_than_need_be_is_warned_of(plan: str, cluster: Cluster, warning: str) -> None:
    assert check_plan(Plan.parse(plan), gpt(), cluster) == []
    assert warnings_about(Plan.parse(plan), gpt(), cluster) == [warning]


def test_a_vocabulary_that_does_not_divide_stays_whole_and_says_so() -> None:
    assert check_plan(Plan.parse("tp=2"), gpt(model="bert"), SERVERS) == []
    (warning,) = warnings_about(Plan.parse("tp=2"), gpt(model="bert"), SERVERS)
    assert warning == (
        "plan tp=2 leaves the vocabulary whole on each rank, for 257 is not a multiple of 2; 258 in the model "
        "would be divided."
    )


def test_batch_norm_says_what_microbatches_do_to_its_statistics() -> None:
    images = job(model={"zoo": "resnet50", "args": {"image_size": 32}})
    (warning,) = warnings_about(Plan.parse("dp=2 microbatches=2"), images, LAPTOP)
    assert warning == (
        "plan dp=2 microbatches=2: resnet.embedder.embedder.normalization and 52 more normalise by the "
        "statistics of 2 samples of a "
        "microbatch, not of the whole share, and move the running ones 2 times a step: losses differ from "
        "those of microbatches=1."
    )
    synchronised = job(model={"zoo": "resnet50", "args": {"image_size": 32}}, batch_norm="sync")
    (warning,) = warnings_about(Plan.parse("fsdp=2 zero=2 microbatches=4"), synchronised, LAPTOP)
    assert "by the statistics of one microbatch of each of 2 data-parallel ranks, not" in warning
    assert warnings_about(Plan.parse("pp=2 schedule=gpipe"), images, SERVERS) == [
        (
            "plan pp=2 schedule=gpipe has fewer microbatches than pipeline ranks, so some always wait; "
            "microbatches=8 keeps them busy."
        )
    ]


def test_a_model_that_cannot_be_built_is_no_matter_of_warnings() -> None:
    """The ranks say so, with its traceback."""
    assert warnings_about(Plan.parse("dp=2 microbatches=2"), job(model="no_such_module:model"), LAPTOP) == []


@pytest.mark.parametrize(("name", "warned"), [("4x4xGB200", False), ("4x4xGH200-96", True), ("2x8xH100-SXM", False)])
def test_matrices_may_be_divided_across_machines_that_fast_links_join(name: str, warned: bool) -> None:
    """In an NVL72 a group of 8 ranks is on two machines and within one domain."""
    found = warnings_about(Plan.parse("tp=8 dp=2"), job(), named_cluster(name))
    assert any("divides matrices across hosts" in warning for warning in found) == warned
