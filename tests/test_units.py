"""Numbers as people read them: three digits that count, and one unit for a value and its interval."""

from __future__ import annotations

import pytest

from paceline import units
from paceline.stats import Interval


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (units.seconds(0.0000123), "12.3 µs"),
        (units.seconds(0.0234), "23.4 ms"),
        (units.seconds(1.519), "1.52 s"),
        (units.seconds(156.6), "2.61 min"),
        (units.seconds(9000), "2.50 h"),
        (units.size(0), "0 B"),
        (units.size(999.6), "1,000 B"),
        (units.size(1_074_600), "1.02 MiB"),
        (units.size(2**16), "64 KiB"),
        (units.size(1023.6 * 2**10), "1 MiB"),
        (units.size(80 * 2**30), "80 GiB"),
        (units.size(3 * 2**50), "3,072 TiB"),
        (units.bandwidth(94.9e6), "94.9 MB/s"),
        (units.flops(1.21e12), "1.21 TFLOP/s"),
        (units.large(70.6e9), "70.6 billion"),
        (units.rate(3320.4), "3,320 samples/s"),
        (units.ratio(1.5234), "1.52 ×"),
        (units.percent(0.7617), "76 %"),
        (units.percent(0.1523), "15.2 %"),
        (units.percent(Interval(0.7, 0.7617, 0.8)), "76.2 %"),
        (units.percent(0.1523, 0), "15 %"),
        (units.milliseconds(-0.00123), "-1.23 ms"),
        (units.joules(0.61), "610 mJ"),
        (units.number(float("nan")), "nan"),
    ],
)
def test_a_figure_has_three_digits_and_a_fitting_unit(shown: units.Shown, text: str) -> None:
    assert str(shown) == text


def test_an_interval_has_the_unit_of_its_middle() -> None:
    shown = units.seconds(Interval(0.0009, 0.0012, 1.5))
    assert (shown.text, shown.unit, shown.interval) == ("1.20", "ms", "0.900 to 1,500")


def test_a_count_agrees_with_its_noun() -> None:
    assert (units.count(1, "rank"), units.count(1024, "rank")) == ("1 rank", "1,024 ranks")
    assert units.count(2, "microbatch", "microbatches") == "2 microbatches"
