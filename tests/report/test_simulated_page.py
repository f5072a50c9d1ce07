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
from paceline_lab.report.simulated_view import DATA, write_simulated_page
from paceline_lab.simulated.curve import Chances
from paceline_lab.simulated.simulation import Simulation, simulate

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
            drawn = traces(shown, f"efficiency-{curve.scaling}-{number}")
            predicted = drawn["predicted"]
            assert predicted["x"] == [point.devices for point in curve.fitting]
            shares = [point.efficiency for point in curve.fitting if point.efficiency]
            assert predicted["y"] == pytest.approx([100 * share.middle for share in shares], rel=1e-5)
            band = drawn["80 % interval"]["y"]
            assert band[: len(shares)] == pytest.approx([100 * share.low for share in shares], rel=1e-5)
            assert band[len(shares) :] == pytest.approx([100 * share.high for share in reversed(shares)], rel=1e-5)
            for one in simulation.published[curve.scaling]:
                assert drawn[one.held.curve.title]["x"] == one.held.curve.devices
            speedups = traces(shown, f"speedup-{curve.scaling}-{number}")
            assert {"ideal", "predicted", "80 % interval"} <= speedups.keys()


def traces(page: Browser, chart: str) -> dict[str, dict[str, list[float]]]:
    script = "return document.getElementById(arguments[0]).figure.traces.map(t => ({name: t.name, x: t.x, y: t.y}))"
    return {trace["name"]: trace for trace in page.run(script, f"plot-{chart}")}


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
    with pytest.raises(RunError, match="cannot be written"):
        write_simulated_page(simulations(), "paceline bench", tmp_path / "file" / "inside")
