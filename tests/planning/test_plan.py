"""A plan's text is what users type, what runs record, and what reports compare: it must say exactly what was run."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.host import Host
from paceline.errors import PlanError
from paceline.job.job import Job
from paceline.planning import sync_info as sync
from paceline.planning.plan import Plan, cores_of
from paceline.planning.sync_info import CompressSpec, SyncSpec, sync_info
from refusals import raises

plans = st.builds(
    Plan,
    dp=st.integers(1, 4096),
    fsdp=st.integers(1, 64),
    tp=st.integers(1, 64),
    pp=st.integers(1, 64),
    cp=st.integers(1, 64),
    ep=st.integers(1, 64),
    zero=st.integers(1, 3),
    offload=st.booleans(),
    offload_activations=st.booleans(),
    sequence=st.booleans(),
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble", "dualpipe"]),
    virtual=st.integers(2, 12),
    cut=st.sampled_from(["", "blocks.1", "model.layers.3,model.layers.7"]),
    remat=st.sampled_from(["none", "selective", "block"]),
    microbatches=st.integers(1, 64),
    precision=st.sampled_from([None, "fp32", "bf16", "fp64"]),
    memory_format=st.sampled_from(["contiguous", "channels_last"]),
    compile=st.sampled_from(["off", "on", "reduce-overhead"]),
    threads=st.integers(0, 256),
    pin=st.booleans(),
    fused=st.booleans(),
    balance=st.sampled_from(["auto", "on", "off"]),
    sync=st.sampled_from(["allreduce", "local:8", "diloco:30,fragments=4,overlap=5"]),
    compress=st.sampled_from(["none", "auto", "int4", "topk:0.05+bf16"]),
    transport=st.sampled_from(["auto", "shm", "gloo"]),
)


@given(plans)
def test_a_plan_survives_its_text(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan


@given(plans, st.randoms(use_true_random=False))
def test_the_order_of_keys_means_nothing(plan: Plan, random: Random) -> None:
    words = str(plan).split()
    random.shuffle(words)
    assert Plan.parse("  ".join(words)) == plan


@given(
    st.text(st.characters(codec="utf-8"))
    | st.lists(
        st.sampled_from(
            ["dp", "=", "2", "on", "off", "pin", "sync", "fp32", "²", "threads", "tp", "cut", ",", "zero-bubble"]
        )
    ).map("".join)
)
def test_any_text_is_a_plan_or_a_plan_error(text: str) -> None:
    try:
        plan = Plan.parse(text)
    except PlanError:
        return
    assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (Plan(), "dp=1"),
        (Plan(microbatches=4), "microbatches=4"),
        (Plan(dp=2, microbatches=4, precision="bf16", pin=True), "dp=2 microbatches=4 precision=bf16 pin=on"),
        (
            Plan(memory_format="channels_last", compile="on", threads=3, fused=True, balance="off", transport="gloo"),
            "memory_format=channels_last compile=on threads=3 fused=on balance=off transport=gloo",
        ),
        (Plan(dp=2, pp=2, cut="blocks.1", microbatches=2, tp=2), "dp=2 tp=2 pp=2 cut=blocks.1 microbatches=2"),
        (Plan(pp=2, schedule="interleaved", virtual=2), "pp=2 schedule=interleaved"),
        (Plan(pp=2, schedule="interleaved", virtual=3), "pp=2 schedule=interleaved virtual=3"),
        (Plan(fsdp=2, zero=2, offload=True, remat="block"), "fsdp=2 zero=2 offload=on remat=block"),
    ],
)
def test_defaults_are_left_out_of_the_text(plan: Plan, text: str) -> None:
    assert str(plan) == text


@pytest.mark.parametrize(
    ("text", "code"), [("transport=nccl", "plan.value_refused"), ("device=cuda", "plan.key_of_devices")]
)
def test_a_plan_for_gpus_on_a_machine_without_them_is_refused(
    text: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_DEVICE", "cpu")
    with raises(PlanError, code, key=text.partition("=")[0]):
        Plan.parse(text)


@pytest.mark.parametrize(
    ("text", "code", "fields"),
    [
        ("schedule=chimera", "plan.wrong_value", {"takes": re.compile("1f1b or gpipe.*dualpipe"), "value": "chimera"}),
        ("virtual=1", "plan.wrong_value", {"takes": re.compile("2"), "value": 1}),
        ("virtual", "plan.key_without_value", {"example": "virtual=3"}),
        ("fsdp=0", "plan.wrong_value", {"takes": re.compile("1"), "value": 0}),
        ("zero=4", "plan.wrong_value", {"takes": re.compile("1.*3"), "value": 4}),
        ("sequence=1", "plan.wrong_value", {"takes": "on or off"}),
        ("cut=blocks.1,", "plan.wrong_value", {"takes": re.compile(r"cut=blocks\.2"), "value": "blocks.1,"}),
        ("cut", "plan.key_without_value", {"example": "cut=blocks.2"}),
        ("remat=all", "plan.wrong_value", {"takes": "none or selective or block"}),
        ("device=cuda", "plan.key_of_devices", {"key": "device"}),
        ("transport=nccl", "plan.value_refused", {"value": "nccl"}),
        ("microbatch=2", "plan.unknown_key", {"key": "microbatch", "hint": re.compile('"microbatches"')}),
        ("colour=2", "plan.unknown_key", {"key": "colour"}),
        ("dp=two", "plan.wrong_value", {"key": "dp", "value": "two"}),
        ("dp=0", "plan.wrong_value", {"key": "dp", "value": 0}),
        ("threads=-1", "plan.wrong_value", {"key": "threads", "value": "-1"}),
        ("dp=²", "plan.wrong_value", {"key": "dp", "value": "²"}),
        ("dp=" + "9" * 5000, "plan.wrong_value", {"key": "dp"}),
        ("precision=fp4", "plan.wrong_value", {"takes": "fp32 or bf16 or fp16 or fp8 or fp64", "value": "fp4"}),
        ("compile=max", "plan.wrong_value", {"takes": "off or on or reduce-overhead", "value": "max"}),
        ("transport=ucx", "plan.value_refused", {"value": "ucx", "reason": re.compile("shm or gloo or tcp")}),
        ("compile", "plan.key_without_value", {"example": "compile=on"}),
        ("pin=yes", "plan.wrong_value", {"takes": "on or off", "value": "yes"}),
        ("sync=locale:8", "plan.value_refused", {"value": "locale:8", "reason": re.compile('"local"')}),
        ("compress=int9", "plan.value_refused", {"value": "int9", "reason": re.compile('"int8"')}),
        ("compress", "plan.key_without_value", {"example": "compress=int8"}),
        ("dp=2 dp=3", "plan.key_twice", {"key": "dp"}),
        ("pin", "plan.key_without_value", {"example": "pin=on"}),
        ("dp", "plan.key_without_value", {"example": "dp=2"}),
        ("", "plan.empty", {}),
    ],
)
def test_a_text_that_is_no_plan_says_what_would_be_one(text: str, code: str, fields: dict[str, Any]) -> None:
    with raises(PlanError, code, where=f'plan "{text}": ', **fields):
        Plan.parse(text)


def test_every_mistake_in_a_text_is_named_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse("dp=x tp=2 pni=on precision=int8 zero=0")
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize(
    "values",
    [
        {"dp": 0},
        {"dp": True},
        {"dp": 2.0},
        {"threads": -1},
        {"pin": 1},
        {"compile": True},
        {"precision": "fp4"},
        {"sync": "none"},
    ],
)
def test_a_plan_made_in_python_is_held_to_the_same_values(values: dict[str, object]) -> None:
    code = "plan.value_refused" if "sync" in values else "plan.wrong_value"
    with raises(PlanError, code, key=next(iter(values))):
        Plan(**values)  # type: ignore[arg-type]


def test_the_job_names_the_precision_where_the_plan_does_not() -> None:
    job = Job(
        model="mlp",
        data="digits",
        loss="cross_entropy",
        optimizer="sgd",
        global_batch=8,
        stop={"steps": 1},
        precision="fp64",
    )
    assert Plan().precision_for(job) == "fp64"
    assert Plan(precision="bf16").precision_for(job) == "bf16"


FOUR_PHYSICAL = Host(name="a", cores=8, memory_bytes=1, affinity=((0, 4), (1, 5), (2, 6), (3, 7)))


def test_threads_are_the_physical_cores_shared_out() -> None:
    assert [Plan().threads_for(FOUR_PHYSICAL, ranks) for ranks in (1, 2, 3, 4, 8)] == [4, 2, 1, 1, 1]
    assert Plan(threads=3).threads_for(FOUR_PHYSICAL, 8) == 3


@pytest.mark.parametrize(
    ("ranks", "cores"),
    [
        (1, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (2, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (3, [[0, 4], [1, 5], [2, 3, 6, 7]]),
        (4, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (8, [[0], [4], [1], [5], [2], [6], [3], [7]]),
    ],
)
def test_pinned_ranks_have_physical_cores_of_their_own(ranks: int, cores: list[list[int]]) -> None:
    assert [cores_of(rank, ranks, FOUR_PHYSICAL) for rank in range(ranks)] == cores


@st.composite
def hosts_and_ranks(draw: st.DrawFn) -> tuple[Host, int]:
    ids = draw(st.lists(st.integers(0, 255), min_size=1, max_size=24, unique=True))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(ids) - 1)))) | {0, len(ids)})
    affinity = tuple(tuple(ids[a:b]) for a, b in pairwise(cuts))
    host = Host(name="a", cores=draw(st.integers(1, len(ids))), memory_bytes=1, affinity=affinity)
    return host, draw(st.integers(1, 40))


@given(hosts_and_ranks())
def test_no_two_pinned_ranks_share_a_core_while_there_are_enough(drawn: tuple[Host, int]) -> None:
    host, ranks = drawn
    allowed = [core for group in host.affinity for core in group]
    given_out = [core for rank in range(ranks) for core in cores_of(rank, ranks, host)]
    assert set(given_out) == set(allowed)
    assert all(cores_of(rank, ranks, host) for rank in range(ranks))
    if ranks <= len(allowed):
        assert len(given_out) == len(allowed)


def test_a_host_of_unknown_topology_is_cut_by_number() -> None:
    host = Host(name="a", cores=4, memory_bytes=1)
    assert [cores_of(rank, 2, host) for rank in range(2)] == [[0, 1], [2, 3]]


def test_ranks_multiply_and_readers_are_those_with_samples_of_their_own() -> None:
    plan = Plan(dp=2, fsdp=3, tp=5, pp=7, cp=11, ep=13)
    assert (plan.ranks, plan.data_ranks) == (2 * 3 * 5 * 7 * 11 * 13, 2 * 3 * 13)
    assert [p.splits for p in (Plan(dp=8), Plan(tp=2), Plan(remat="block"), Plan(offload_activations=True))] == [
        False,
        True,
        True,
        True,
    ]


def test_a_plan_is_a_value() -> None:
    assert len({Plan(dp=2), Plan.parse("dp=2"), replace(Plan(), dp=2)}) == 1
    assert Plan(dp=3).ranks == 3


WITHOUT_TORCH = """
import sys
from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Host
from paceline.job.job import Job
from paceline.planning.plan import Plan
from paceline.planning.check.plan_errors import auto_plan
from paceline.planning import shortlist as knobs
from paceline.planning.check.plan_errors import plan_errors
from paceline.planning.check.plan_errors import warnings_about
cluster = Cluster(hosts=(Host(name="a", cores=2, memory_bytes=2**34),))
job = Job(model="gpt", data="digits", loss="cross_entropy", optimizer="sgd", global_batch=8, stop={"steps": 1})
auto_plan(job, cluster)
found = plan_errors(job, "dp=2 microbatches=4 threads=4", cluster=cluster), warnings_about(
    Plan.parse("dp=2 microbatches=4"), job, cluster)
