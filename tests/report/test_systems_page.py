"""The page of a comparison of systems in a real browser, on a desk and on a telephone."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest

from browser import Browser
from commands import paceline
from handmade_comparisons import comparison, way
from paceline_lab.report.systems_view import write_systems_page
from paceline_lab.systems.compared import Comparison

needs_chromium = pytest.mark.needs_chromium
HOSTILE = "</script><script>window.stolen = 1</script><img src=x onerror='window.stolen = 2'>"


@needs_chromium
def test_every_system_is_shown_with_its_figures_and_nothing_is_asked_of_a_host(
    browser: Browser, tmp_path: Path
) -> None:
    browser.open(write_systems_page(comparison(), tmp_path))
    assert browser.console() == []
    assert browser.requests() == []
    rows = [row.text for row in browser.all("#figures tbody tr")]
    assert [row.split("\n")[0] for row in rows] == ["paceline", "ddp", "ddp", "plain", "tf server"]
    assert "differ by 46.0%" in rows[-1]
    assert len(browser.all("#plot-steps .bars .point")) == 5
    assert len(browser.all("#plot-losses .trace.points")) == 4, "of each other system the faster way alone"
    assert "Horovod: its launcher" in browser.all("#left-out")[0].text
    assert "tf server (as documented) computes something else." in browser.all("#warnings")[0].text


@needs_chromium
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_never_scrolls_sideways(browser: Browser, tmp_path: Path, width: int) -> None:
    many = comparison(ways=[*comparison().ways, *(way(f"a-long-name-of-a-system-{i}", 20.0 + i) for i in range(20))])
    browser.driver.set_window_size(width, 900)
    browser.open(write_systems_page(many, tmp_path))
    assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth")


@needs_chromium
def test_text_of_a_job_and_of_a_system_runs_nothing(browser: Browser, tmp_path: Path) -> None:
    hostile = comparison(
        job=HOSTILE, left_out={HOSTILE: HOSTILE}, ways=[*comparison().ways, way("other", 9.0, title=HOSTILE)]
    )
    browser.open(write_systems_page(hostile, tmp_path))
    assert browser.run("return window.stolen === undefined")


def test_the_page_is_made_anew_from_the_directory_as_report_does(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(asdict(comparison())))
    (tmp_path / "protocol.json").write_text(json.dumps({"systems": {}}))
    assert msgspec.convert(asdict(comparison()), Comparison) == comparison()
    assert paceline("report", ".", folder=tmp_path).says("report.html")
    assert "paceline takes the shortest steps; DDP takes 1.2" in (tmp_path / "report.html").read_text()
    (tmp_path / "report.json").write_text('{"ways": 3}')
    assert "is not a valid comparison directory" in paceline("report", ".", folder=tmp_path).error


def test_the_page_says_so_where_no_other_system_ran(tmp_path: Path) -> None:
    alone = comparison(ways=comparison().ways[:1], remarks=[], best_other=None)
    assert "No other system ran, so nothing can be compared." in write_systems_page(alone, tmp_path).read_text()


@pytest.mark.parametrize(("plan", "places"), [("dp=2", "2 ranks on 1 host"), ("dp=1", "paceline: 1 rank")])
def test_the_ranks_of_paceline_s_own_plan_are_named(plan: str, places: str, tmp_path: Path) -> None:
    found = comparison(plan=plan)
    assert found.places.startswith("2 ranks on 1 host")
    assert places in found.places
    assert ("paceline:" in found.places) == (plan == "dp=1")
