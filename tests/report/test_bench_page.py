"""The page of a benchmark in a real browser.

It shows the report's numbers, explains them, claims no more, and asks no host.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome

from browser import Browser, tab
from handmade_reports import alike, around, rank_use, report, setting
from paceline.engine.meter import PARTS
from paceline.errors import RunError
from paceline.planning.shortlist import Trial
from paceline.report import figures
from paceline.text import on_cores
from paceline_lab.report import figures as of_the_lab
from paceline_lab.report.bench_view import write_bench_page
from paceline_lab.scaling.result import MeasuredSetting, RankUse, Report
from refusals import raises

DEFINITIONS = {**figures.DEFINITIONS, **of_the_lab.DEFINITIONS}
needs_chromium = pytest.mark.needs_chromium
CHARTS = ["scaling", "breakdown", "loss-seconds", "loss-samples"]
HOSTILE = "</script><script>window.stolen = 1</script><img src=x onerror='window.stolen = 2'>"


def page_of(values: Report, folder: Path) -> Path:
    return write_bench_page(values, folder)


def shown_values(browser: Browser, figure: str) -> list[float]:
    """The numbers behind a line of the table."""
    return [
        float(cell.get_attribute("data-value") or "nan")
        for cell in browser.all(f"tr[data-figure={figure}] td[data-value]")
    ]


@pytest.fixture(scope="module")
def shown(chromium: Chrome, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The page of a report, opened once for tests that change nothing of it."""
    with tab(chromium) as browser:
        browser.open(page_of(report(), tmp_path_factory.mktemp("shown")))
        assert browser.console() == []
        assert browser.requests() == []
        yield browser


@needs_chromium
def test_every_chart_is_drawn_with_its_traces_without_an_error_or_a_request(shown: Browser) -> None:
    browser = shown
    assert [node.get_attribute("id") for node in browser.all(".plot")] == [f"plot-{name}" for name in CHARTS]
    assert len(browser.all("#plot-scaling .trace.points")) == 3, "ideal, strong and weak"
    assert len(browser.all("#plot-scaling .interval")) == 4, "an interval at 2 and 4 devices, strong and weak"
    bars = browser.all("#plot-breakdown .trace.bars")
    assert len(bars) == len(PARTS)
    ranks = 1 + 2 * (2 + 4)
    assert len(browser.all("#plot-breakdown [data-name=compute] .point")) == ranks
    assert len(browser.all("#plot-breakdown .trace.points .point")) == ranks - 1, (
        "the ideal is marked but for one device"
    )
    for over in ("seconds", "samples"):
        assert len(browser.all(f"#plot-loss-{over} .trace.points")) == 5


def test_the_page_is_small(tmp_path: Path) -> None:
    assert page_of(report(), tmp_path).stat().st_size < 150_000


@needs_chromium
def test_a_chart_tells_its_values(shown: Browser) -> None:
    bars = shown.hints("#plot-breakdown .bars")
    assert bars[0].startswith("1 core, rank 0\n")
    assert [entry.text for entry in shown.all("#plot-scaling .legend span")] == [
        "ideal",
        "strong scaling",
        "weak scaling",
    ]
    curves = shown.hints("#plot-loss-samples")
    assert curves[0].split("\n")[0].endswith(" samples")
    assert all(len(told.split("\n")) == 6 for told in curves), "the place, and the loss of each setting"


@pytest.mark.slow
@needs_chromium
def test_the_browser_itself_refuses_a_request_or_a_script_that_is_not_the_pages(
    browser: Browser, tmp_path: Path
) -> None:
    browser.open(page_of(report(), tmp_path))
    browser.run(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.stolen = 3'}))"
    )
    browser.run("document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/x.png'}))")
    assert browser.run("return window.stolen") is None
    assert sum("Content Security Policy" in line for line in browser.console()) == 2
    assert browser.requests() == ["http://127.0.0.1:9/x.png"], (
        "the attempt; so an empty list elsewhere means that there was none"
    )