refused = plan_errors(job, "dp=16 fused=on schedule=gpipe cut=blocks.1", cluster=cluster)
assert found == ([], []) and str(refused.nearest) == "dp=8 fused=on", (found, refused)
print("torch" in sys.modules)
"""


def test_plans_that_divide_no_model_are_made_checked_and_refused_without_torch() -> None:
    ran = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == "False"


def test_a_plan_names_what_makes_it_inexact() -> None:
    assert Plan.parse("dp=2 sync=diloco:8 compress=int8").inexact == "sync=diloco:8 compress=int8"
    assert Plan.parse("dp=2 sync=allreduce:ring").inexact == ""


SERVER = {"staleness": 0.0, "period": 1, "servers": 1, "lr": 0.7, "momentum": 0.9, "backup": "on"}


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("allreduce", "allreduce", {"": "auto"}),
        ("allreduce:ring", "allreduce", {"": "ring"}),
        ("local:8", "local", {"": 8}),
        ("diloco:30", "diloco", {"": 30, "fragments": 1, "overlap": 0, "lr": 0.7, "momentum": 0.9}),
        (
            "diloco:30,overlap=5,fragments=4,lr=1",
            "diloco",
            {"": 30, "fragments": 4, "overlap": 5, "lr": 1.0, "momentum": 0.9},
        ),
        ("server", "server", SERVER),
        ("server:staleness=4,servers=2", "server", SERVER | {"staleness": 4.0, "servers": 2}),
        ("server:staleness=inf", "server", SERVER | {"staleness": math.inf}),
    ],
)
def test_a_rule_is_read_with_its_settings_and_their_defaults(
    text: str, name: str, arguments: dict[str, object]
) -> None:
    assert SyncSpec.parse(text) == SyncSpec(name, arguments)


@pytest.mark.parametrize(
    ("text", "code", "fields"),
    [
        ("alreduce", "plan.sync_refused", {"error": re.compile('"allreduce"')}),
        ("allreduce:rings", "plan.rule_value_invalid", {"word": "allreduce", "given": "rings"}),
        ("allreduce:ring,period=3", "plan.rule_takes_none", {"name": "allreduce", "unknown": "period"}),
        ("local", "plan.rule_needs", {"name": "local"}),
        ("local:0", "plan.rule_value_invalid", {"word": "local", "given": "0"}),
        ("local:8,8", "plan.option_malformed", {"option": "8", "name": "local"}),
        ("diloco:8,fragment=2", "plan.rule_setting_unknown", {"word": "fragment", "hint": re.compile('"fragments"')}),
        ("diloco:8,fragments=9", "plan.sync_invalid", {"problem": re.compile("fragments=8")}),
        ("diloco:8,fragments=0", "plan.rule_value_invalid", {"word": "fragments", "given": "0"}),
        ("diloco:0", "plan.rule_value_invalid", {"word": "diloco", "given": "0"}),
        ("diloco:8,overlap=8", "plan.sync_invalid", {"problem": re.compile("overlap=7")}),
        ("diloco:8,lr=0", "plan.rule_value_invalid", {"word": "lr", "given": "0"}),
        ("diloco:8,lr=fast", "plan.rule_value_invalid", {"word": "lr", "given": "fast"}),
        ("diloco:8,lr=1,lr=2", "plan.option_malformed", {"option": "lr=2"}),
        ("server:4", "plan.rule_takes_none", {"unknown": "'4'", "keys": re.compile("staleness=, period=, servers=")}),
        ("server:staleness=-1", "plan.rule_value_invalid", {"word": "staleness", "given": "-1"}),
        ("server:lr=0.1", "plan.sync_invalid", {"problem": re.compile("period")}),
        ("server:staleness=1,staleness=2", "plan.option_malformed", {"option": "staleness=2"}),
    ],
)
def test_a_rule_that_is_none_is_refused_with_what_would_be_one(text: str, code: str, fields: dict[str, Any]) -> None:
    with raises(PlanError, code, **fields) as error:
        SyncSpec.parse(text)
    assert f"sync={text}" in str(error.value)


@pytest.mark.parametrize(
    ("text", "codecs"),
    [
        ("int8", (("int8", None),)),
        ("topk", (("topk", 0.01),)),
        ("topk:0.05+bf16", (("topk", 0.05), ("bf16", None))),
        ("powersgd:2", (("powersgd", 2),)),
    ],
)
def test_a_compression_is_read_with_its_values(text: str, codecs: tuple[tuple[str, float | None], ...]) -> None:
    assert CompressSpec.parse(text).codecs == codecs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gzip", 'unknown codec "gzip"'),
        ("int8:4", "int8 does not accept '4'"),
        ("topk:2", "topk must be the fraction of values that is kept"),
        ("powersgd:0", "powersgd must be the rank of the factors"),
        ("int8+bf16", "Other codecs cannot be combined"),
        ("topk+bf16+int8", "may be followed only by one of"),
        ("", "compress is text"),
    ],
)
def test_a_compression_that_is_none_is_refused(text: str, message: str) -> None:
    problem = sync.problem_with("compress", text)
    assert problem is not None
    assert message in problem


def test_rules_say_of_themselves_whether_replicas_differ_and_how_often_they_agree() -> None:
    assert not sync_info("allreduce").local_steps
    assert sync_info("averaging").exact
    assert sync_info("local:8").local_steps
    assert not sync_info("diloco:8").exact
    assert [SyncSpec.parse(text).period for text in ("allreduce:ring", "averaging", "local:8", "diloco:30")] == [
        1,
        1,
        8,
        30,
    ]
