"""The page of `paceline plan` in a real browser.

Its pictures hold what the search found, it asks for nothing and runs nobody's script.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from selenium.webdriver import Chrome

from browser import Browser, tab
from handmade_search import RARER, candidate, cluster, found, job
from paceline.planning.cost.layout import PART_NAMES, PARTS
from paceline.planning.explain.advice import Advice, ScaledPlan
from paceline.planning.explain.explain import Explanation, explain
from paceline.planning.explain.questions import BatchAdvice, BatchPoint
from paceline.planning.explain.which_cluster import pareto
from paceline.report.plan_page import SPAN_COLOURS, TIME_COLOURS, Point, write_plan_page
from paceline.units import digits

STOLEN = "</script><script>window.stolen = 1</script>"


def explained() -> Explanation:
    changes = (
        Advice("twice the devices", "32", 0.8, found().best[1]),
        Advice("twice the memory", "149 GiB", 0.0),
    )
    told = explain(job(), cluster(price_per_hour=2.5), found(), what_would_help=False)
    return replace(told, changes=changes, trainings=(RARER,), notes=(*told.notes, STOLEN))


def test_what_failures_cost_stands_on_the_page_where_a_rate_is_given(tmp_path: Path) -> None:
    told = explain(job(), cluster(failures_per_host_day=0.5), found(), what_would_help=False)
    text = page(tmp_path, told).read_text()
    assert 'id="failures"' in text
    assert "with 0.5 failures a day on each host" in text
    assert "in place, by the replicas" in text
    assert 'id="failures"' not in page(tmp_path).read_text()


def scaled() -> list[ScaledPlan]:
    half, whole = candidate("dp=8", compute=1.9), found().best[0]
    points = [ScaledPlan(4, why="too little memory"), ScaledPlan(8, half, 1.0, 1.0)]
    return [*points, ScaledPlan(16, whole, 1.9, 0.95)]


def advised() -> BatchAdvice:
    points = tuple(
        BatchPoint(batch, replace(c, prediction=replace(c.prediction, throughput=speed)))
        for batch, speed, c in ((64, 50.0, found().best[0]), (128, 90.0, found().best[0]), (256, 92.0, found().best[0]))
    )
    return BatchAdvice(
        points, points[0], points[1], "square root", 0.0014, "two more doublings are hardly faster", ("nobody knows",)
    )


@pytest.fixture(scope="module")
def shown(chromium: Chrome, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The page, opened once for tests that change nothing of it."""
    with tab(chromium) as browser:
        browser.open(page(tmp_path_factory.mktemp("shown")))
        assert browser.console() == []
        assert browser.requests() == []
        yield browser


def page(folder: Path, explanation: Explanation | None = None, *, whole: bool = True) -> Path:
    told = explanation or explained()
    return write_plan_page(
        told, scaled() if whole else [], advised() if whole else None, "paceline plan job.yaml", folder / "plan.html"
    )


@pytest.mark.needs_chromium
def test_the_pictures_hold_what_was_found_and_the_page_asks_for_nothing(shown: Browser) -> None:
    browser = shown
    drawn = [node.get_attribute("id") for node in browser.all(".plot")]
    assert drawn == [
        f"plot-{name}" for name in ("time", "pipeline", "pareto-memory", "pareto-cost", "held", "scaling", "batches")
    ]
    tp = [text.split()[-4] for text in browser.hints("#plot-time [data-name^=tp]")]
    assert tp == ["0.150", "0.100"], "the second plan has none"
    told = [text.split("\n")[1] for text in browser.hints("#plot-pareto-memory")]
    assert sorted(told) == sorted(
        f"{digits(c.prediction.step_time_s)} s, {digits(c.prediction.memory_bytes / 2**30)} GiB on the fullest device"
        for c in found().best
    )
    figures = [
        float(cell.get_attribute("data-value") or "nan")
        for cell in browser.all("#figures tr td[data-value]:nth-of-type(2)")
    ]
    assert figures == pytest.approx([c.prediction.step_time_s for c in found().best])
    assert browser.run("return window.stolen") is None


@pytest.mark.needs_chromium
def test_the_words_say_what_was_chosen_why_and_what_it_does_not_know(shown: Browser) -> None:
    browser = shown
    told = "1.00 s a step on 16 × H100-SXM, as predicted, ± 34 % (80 %, by the cost model alone)."
    assert browser.one("#verdict").text == told
    assert "not measured" in browser.one("#warnings").text
    assert STOLEN in browser.one("#warnings").text
    assert "weights between hosts" in browser.one("#figures").text
    assert "fsdp=2 would work" in browser.one("#excluded").text
    assert "sync=local:8" in browser.one("#changes").text
    assert "no gain" in browser.one("#changes").text
    assert "too little memory" in browser.one("#devices").text
    assert "The chosen plan has one stage" in browser.one("#pipeline").text
    undefined = browser.run(
        "return [...document.querySelectorAll('.term')].filter(t => "
        "!document.getElementById(t.getAttribute('aria-describedby'))).length"
    )
    assert undefined == 0


@pytest.mark.slow
@pytest.mark.needs_chromium
def test_on_a_telephone_nothing_is_wider_than_the_screen_also_without_pipeline_prices_and_scaling(
    browser: Browser, tmp_path: Path
) -> None:
    long = candidate(
        "fsdp=8 tp=2 zero=2 sequence=on remat=selective microbatches=4 transport=auto precision=bf16", compute=1.0
    )
    plain = explain(job(), cluster(), found(best=(long, found().best[1]), excluded=()), what_would_help=False)
    for written in (page(tmp_path), page(tmp_path, plain, whole=False)):
        browser.open(written, width=390)
        assert browser.run("return document.documentElement.scrollWidth") <= 390
        assert browser.console() == []
    assert browser.all("#pipeline, #scaling, #batch") == []


def test_every_part_of_a_step_has_a_name_and_a_colour_of_its_own() -> None:
    assert set(TIME_COLOURS) == set(PART_NAMES) == set(PARTS)
    assert len(set(TIME_COLOURS.values())) == len(PARTS)
    assert set(SPAN_COLOURS) == {"forward", "backward", "weight", "wait"}


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=30))
def test_the_front_is_what_no_other_point_beats_in_both(places: list[tuple[int, int]]) -> None:
    points = [Point(str(i), "", float(x), float(y)) for i, (x, y) in enumerate(places)]
    edge = pareto(points, lambda point: (point.x, point.y))
    for point in edge:
        assert not any(p.x <= point.x and p.y <= point.y and (p.x, p.y) != (point.x, point.y) for p in points)
    for point in points:
        assert any(p.x <= point.x and p.y <= point.y for p in edge)
