"""The values of sync= and compress=: what they say, and what is wrong with those that say nothing."""

from __future__ import annotations

import math

import pytest

from paceline.errors import PlanError
from paceline.planning import sync_info as sync
from paceline.planning.plan import Plan
from paceline.planning.sync_info import CompressSpec, SyncSpec, sync_info

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
    ("text", "message"),
    [
        ("alreduce", 'unknown rule "alreduce". Did you mean "allreduce"?'),
        ("allreduce:rings", 'allreduce is one of auto, flat, ring, hierarchical, not "rings"'),
        ("allreduce:ring,period=3", "allreduce takes no period"),
        ("local", "local needs the number of steps between agreements, at least 1, e.g. sync=local:8"),
        ("local:0", 'local is the number of steps between agreements, at least 1, not "0"'),
        ("local:8,8", '"8" is not understood; write local:VALUE,KEY=VALUE, each key once'),
        ("diloco:8,fragment=2", '"fragment" is not one of its settings. Did you mean "fragments"?'),
        ("diloco:8,fragments=9", "fragments=8 at most"),
        ("diloco:8,fragments=0", "fragments is into how many parts the model is divided"),
        ("diloco:0", 'diloco is the number of steps between agreements, at least 1, not "0"'),
        ("diloco:8,overlap=8", "overlap=7 at most"),
        ("diloco:8,lr=0", 'lr is the outer learning rate, above 0, not "0"'),
        ("diloco:8,lr=fast", 'lr is the outer learning rate, above 0, not "fast"'),
        ("diloco:8,lr=1,lr=2", "each key once"),
        ("server:4", "server takes no '4'; it takes staleness=, period=, servers="),
        ("server:staleness=-1", "staleness is by how many global batches a worker may be ahead"),
        ("server:lr=0.1", "period of 2 or more"),
        ("server:staleness=1,staleness=2", "each key once"),
    ],
)
def test_a_rule_that_is_none_is_refused_with_what_would_be_one(text: str, message: str) -> None:
    with pytest.raises(PlanError) as error:
        SyncSpec.parse(text)
    assert message in str(error.value)
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
        ("int8:4", "int8 takes no '4'"),
        ("topk:2", "topk is the share of the numbers that is kept"),
        ("powersgd:0", "powersgd is the rank of the factors"),
        ("int8+bf16", "other codecs stand alone"),
        ("topk+bf16+int8", "may be followed by one of"),
        ("", "compress is text"),
    ],
)
def test_a_compression_that_is_none_is_refused(text: str, message: str) -> None:
    problem = sync.problem_with("compress", text)
    assert problem is not None
    assert message in problem


@pytest.mark.parametrize(
    "text", ["dp=4 sync=diloco:30,fragments=4,overlap=5 compress=int4", "dp=2 sync=local:8", "dp=2 compress=auto"]
)
def test_the_text_of_a_plan_with_a_rule_is_read_back(text: str) -> None:
    assert str(Plan.parse(text)) == text


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