@needs_chromium
def test_the_numbers_are_those_of_the_report(shown: Browser) -> None:
    browser, values = shown, report()
    settings, more = values.settings, values.settings[1:]
    assert shown_values(browser, "step_time") == [s.step_time_s.middle for s in settings]
    assert shown_values(browser, "throughput") == [s.throughput.middle for s in settings]
    assert shown_values(browser, "speedup") == [s.speedup.middle for s in more if s.speedup]
    assert shown_values(browser, "efficiency") == [s.efficiency.middle for s in more if s.efficiency]
    assert shown_values(browser, "wire") == [max(r.figures["wire_bytes"] for r in s.ranks) for s in settings]
    assert shown_values(browser, "memory") == [max(r.figures["memory_bytes"] for r in s.ranks) for s in settings]
    speedup = browser.one(".card[data-figure=speedup]").text
    assert re.findall(r"[\d.]+", speedup.replace("95 %", "")) == ["2.43", "2.38", "2.48"]
    four = settings[2]
    lost = [float(cell.get_attribute("data-value") or "nan") for cell in browser.all(".lost td")]
    assert lost[-1] == pytest.approx(four.step_time_s.middle - settings[0].step_time_s.middle / 4)
    assert sum(lost[:-1]) == pytest.approx(lost[-1])
    assert "not available" in browser.one("tr[data-figure=energy]").text
    for text in (
        values.command,
        values.cluster,
        *map(on_cores, values.limits),
        *(row.change for row in values.tried),
        values.reason,
        "2.13.0+cpu",
        "0.04, 0.17, 0.08",
    ):
        assert " ".join(text.split()) in " ".join(browser.one("body").text.split())


@needs_chromium
def test_every_figure_tells_its_definition_to_pointer_keyboard_and_screen_reader(shown: Browser) -> None:
    browser = shown
    terms = browser.all(".term")
    named = {str(term.get_attribute("href")).rpartition("#definition-")[2] for term in terms}
    rows = {row.get_attribute("data-figure") for row in browser.all("tr[data-figure]")}
    assert rows | set(PARTS) | {"ideal", "interval", "lost", "loss"} <= named
    for name in named:
        assert browser.one(f"#text-{name}").text == on_cores(DEFINITIONS[name].text), (
            "in the list at the end, which the link leads to"
        )
    assert all(browser.all(f"#{term.get_attribute('aria-describedby')}") for term in terms)

    told = browser.all("tr[data-figure=efficiency] .term")[0].get_attribute("title")
    assert told == on_cores(DEFINITIONS["efficiency"].text), "beside the pointer"
    assert all(chart.get_attribute("aria-label") for chart in browser.all("[role=img]"))


@needs_chromium
def test_where_the_intervals_overlap_no_speedup_stands_anywhere(browser: Browser, tmp_path: Path) -> None:
    values = alike()
    browser.open(page_of(values, tmp_path))
    verdict = "No difference between 1 core and 2 cores by plan dp=2: the intervals overlap."
    assert browser.one("#verdict").text == verdict
    assert browser.one(".card[data-figure=speedup] .value").text == "no difference"
    assert browser.all(".card[data-figure=efficiency]") == []
    assert shown_values(browser, "speedup") == shown_values(browser, "efficiency") == []
    texts = [text.text for text in browser.all("#plot-scaling .word")]
    assert texts == ["the reference", "no difference"]
    assert values.warnings[0] in browser.one("#warnings").text
    gain = values.settings[1].speedup
    assert gain is not None
    page = f"{browser.one('body').text} {browser.one('#plot-scaling').get_attribute('outerHTML')}"
    assert f"{gain.middle:.2f} ×" not in page


