"""The conclusion of `paceline bench data`: which limit is met, and what to change."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.stats import Interval
from paceline_lab.loading.limits import DecoderLimit, DiskLimit
from paceline_lab.loading.loader_speed import LoaderSpeed, Round
from paceline_lab.loading.result import LoaderReport


def setting(num_workers: int, samples_per_s: int, *, bytes_each: int = 1000) -> LoaderSpeed:
    """Five rounds of a second each, which hardly differ."""
    rates = [samples_per_s + number for number in range(5)]
    rounds = [Round(1.0, 10, rate, 4000 * rate, bytes_each * rate, 0) for rate in rates]
    return LoaderSpeed(num_workers, rounds=rounds)


def report(settings: list[LoaderSpeed], *, disk: float | None, decoder: float, cores: int = 4) -> LoaderReport:
    """A report whose limits are given in bytes and in samples of one core per second."""
    disk_per_s = None if disk is None else Interval(disk, disk, disk)
    return LoaderReport(
        "job",
        32,
        settings[0].num_workers,
        settings,
        DiskLimit(disk_per_s, "3 files"),
        DecoderLimit(Interval(decoder, decoder, decoder)),
        cores,
    )


@pytest.mark.parametrize(
    ("settings", "limits", "says"),
    [
        ([setting(0, 900), setting(4, 3600)], {"disk": 1e9, "decoder": 1000}, ("decoder limits", "num_workers: 4")),
        ([setting(4, 3600)], {"disk": 1e9, "decoder": 1000}, ("decoder limits", "less work")),
        ([setting(0, 900)], {"disk": 1e6, "decoder": 5000}, ("disk limits", "fewer bytes")),
        ([setting(0, 900)], {"disk": None, "decoder": 900}, ("Neither", "--num-workers 4")),
        ([setting(4, 900)], {"disk": 1e9, "decoder": 1000}, ("Neither", "larger batches")),
        ([setting(4, 3600, bytes_each=0)], {"disk": 1.0, "decoder": 1000}, ("decoder limits",)),
    ],
)
def test_the_nearer_limit_is_named_with_what_to_change(
    settings: list[LoaderSpeed], limits: dict[str, Any], says: tuple[str, ...]
) -> None:
    verdict = report(settings, **limits).verdict
    assert all(text in verdict for text in says), verdict
    assert verdict.count(". ") <= 1


def test_settings_that_do_not_differ_are_not_recommended() -> None:
    noisy = LoaderSpeed(2, rounds=[Round(1.0, 10, rate, 1, 1000 * rate, 0) for rate in (500, 800, 1000, 1300, 2000)])
    verdict = report([setting(0, 900), noisy], disk=1e9, decoder=400, cores=2).verdict
    assert "data.num_workers" not in verdict
