"""What the pages say of a step's parts and of the environment."""

from __future__ import annotations

from paceline.engine import meter
from paceline.report.figures import DEFINITIONS, PARTS
from paceline.report.page import described
from paceline.run.record import goodput


def test_every_part_of_a_step_has_a_definition_in_the_order_of_the_meter() -> None:
    assert tuple(PARTS) == meter.PARTS
    assert [name for name in DEFINITIONS if name.startswith("wall_")] == [f"wall_{part}" for part in goodput.PARTS]
    assert all(definition.text.endswith(".") for definition in DEFINITIONS.values())


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
        ("own thing", '{"a": 1}'),
        ("quiet", "yes"),
    ]
    assert described({}, {"gpus": []}) == [("GPUs", "none")]