@needs_chromium
def test_what_a_user_wrote_is_text_and_never_a_script(browser: Browser, tmp_path: Path) -> None:
    one = dataclasses.replace(setting(1, "strong", 20, 0.01), label=HOSTILE, plan=HOSTILE)
    two = dataclasses.replace(
        setting(2, "strong", 11, 0.01), label=HOSTILE, plan=HOSTILE, runs=[HOSTILE.replace("/", "")]
    )
    (tmp_path / HOSTILE.replace("/", "")).mkdir()
    hostile = report(
        job=HOSTILE,
        command=HOSTILE,
        cluster=HOSTILE,
        created=HOSTILE,
        target=HOSTILE,
        settings=[one, two],
        limits=[HOSTILE],
        warnings=[HOSTILE],
        tried=[Trial(HOSTILE, HOSTILE)],
        reason=HOSTILE,
        environment={"host": HOSTILE, HOSTILE: {"a": HOSTILE}, "gpus": [{"name": HOSTILE, "memory_bytes": 1}]},
    )
    browser.open(page_of(hostile, tmp_path))
    assert HOSTILE in browser.one(".kicker").text
    assert len(browser.all(".plot")) == len(CHARTS)
    browser.hover(browser.all("#plot-breakdown .bars .point")[0])
    assert browser.run("return window.stolen") is None
    assert browser.all("img") == []
    assert browser.console() == [], "not even tried: the page's policy would have refused it with a message"


@pytest.mark.slow
@needs_chromium
def test_it_fits_into_windows_wide_and_narrow(browser: Browser, tmp_path: Path) -> None:
    outside = (
        "return [...document.querySelectorAll('.axes, .plot text, .card, section')].filter(e => "
        "e.getBoundingClientRect().right > innerWidth + 1 || e.getBoundingClientRect().left < -1)"
        ".map(e => e.outerHTML)"
    )
    for name in ("alike", "scales"):
        (tmp_path / name).mkdir()
    page_of(alike(synthetic=True, complete=False), tmp_path / "alike")
    page_of(report(), tmp_path / "scales")
    for name, width in (("alike", 320), ("scales", 400), ("scales", 1200)):
        browser.open(tmp_path / name / "report.html", width=width)
        assert browser.run("return document.documentElement.scrollWidth") == width
        assert browser.run(outside) == []


@pytest.mark.slow
@needs_chromium
def test_text_can_be_read_in_both_themes_and_paper_is_white(browser: Browser, tmp_path: Path) -> None:
    page = page_of(alike(), tmp_path)
    in_html, in_svg = (
        ("#limits p", ".about", "td"),
        (".xtick", ".ytick", ".xtitle", ".word"),
    )
    for dark in (False, True):
        browser.open(page, dark=dark)
        assert (luminance(browser, "body", "backgroundColor") < 0.1) == dark
        card = luminance(browser, "#limits", "backgroundColor")
        inks = {css: luminance(browser, css, "color") for css in in_html} | {
            css: luminance(browser, f".plot {css}", "fill") for css in in_svg
        }
        assert {css: contrast(ink, card) for css, ink in inks.items() if contrast(ink, card) < 4.5} == {}, (
            "WCAG 2: at least 4.5"
        )
        assert (
            contrast(luminance(browser, ".warnings", "color"), luminance(browser, ".warnings", "backgroundColor")) > 4.5
        )
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert luminance(browser, "body", "backgroundColor") == 1
    assert luminance(browser, ".plot .xtick", "fill") < 0.1


def test_synthetic_data_and_an_interrupted_benchmark_are_said_at_the_top(tmp_path: Path) -> None:
    text = page_of(report(synthetic=True, complete=False), tmp_path).read_text()
    top = text[: text.index('id="scaling"')]
    for words in ('loud">synthetic data', 'loud">incomplete', "The data is synthetic", "The benchmark was interrupted"):
        assert words in top
    plain = page_of(report(), tmp_path).read_text()
    assert 'class="warnings" id="warnings"' not in plain
    assert 'loud">' not in plain


