"""What the pages say of a step's parts and of the environment."""

from __future__ import annotations

import pytest

from paceline.engine import meter
from paceline.planning.cost import layout
from paceline.report import links_page, plan_page
from paceline.report.figures import DEFINITIONS, PARTS, WALL, reason_words
from paceline.report.page import described
from paceline.run.record import goodput
from paceline_lab.report import figures as lab


def test_every_part_of_a_step_has_a_definition_in_the_order_of_the_meter() -> None:
    assert tuple(PARTS) == meter.PARTS
    assert tuple(WALL) == tuple(goodput.PARTS)
    assert tuple(plan_page.PREDICTED_PARTS) == layout.PARTS
    of_all = (DEFINITIONS, plan_page.DEFINITIONS, links_page.DEFINITIONS, lab.DEFINITIONS)
    assert all(definition.text.endswith(".") for of in of_all for definition in of.values())


def test_the_environment_is_told_in_words() -> None:
    gpus = [{"name": "H200", "memory_bytes": 2**37}]
    facts = described(
        {"plan": "dp=2"},
        {"own_thing": {"a": 1}, "gpus": gpus, "gpu_driver": None, "memory_bytes": 2**34, "quiet": True},
    )
    assert facts == [
        ("plan", "dp=2"),
        ("memory", "16 GiB"),
        ("GPUs", "H200 (128 GiB)"),
        ("own thing", "a=1"),
        ("quiet", "yes"),
    ]
    assert described({}, {"gpus": []}) == [("GPUs", "none")]


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("steps: 20 done", "20 steps done"),
        ("metric_above: accuracy 0.9777 > 0.97", "target reached, accuracy 0.9777 > 0.97"),
        ("seconds: 5 s are over", "5 s are over"),
        ("SIGINT", "SIGINT"),
        ("the user: left", "the user: left"),
    ],
)
def test_the_end_of_a_run_is_told_without_keys_of_the_job(reason: str, words: str) -> None:
    assert reason_words(reason) == words
