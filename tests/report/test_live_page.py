"""The live page in a real browser: a run as it trains, many ranks, several runs, and what others wrote."""

from __future__ import annotations

import re
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from selenium.webdriver.support.wait import WebDriverWait

from browser import Browser
from commands import DEADLINE_S, ended, events, kill_rank, training, wait_for_events, wait_for_step, write_job
from handmade_live import NOW, begun_run, happens, trains
from live_pages import served

pytestmark = pytest.mark.needs_chromium
WIDTHS = (1280, 390)


def wait_until(browser: Browser, script: str) -> None:
    """Wait until the JavaScript returns something true."""
    WebDriverWait(browser.driver, DEADLINE_S).until(lambda _: browser.run(f"return {script}"))


def fits(browser: Browser) -> None:
    """Hold the page to both widths: nothing is wider than the window."""
    for width in WIDTHS:
        browser.resize(width)
        assert browser.run("return document.documentElement.scrollWidth") == width
        wider = "return [...document.querySelectorAll('section, .card .value, .rank, .log li, #compare-runs li')]"
        over = browser.run(f"{wider}.filter((n) => n.scrollWidth > n.clientWidth + 1).map((n) => n.outerHTML)")
        assert over == [], f"at {width} pixels"


def steps(browser: Browser) -> int:
    """The step that the page shows."""
    found = re.search(r"step ([\d,]+)", browser.one("[data-f=steps]").text)
    assert found
    return int(found[1].replace(",", ""))


