"""A plan that is written for another system is the same plan when its configuration is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from handmade_search import job as small_job
from paceline.errors import PlanError
from paceline.planning.plan import DEGREES, Plan
from paceline_lab.configurations.configuration import Configuration, planned, with_batch
from paceline_lab.configurations.systems import SYSTEMS, read_configuration, write_configuration
from refusals import raises

DEGREE = st.sampled_from([1, 2, 4])
PLANS = st.builds(
    Plan,
    **dict.fromkeys(DEGREES, DEGREE),
    zero=st.sampled_from([1, 2, 3]),
    sequence=st.booleans(),
    offload=st.booleans(),
    schedule=st.sampled_from(["1f1b", "gpipe", "interleaved", "zero-bubble"]),
    remat=st.sampled_from(["none", "selective", "block"]),
    microbatches=st.sampled_from([1, 4, 8]),
    compile=st.sampled_from(["off", "on"]),
)


def said(plan: Plan) -> dict[str, object]:
    """What a plan says, without the values of keys that mean nothing in it."""
    needs = {"zero": plan.fsdp, "offload": plan.fsdp, "sequence": plan.tp, "schedule": plan.pp}
    keys = (*DEGREES, *needs, "remat", "microbatches", "compile")
    return {key: getattr(plan, key) for key in keys if needs.get(key, 2) > 1}


@pytest.mark.parametrize("system", SYSTEMS)
@settings(max_examples=150, deadline=None)
@given(plan=PLANS, samples=st.sampled_from([1, 2]))
def test_what_was_written_is_read_as_the_same_plan_or_was_refused_by_name(
    system: str, plan: Plan, samples: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    global_batch = plan.data_ranks * plan.microbatches * samples
    job = small_job(global_batch=global_batch)
    try:
        written = write_configuration(system, plan, job, 8)
    except PlanError as error:
        event("cannot do" if "cannot do" in str(error) else str(error))
        return
    file = tmp_path_factory.mktemp("written") / f"out{written.suffix}"
    file.write_text(written.text)
    found = read_configuration(file)
    assert not found.unknown
    if found.global_batch is None:
        found = with_batch(found, global_batch, None)
    if not found.dimensions.get("layers"):
        known = dict(job.model.transformer or {})
        read = planned(found if found.model_name else _named(found), plan.ranks, "again", lambda _: known)
    else:
        read = planned(found, plan.ranks, "again")
    assert said(read.plan) == said(plan)
    assert read.job.global_batch == global_batch
    assert read.job.precision == job.precision


def _named(found: Configuration) -> Configuration:
    return replace(found, model_name="the job's")


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_usual_plan_can_be_written_for_every_system(system: str, tmp_path: Path) -> None:
    assert write_configuration(system, Plan(fsdp=8), small_job(), 8).text


def test_a_model_by_its_dimensions_comes_back_from_megatrons_arguments(tmp_path: Path) -> None:
    shape = {"layers": 8, "hidden": 1024, "ffn": 2816, "heads": 16, "kv_heads": 4, "seq": 1024, "vocab": 32000}
    mixture = {"gated": True, "tied": False, "positions": False, "experts": 8, "top_k": 2, "expert_ffn": 704}
    job = small_job(model={"transformer": {**shape, **mixture}})
    file = tmp_path / "out.sh"
    file.write_text(write_configuration("megatron", Plan(fsdp=4, ep=2, zero=1), job, 8).text)
    read = planned(read_configuration(file), 8, "again").job.model.transformer
    assert read is not None
    assert job.model.transformer is not None
    left, right = (one.model_dump(exclude={"dropout"}) for one in (read, job.model.transformer))
    assert left == right


def test_an_unknown_system_is_an_error_with_the_known_ones() -> None:
    with raises(PlanError, "config.system_unknown"):
        write_configuration("megatronn", Plan(dp=2), small_job(), 8)
