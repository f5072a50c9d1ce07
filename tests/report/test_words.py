"""Numbers on pages: three digits that count, and one unit for a value and its interval."""

from __future__ import annotations

import pytest

from paceline.engine import meter
from paceline.report import words
from paceline.report.definitions import DEFINITIONS, PARTS
from paceline.report.environment import described
from paceline.stats import Interval


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (words.seconds(0.0000123), "12.3 µs"),
        (words.seconds(0.0234), "23.4 ms"),
        (words.seconds(1.519), "1.52 s"),
        (words.seconds(156.6), "2.61 min"),
        (words.seconds(9000), "2.50 h"),
        (words.size(0), "0 B"),
        (words.size(1_074_600), "1.07 MB"),
        (words.rate(3320.4), "3,320 samples/s"),
        (words.ratio(1.5234), "1.52 ×"),
        (words.percent(0.7617), "76.2 %"),
        (words.milliseconds(-0.00123), "-1.23 ms"),
        (words.joules(0.61), "610 mJ"),
        (words.number(float("nan")), "nan"),
    ],
)
def test_a_figure_has_three_digits_and_a_fitting_unit(shown: words.Shown, text: str) -> None:
    assert str(shown).replace("\N{NO-BREAK SPACE}", " ") == text


def test_an_interval_has_the_unit_of_its_middle() -> None:
    shown = words.seconds(Interval(0.0009, 0.0012, 1.5))
    assert (shown.text, shown.unit, shown.interval) == ("1.20", "ms", "0.900 to 1,500")


def test_every_part_of_a_step_has_a_definition_in_the_order_of_the_meter() -> None:
    assert tuple(PARTS) == meter.PARTS
    assert all(definition.text.endswith(".") for definition in DEFINITIONS.values())


def test_the_environment_is_told_in_words() -> None:
    gpus = [{"name": "H200", "memory_bytes": 2**37}]
    facts = described({"plan": "dp=2"}, {"own_thing": {"a": 1}, "gpus": gpus, "gpu_driver": None, "memory_bytes": 2**34, "quiet": True})
    assert facts == [("plan", "dp=2"), ("memory", "16.0 GiB"), ("GPUs", "H200 (128.0 GiB)"), ("own thing", '{"a": 1}'), ("quiet", "yes")]
    assert described({}, {"gpus": []}) == [("GPUs", "none")]