@pytest.mark.parametrize(
    ("settings", "verdict"),
    [
        ([setting(1, "strong", 20, 0.01)], "Measured on one core"),
        (
            [setting(2, "strong", 20, 0.01, speedup=None, efficiency=None, is_speedup=False)],
            "--devices 1,2",
        ),
        (
            [setting(1, "strong", 20, 0.01), setting(2, "strong", 40, 0.01)],
            "Slower with 2 cores by plan dp=2: 0.480 of the speed of one core.",
        ),
        (
            [setting(1, "strong", 20, 0.01), setting(2, "weak", 20, 0.01)],
            "1.92 times as fast with 2 cores by plan dp=2, at the same batch per core.",
        ),
        (
            [setting(1, "strong", 20, 0.01), setting(2, "strong", 9, 0.01, is_speedup=False, pairs=[2.1])],
            "No difference between 1 core and 2 cores by plan dp=2: too few repeats to tell.",
        ),
    ],
    ids=["one device", "no reference", "slower", "weak only", "one repeat"],
)
def test_the_headline_says_what_was_measured(settings: list[MeasuredSetting], verdict: str, tmp_path: Path) -> None:
    assert verdict in page_of(report(settings=settings), tmp_path).read_text()


def test_a_plan_on_one_device_is_compared_as_well(tmp_path: Path) -> None:
    gain = around(1.4, 0.01)
    plan = setting(
        1,
        "strong",
        13.7,
        0.01,
        label="dp=1 threads=2",
        plan="dp=1 threads=2",
        speedup=gain,
        efficiency=gain,
        is_speedup=True,
    )
    text = page_of(
        report(settings=[setting(1, "strong", 19.2, 0.01), setting(2, "strong", 11, 0.01), plan]), tmp_path
    ).read_text()
    assert "1.40 × · 140 %" in text
    assert "dp=1 threads=2</text>" in text


@needs_chromium
def test_the_headline_and_its_figures_are_of_the_plan_that_auto_chose(browser: Browser, tmp_path: Path) -> None:
    gain = around(1.9, 0.01)
    more = {"speedup": gain, "efficiency": around(0.95, 0.01), "is_speedup": True}
    chosen = setting(2, "strong", 10, 0.01, label="auto: dp=1 threads=2", plan="dp=1 threads=2", **more)
    values = report(
        settings=[setting(1, "strong", 19.2, 0.01), setting(2, "strong", 12, 0.01), chosen],
        auto=chosen.plan,
        auto_as_told="threads=2",
    )
    browser.open(page_of(values, tmp_path))
    assert browser.one("#verdict").text == "1.90 times as fast with 2 cores by plan threads=2, which auto chose."
    assert browser.one(".card[data-figure=throughput] .value").get_attribute("data-value") == str(
        chosen.throughput.middle
    )
    assert "plan of auto" in browser.one("#figures thead th:nth-of-type(3)").text
    assert "plan of auto" in [text.text for text in browser.all("#plot-scaling .ytick")]
    rows = [row.text for row in browser.all("#tried tbody tr")]
    assert rows[1].startswith("memory_format=channels_last 11.3 ms\n11.2 to 11.4\n0.570 ×")
    assert rows[1].endswith("kept")
    assert browser.console() == []


def with_rules() -> Report:
    """One device, and three plans for four: exact, compressed, and one that did not reach the target."""
    rules: dict[str, dict[str, Any]] = {
        "dp=4": {"final_loss": 0.312},
        "dp=4 compress=int8": {
            "final_loss": 0.315,
            "ranks": [with_less(rank_use(0.005, 4, rank)) for rank in range(4)],
        },
        "dp=4 sync=diloco:30,fragments=4,overlap=5 compress=int4": {"final_loss": 0.33, "time_to_target_s": None},
    }
    return report(
        settings=[
            setting(1, "strong", 19.2, 0.002, final_loss=0.312, mfu=0.41),
            *(setting(4, "strong", 8 - i, 0.01, label=p, plan=p, **more) for i, (p, more) in enumerate(rules.items())),
        ]
    )


def with_less(use: RankUse) -> RankUse:
    """A rank that sends compressed gradients."""
    less = {"wire_bytes": 270_000.0, "saved_bytes": 804_600.0, "compression_error": 0.0123}
    return dataclasses.replace(use, figures=use.figures | less)