@pytest.mark.slow
def test_a_run_is_shown_while_it_trains_loses_a_rank_and_ends(browser: Browser, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", stop={"steps": 1_000_000}, checkpoint={"every_steps": 200})
    with training(job, tmp_path, "dp=2") as (process, run), ExitStack() as stack:
        wait_for_step(20, run, process)
        page = stack.enter_context(served(run, folder=tmp_path))
        browser.open(page.url)
        wait_until(browser, "document.querySelectorAll('.rank').length === 2")
        assert browser.run("return location.search") == "", "the token is not in the history"
        assert "token" not in browser.run("return document.cookie")
        first = steps(browser)
        WebDriverWait(browser.driver, DEADLINE_S).until(lambda _: steps(browser) > first)
        assert browser.one("[data-f=phase]").text == "running"
        assert browser.one(".run .bar").get_attribute("aria-valuemax") == "1000000"
        fits(browser)
        kill_rank(1, process)
        wait_for_events(run, "lost", 1, process)
        wait_until(browser, "document.querySelector('.log')?.textContent.includes('It is started again')")
        wait_until(browser, "document.querySelector('.log').textContent.includes('rank 1 is back at step')")
        process.send_signal(signal.SIGINT)
        ended(process)
        wait_until(browser, "document.querySelector('[data-f=phase]').textContent === 'ended'")
        [end] = events(run, "end")
        assert browser.one("#verdict").text == f"run: ended: {end['reason']}"
        assert steps(browser) == end["step"]
        assert [chip.text for chip in browser.all(".chip[data-state=in]")] == ["0", "1"]
        assert browser.all(".plot .trace path")
        wait_until(browser, "!document.querySelector('[data-s=goodput]').hidden")
        fits(browser)
        assert browser.console() == []
        assert [url for url in browser.requests() if not url.startswith(f"http://127.0.0.1:{page.port}/")] == []
        browser.driver.refresh()
        wait_until(browser, "document.querySelectorAll('.rank').length === 2")  # by the cookie
        page.process.send_signal(signal.SIGTERM)
        assert ended(page.process).code == 0
        wait_until(browser, "document.getElementById('connection').textContent.includes('does not answer')")


def test_sixty_four_ranks_are_shown_with_the_one_that_the_others_wait_for(browser: Browser, tmp_path: Path) -> None:
    run = begun_run(tmp_path / "many", "dp=64")
    for rank in range(64):
        slow = rank == 37
        numbers = range(1, 6) if rank == 11 else range(1, 60)
        work = {"imbalance_s": 0.0 if slow else 0.002, "compute_s": 0.01 if slow else 0.008}
        trains(run, *numbers, rank=rank, samples=2048, local_samples=16 if slow else 32, **work)
    happens(run, "slow_rank", rank=37, host="b", ratio=1.3, since_step=2, busy_s=0.01, others_busy_s=0.008)
    happens(run, "lost", rank=11, reason="rank 11 was killed", stack="", again=True, generation=1, time=NOW + 1)
    with served(run.path, folder=tmp_path) as page:
        browser.open(page.url, width=390)
        wait_until(browser, "document.querySelectorAll('.rank').length === 64")
        assert browser.one("[data-f=said]").text.startswith("The others wait for rank 37: 2.00 ms of each step, 20 %")
        assert [row.text.split()[0] for row in browser.all(".rank.loud")] == ["11"]
        assert [chip.text for chip in browser.all(".chip[data-state=back]")] == ["11"]
        assert browser.one(".chip.slow").text == "37"
        assert browser.one("[data-card=members] .value").text == "63 of 64"
        widths = browser.run("return [...document.querySelectorAll('.shares i')].map((n) => n.style.width)")
        assert [rank for rank, width in enumerate(widths) if width == "0%"] == [11], "it is away"
        assert browser.one("[data-f=shares]").text == "Shares of the batch: the ranks get 16 to 32 samples of a batch."
        assert [row.text.split()[0] for row in browser.all(".of-links tbody tr")] == ["a", "b"]
        assert "eth0, 400 Gbit/s" in browser.one(".of-links").text
        fits(browser)
        browser.run("document.querySelector('details').open = true")
        assert len(browser.all(".of-ranks tbody tr")) == 64
        fits(browser)
        assert browser.console() == []


def test_several_runs_stand_beside_each_other_and_what_happens_is_added(browser: Browser, tmp_path: Path) -> None:
    runs = [begun_run(tmp_path / name / "run") for name in ("mine", "other")]
    for run in runs:
        trains(run, *range(1, 20))
    with served(*(run.path for run in runs), folder=tmp_path) as page:
        browser.open(page.url)
        wait_until(browser, "document.querySelectorAll('#compare-curve .trace path').length === 2")
        names = [link.text for link in browser.all("#compare-runs a")]
        assert names == ["mine/run · dp=2", "other/run · dp=2"]
        happens(runs[1], "restart", reason="one.", attempt=1)
        happens(runs[1], "restart", reason="two.", attempt=2)
        wait_until(browser, "document.querySelectorAll('#run-1 .log li').length === 2")
        told = [entry.text for entry in browser.all("#run-1 .log .text")]
        assert [" ".join(text.split()) for text in told] == [
            "attention two. Starting again, attempt 3.",
            "attention one. Starting again, attempt 2.",
        ]
        assert browser.all("#run-0 .log li") == []
        for number in range(150):  # they do not push failures out
            happens(runs[1], "evaluation", step=20 + number, metrics={"accuracy": 0.5})
        wait_until(browser, "document.querySelector('#run-1 [data-f=earlier]').textContent.startsWith('50 earlier')")
        browser.run("document.querySelector('#run-1 input').click()")
        shown = [entry.text for entry in browser.all("#run-1 .log li") if entry.is_displayed()]
        assert ["Starting again" in text for text in shown] == [True, True]
        fits(browser)
        assert browser.console() == []


def test_what_others_wrote_is_text_and_nothing_else(browser: Browser, tmp_path: Path) -> None:
    attack = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"
    run = begun_run(tmp_path / "<b>mine")
    trains(run, 1, 2, 3)
    happens(run, "restart", reason=attack + "\x1b[2J\u202e", attempt=1)
    happens(run, "evaluation", step=2, metrics={attack: 0.5})
    happens(run, "links", links={"a": {"sent_bytes": 1, "received_bytes": 2}, attack: {}})
    happens(run, "start", total_steps=10, transport=attack)
    happens(run, "end", reason=attack, time=time.time())
    with served(run.path, folder=tmp_path) as page:
        browser.open(page.url)
        wait_until(browser, "document.querySelectorAll('.log li').length > 1")
        assert browser.one("[data-f=name]").text == "<b>mine"
        assert attack in browser.one("[data-f=state]").text
        assert attack in browser.one(".log").text
        assert r"\x1b[2J\u202e" in browser.one(".log").text
        assert browser.run("return document.title") != "owned"
        assert browser.all("main img, main script") == []
        fits(browser)
        assert browser.console() == []
