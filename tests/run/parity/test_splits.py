"""Every split, alone and in products, computes what one process computes.

Losses, gradients and parameters, whatever the model.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from model_families import family_job
from paceline.planning.plan import Plan
from paceline.run.parity import Parts, Steps
from paceline.run.parity.check import TOLERANCES, Parity
from paceline.run.parity.ranks import compare, take_reference
from ranks import Ranks

STEPS = 3

ALONE = [
    "fsdp=2",
    "fsdp=2 zero=2 microbatches=2",
    "fsdp=2 zero=1 microbatches=2",
    "tp=2",
    "tp=2 sequence=on",
    "pp=2 schedule=gpipe microbatches=4",
    "pp=2 microbatches=4",
    "pp=2 cut=blocks.1 microbatches=4",
    "pp=2 schedule=interleaved microbatches=4",
    "pp=2 schedule=zero-bubble microbatches=4",
    "pp=2 schedule=dualpipe microbatches=4",
    "pp=2 schedule=interleaved virtual=3 microbatches=4",
    "cp=2",
    "remat=block",
    "remat=selective",
]
TWO_AXES = [
    "dp=2 fsdp=2",
    "dp=2 tp=2",
    "dp=2 pp=2 microbatches=2",
    "dp=2 cp=2",
    "fsdp=2 tp=2",
    "fsdp=2 tp=2 sequence=on remat=selective",
    "fsdp=2 pp=2 microbatches=2",
    "fsdp=2 pp=2 schedule=interleaved microbatches=2",
    "fsdp=2 cp=2 zero=2",
    "tp=2 pp=2 microbatches=2",
    "tp=2 pp=2 schedule=interleaved sequence=on microbatches=2",
    "cp=2 tp=2",
    "pp=2 cp=2 microbatches=2 remat=block",
    "fsdp=4 remat=block",
    "tp=4",
    "pp=4 microbatches=4",
    "cp=4",
]
WITH_EXPERTS = [
    "ep=2",
    "dp=2 ep=2",
    "fsdp=2 ep=2",
    "ep=2 tp=2",
    "pp=2 ep=2 microbatches=2",
    "ep=2 cp=2",
    "ep=4",
    "fsdp=2 ep=2 tp=2",
]
THREE_AXES = [
    "dp=2 fsdp=2 tp=2",
    "dp=2 tp=2 pp=2 microbatches=2",
    "dp=2 fsdp=2 pp=2 microbatches=2",
    "fsdp=2 tp=2 pp=2 microbatches=2 remat=selective",
    "fsdp=2 tp=2 cp=2",
    "dp=2 pp=2 cp=2 microbatches=2",
    "tp=2 pp=2 cp=2 microbatches=2",
]
BY_RULE = [  # every exact way to sum the gradients, over dp and over products with each split
    *(f"dp=4 sync=allreduce:{algorithm}" for algorithm in ("flat", "ring", "hierarchical")),
    "dp=3 sync=allreduce:ring",
    *(f"dp=2 {split} sync=allreduce:ring" for split in ("fsdp=2", "tp=2", "pp=2 microbatches=2")),
    *(f"dp=2 {split} sync=allreduce:hierarchical" for split in ("fsdp=2", "tp=2", "pp=2 microbatches=2")),
]
OF_FAMILIES = {
    "llama": [*ALONE[:-2], "fsdp=2 tp=2 sequence=on remat=selective", "tp=2 pp=2 microbatches=2", "cp=2 tp=2"],
    "gpt2": ["tp=2", "tp=2 pp=2 microbatches=2", "fsdp=2 cp=2"],
    "bert": ["tp=2 sequence=on", "fsdp=2 pp=2 microbatches=2", "cp=2"],
    "mixtral": ["ep=2", "fsdp=2 ep=2", "tp=2 pp=2 microbatches=2"],
    "vit": ["pp=2 microbatches=4", "fsdp=2 tp=2"],
    "resnet": ["pp=2 microbatches=2", "fsdp=2 tp=2", "dp=2 remat=block"],
    "t5": ["tp=2", "fsdp=2", "pp=2 microbatches=2"],
    "mlp": ["fsdp=2 tp=2", "pp=2 microbatches=2"],
    "cifar_cnn": ["fsdp=2", "tp=2"],
}
# What `make test` runs: each split alone, and most in a product of two. The others are `make test-all`.
QUICK = {
    *("fsdp=2", "tp=2 sequence=on", "pp=2 microbatches=4", "cp=2", "remat=selective"),
    *("dp=2 cp=2", "fsdp=2 pp=2 microbatches=2", "fsdp=2 ep=2"),
    *("dp=4 sync=allreduce:ring",),
}


def plans(*lists: list[str]) -> list[ParameterSet]:
    return [pytest.param(plan, marks=() if plan in QUICK else pytest.mark.slow) for each in lists for plan in each]


def parity(ranks: Ranks, folder: Path, family: str, text: str, *, backend: str = "shm") -> Parity:
    plan, job = Plan.parse(text), family_job(family, folder)
    normalises = family == "resnet"  # statistics are of the samples that are normalised together
    parts = Parts(plan.microbatches, plan.data_ranks) if normalises else Parts(1, 1)
    alone = Plan(precision="fp64", microbatches=parts.microbatches)
    reference = take_reference(Steps(job, alone, STEPS, folder, parts))
    steps = Steps(job, plan, STEPS, folder)
    found = ranks(plan.ranks, compare, steps, reference, deadline_s=100, backend=backend)  # type: ignore[arg-type]
    return Parity.of(plan, found, reference, TOLERANCES[plan.precision or "fp32"])


def held(found: Parity) -> None:
    worst = max(found.steps, key=lambda s: s.gradient.difference)
    assert found.holds, (
        f"{found.plan}: {found.largest} beyond {found.tolerance}, gradient {worst.gradient}, "
        f"{found.first_module}, {found.steps[-1]}"
    )


@pytest.mark.parametrize("plan", plans(ALONE, TWO_AXES, THREE_AXES))
def test_a_split_or_product_of_splits(ranks: Ranks, tmp_path: Path, plan: str) -> None:
    held(parity(ranks, tmp_path, "gpt", plan))


@pytest.mark.parametrize("plan", plans(BY_RULE))
def test_an_algorithm_that_sums_the_gradients(ranks: Ranks, tmp_path: Path, plan: str) -> None:
    held(parity(ranks, tmp_path, "gpt", plan))


@pytest.mark.parametrize("plan", plans(WITH_EXPERTS))
def test_experts_and_their_products(ranks: Ranks, tmp_path: Path, plan: str) -> None:
    held(parity(ranks, tmp_path, "moe", plan))


# What `make test` runs of these; it divides gpt2, llama, mixtral, resnet and t5 in tests/split.
QUICK_FAMILIES = ("bert",)


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        pytest.param(family, plan, marks=() if family in QUICK_FAMILIES and not i else pytest.mark.slow)
        for family, of_family in OF_FAMILIES.items()
        for i, plan in enumerate(of_family)
    ],
)
def test_other_families(ranks: Ranks, tmp_path: Path, family: str, plan: str) -> None:
    held(parity(ranks, tmp_path, family, plan.replace("cut=blocks", "cut=model.layers")))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["fsdp=2 tp=2", "tp=2 pp=2 microbatches=2", "dp=2 cp=2"])
def test_over_gloo(ranks: Ranks, tmp_path: Path, plan: str) -> None:
    held(parity(ranks, tmp_path, "gpt", plan, backend="gloo"))


@pytest.mark.parametrize(
    "plan", plans(["fsdp=2 tp=2"], ["dp=2 pp=2 microbatches=2", "cp=2 remat=block", "fsdp=2 cp=2", "ep=2 tp=2"])
)
def test_in_float64_to_the_last_digits(ranks: Ranks, tmp_path: Path, plan: str) -> None:
    held(parity(ranks, tmp_path, "moe" if "ep" in plan else "gpt", f"{plan} precision=fp64"))
