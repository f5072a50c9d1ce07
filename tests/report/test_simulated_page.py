"""The page of `paceline bench --simulate` in a real browser: its pictures hold what was simulated, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from selenium.webdriver import Chrome

from browser import Browser, tab
from handmade_search import job
from paceline.cluster.cluster import cluster_from
from paceline.errors import RunError
from paceline.units import percent
from paceline_lab.report.simulated_view import DATA, write_simulated_page
from paceline_lab.simulated.curve import Chances
from paceline_lab.simulated.simulation import Simulation, simulate
from refusals import raises

STOLEN = "</script><script>window.stolen = 1</script>"
NAMES = ("4x8xH100-SXM, 400gbit", "2x8xA100-SXM-80")


@cache
def simulations() -> tuple[Simulation, ...]:
    chances = Chances.published()
    found = [simulate(job(), cluster_from(name), name, chances) for name in NAMES]
    return tuple(replace(one, about=f"{one.about} {STOLEN}") for one in found)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_simulated_page(simulations(), "paceline bench job.yaml --simulate …", tmp_path_factory.mktemp("s"))


@pytest.fixture(scope="module")
def shown(chromium: Chrome, page: Path) -> Iterator[Browser]:
    """The page, opened once for tests that change nothing of it."""
    with tab(chromium) as browser:
        browser.open(page)
        yield browser


def test_the_page_asks_for_nothing_and_runs_nobodys_script(shown: Browser) -> None:
    assert shown.console() == []
    assert shown.requests() == []
    assert shown.run("return window.stolen") is None


def test_it_says_first_that_nothing_is_measured(shown: Browser) -> None:
    assert "simulated, not measured" in shown.one(".badges").text
    assert "predicted" in shown.one("#verdict").text
    assert "nothing on this page" in shown.one("#environment").text


def test_pictures_have_the_predicted_points_bands_and_published_curves(shown: Browser) -> None:
    for number, simulation in enumerate(simulations()):
        for curve in simulation.curves:
            chart = f"#plot-efficiency-{curve.scaling}-{number}"
            hints = shown.hints(f"{chart} [data-name=predicted]")
            assert len(hints) == len(curve.fitting)
            for hint, point in zip(hints, curve.fitting, strict=True):
                share = point.efficiency
                assert share is not None
                assert hint.startswith(f"predicted, {point.devices:,} devices\n")
                between = f"({percent(share.low)} to {percent(share.high)})"
                assert hint.endswith(f"efficiency {percent(share.middle)} {between}")
            assert len(shown.all(f"{chart} [data-name='80 % interval'] path")) == 1
            for one in simulation.published[curve.scaling]:
                hints = shown.hints(f'{chart} [data-name="{one.held.curve.title}"]')
                assert len(hints) == len(one.held.curve.devices)
            speedups = shown.all(f"#plot-speedup-{curve.scaling}-{number} .trace")
            assert {"ideal", "predicted", "80 % interval"} <= {one.get_attribute("data-name") for one in speedups}


def test_tables_have_every_number_of_devices_and_every_source(shown: Browser) -> None:
    for number, simulation in enumerate(simulations()):
        for curve in simulation.curves:
            rows = shown.all(f"#figures-{curve.scaling}-{number} tr[data-devices]")
            assert [row.get_attribute("data-devices") for row in rows] == [f"{p.devices:,}" for p in curve.points]
            text = shown.one(f"#published-{curve.scaling}-{number}").text
            for one in simulation.published[curve.scaling]:
                assert one.held.curve.url in text
                assert one.differences[-1] in text


def test_on_a_telephone_nothing_is_wider_than_the_screen(chromium: Chrome, tmp_path: Path) -> None:
    page = write_simulated_page(simulations()[:1], "paceline bench", tmp_path)
    with tab(chromium) as browser:
        browser.open(page, width=390, dark=True)
        assert browser.run("return document.documentElement.scrollWidth") == 390
        assert browser.console() == []


def test_the_file_beside_the_page_has_the_same_figures(page: Path) -> None:
    values = json.loads((page.parent / DATA).read_text())
    assert values == json.loads(json.dumps([simulation.to_json() for simulation in simulations()]))
    assert [one["cluster"] for one in values] == list(NAMES)


def test_a_folder_that_cannot_be_written_is_an_error_with_its_name(page: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises(RunError, "bench.folder_unwritable"):
        write_simulated_page(simulations(), "paceline bench", tmp_path / "file" / "inside")