@pytest.mark.slow
@needs_chromium
def test_plans_for_as_many_devices_stand_beside_each_other_with_what_they_send_and_reach(
    browser: Browser, tmp_path: Path
) -> None:
    values = with_rules()
    browser.open(page_of(values, tmp_path), width=400)
    bars = browser.all("#plot-plans .trace.bars")
    assert len(bars) == 4, "bytes, step time, time to target, final loss"
    shown = [text.text for text in browser.all("#plot-plans .word")]
    assert [text for text in shown if text] == [
        "1,049",
        "264",
        "1,049",
        "8.00",
        "7.00",
        "6.00",
        "0.736",
        "0.644",
        "0.312",
        "0.315",
        "0.330",
    ]
    assert shown_values(browser, "final_loss") == [s.final_loss for s in values.settings]
    assert shown_values(browser, "mfu") == [0.41]
    assert shown_values(browser, "saved") == [804_600.0]
    assert shown_values(browser, "compression_error") == [0.0123]
    assert browser.run("return document.documentElement.scrollWidth") == 400
    assert browser.console() == []


def test_a_setting_without_ranks_curve_or_training_time_leaves_those_out(tmp_path: Path) -> None:
    bare = [
        setting(
            n,
            "strong",
            20 / n,
            0.01,
            ranks=[],
            curve=None,
            training_time_s=None,
            time_to_target_s=None,
            runs=[],
            pairs=[],
        )
        for n in (1, 2)
    ]
    text = page_of(
        report(settings=bare, target=None, limits=[], tried=[], reason="", environment={}), tmp_path
    ).read_text()
    assert 'id="plot-scaling"' in text
    for absent in (
        'id="plot-breakdown"',
        'id="plot-loss',
        'data-figure="training_time"',
        'id="tried"',
        'id="runs"',
        'id="limits"',
    ):
        assert absent not in text


def test_run_directories_that_are_still_there_are_linked(tmp_path: Path) -> None:
    (tmp_path / "runs" / "2-strong-1").mkdir(parents=True)
    text = page_of(report(), tmp_path).read_text()
    assert re.findall(r'href="\./(.*?)"', text) == ["runs/2-strong-1/"]


def test_a_benchmark_that_measured_nothing_is_an_error_that_says_what_is_needed(tmp_path: Path) -> None:
    with raises(RunError, "bench.nothing_measured"):
        page_of(report(settings=[]), tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_page_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path) -> None:
    with raises(RunError, "file.unwritable", reason="No such file or directory"):
        page_of(report(), tmp_path / "absent")


def luminance(browser: Browser, css: str, name: str) -> float:
    """Relative luminance of a colour of the first such element, as WCAG 2 defines it."""
    colour = browser.run(f"return getComputedStyle(document.querySelector({css!r})).{name}")
    parts = [int(x) / 255 for x in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: float, other: float) -> float:
    """Contrast ratio of two luminances, 1 to 21."""
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


def test_on_a_machine_without_gpus_devices_are_called_cores_but_in_options(tmp_path: Path) -> None:
    text = page_of(report(), tmp_path).read_text()
    body = re.sub(r"<(script|style).*?</\1>", "", text, flags=re.DOTALL)
    assert "4 cores" in body
    assert "--devices 1,2,4" in body
    assert not re.findall(r"[^-=\"]\bdevices?\b(?!-)", body)


def test_a_speedup_that_is_not_the_ratio_of_the_times_beside_it_says_why(tmp_path: Path) -> None:
    one, two = setting(1, "strong", 20, 0.01), setting(2, "strong", 10, 0.01, speedup=around(1.7, 0.01))
    verdict = page_of(report(settings=[one, dataclasses.replace(two, training_time_s=None)]), tmp_path).read_text()
    assert "1.70 times as fast with 2 cores by plan dp=2." in verdict
    assert "median over rounds" in verdict
    assert "two medians shown here is 2.00" in verdict
