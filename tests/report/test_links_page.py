"""The page of `paceline links` in a real browser.

A chart for each collective on logarithmic axes, its limit, all numbers, no request.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from browser import Browser
from paceline.comm.measure.calls import CollectiveSpeed
from paceline.comm.measure.limit import Limit
from paceline.comm.measure.links import LeftOut, TransportMeasurement
from paceline.report.links_page import write_links_page

pytestmark = pytest.mark.needs_chromium
SIZES = (2**10, 2**20, 2**24)
LIMIT = Limit((0, 1), copies={2**24: (8e9, 1e10)}, stream=1e8, latency_s=2e-5)


def measured(*, wrong: int = 0) -> list[TransportMeasurement]:
    """Two transports between two hosts; one knows a second algorithm, and leaves its largest size out."""
    gloo = [CollectiveSpeed("gloo", 2, size, 1e-3 + size / 8e7, calls=5, wrong=0) for size in SIZES]
    ring = [CollectiveSpeed("gloo", 2, size, 2e-3 + size / 9e7, algorithm="ring", wrong=wrong) for size in SIZES[:-1]]
    messages = [CollectiveSpeed("gloo", 2, size, 5e-4 + size / 9e7, "send_receive", wrong=0) for size in SIZES]
    tcp = [CollectiveSpeed("tcp", 2, size, 1e-4 + size / 9.5e7, wrong=0) for size in SIZES]
    return [
        TransportMeasurement("gloo", LIMIT, [*gloo, *ring, *messages], [LeftOut("all_reduce", "ring", SIZES[-1])]),
        TransportMeasurement("tcp", LIMIT, tcp, note="</script><script>window.stolen = 1</script>"),
    ]


def page(folder: Path, values: list[TransportMeasurement]) -> Path:
    return write_links_page(
        values, "two hosts", "paceline links --out links.html", {"torch": "2.13.0", "cores": 2}, folder / "links.html"
    )


def test_every_collective_has_its_curves_and_its_limit_on_logarithmic_axes(browser: Browser, tmp_path: Path) -> None:
    browser.open(page(tmp_path, measured()))
    assert [node.get_attribute("id") for node in browser.all(".plot")] == [
        "plot-all_reduce",
        "plot-send_receive",
    ]
    assert [text.text for text in browser.all("#plot-all_reduce .legend span")] == [
        "gloo",
        "gloo, ring",
        "tcp",
        "limit",
    ]
    limit = browser.hints("#plot-all_reduce [data-name=limit]")
    assert limit == ["limit\n100 MB/s"] * 3, "of two ranks on two hosts: the rate of the link"
    assert browser.console() == []
    assert browser.requests() == []
    assert browser.run("return window.stolen") is None


@pytest.mark.slow
def test_the_numbers_are_those_measured(browser: Browser, tmp_path: Path) -> None:
    values = measured()
    browser.open(page(tmp_path, values))
    rows = browser.all("#figures details:first-of-type tr[data-figure=call_time]")
    cells = [row.find_elements("css selector", "td[data-value]") for row in rows]
    shown = [[float(cell.get_attribute("data-value") or "nan") for cell in of_row] for of_row in cells]
    of_all_reduce = [
        [s.time_s for s in m.speeds if (s.collective, s.algorithm) == ("all_reduce", name)]
        for m, name in ((values[0], "flat"), (values[0], "ring"), (values[1], "flat"))
    ]
    assert shown == [pytest.approx(times) for times in of_all_reduce]
    assert "left out" in rows[1].text
    assert (
        browser.one("#verdict").text
        == "All-reduce of 16 MiB over tcp: 94.9 MB/s of bus bandwidth, 95 % of what the hardware allows."
    )
    assert "left out, as one call would take longer than 1.5 s: all-reduce ring 16MiB" in browser.one("#warnings").text
    assert "none wrong" in browser.one("header").text
    ticks = [tick.text for tick in browser.all(".ytick")]
    assert ticks
    assert all(re.fullmatch(r"\d+ [kMG]B/s", tick) for tick in ticks), "as everywhere else"


def test_wrong_results_are_said_first_and_on_a_telephone_nothing_is_wider_than_the_screen(
    browser: Browser, tmp_path: Path
) -> None:
    browser.open(page(tmp_path, measured(wrong=7)), width=390)
    assert "gloo, all-reduce by ring" in browser.one("#warnings").text
    assert "7 numbers are wrong" in browser.one("#warnings").text
    assert browser.one("header .badge.loud").text == "wrong results"
    assert "none wrong" not in browser.one("body").text
    assert browser.run("return document.documentElement.scrollWidth") <= 390
