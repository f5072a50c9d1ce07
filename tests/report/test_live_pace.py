"""Pace of looks: as often as asked, and no oftener than their cost allows."""

from __future__ import annotations

import time

from paceline.report.live_run import SHARE, Pace


def test_looks_that_cost_nothing_come_as_often_as_asked() -> None:
    pace = Pace(10.0)
    assert pace.wait_s() == 10.0


def test_after_a_look_that_cost_time_the_next_one_waits_for_it_to_be_a_small_share() -> None:
    pace = Pace(0.001)
    until = time.process_time() + 0.004
    while time.process_time() < until:
        pass
    assert 0.004 / SHARE <= pace.wait_s() <= 5.0
    assert SHARE * 2 <= 0.01, "`paceline watch` and the page together"
