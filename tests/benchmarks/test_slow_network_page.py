"""The page that compares sync rules at several speeds of the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import slow_network_page as rules
from browser import Browser

HOSTILE = "</script><script>window.stolen = 1</script>"


def rates(**changes: str) -> Any:
    """Two rules at two rates.

    At one of them the second rule did not reach the target, and the losses of a third are not known.
    """
    seconds, losses = [float(i + 1) for i in range(100)], [1 + 2 * 0.97**i for i in range(100)]
    whole = rules.RuleFigures("DDP", "", 20e6, 8.0, 800.0, 1.5, [8 * s for s in seconds], losses)
    fast = rules.RuleFigures(
        changes.get("name", "int8"), "dp=4 compress=int8", 5e6, 2.1, 210.0, 1.51, [2.1 * s for s in seconds], losses
    )
    lost = rules.RuleFigures("int8", "dp=4 compress=int8", None, 0.9, None, None, seconds, [4.0] * 100)
    untrained = rules.RuleFigures("auto", "dp=4 compress=auto", 5e6, 0.9, None, None)
    return rules.Rates(
        changes.get("title", "slow network"),
        "A small GPT.",
        {"25mbit": [whole, fast], "loopback": [whole, lost, untrained]},
        {"host": "vm"},
    )


@pytest.mark.slow
@pytest.mark.needs_chromium
def test_every_rate_has_a_table_the_loss_over_time_and_the_figures_as_bars(browser: Browser, tmp_path: Path) -> None:
    browser.open(rules.write_rules_page(rates(), tmp_path / "rules.html"), width=400)
    charts = [node.get_attribute("id") for node in browser.all(".plot")]
    assert charts == ["plot-loss-1", "plot-bars-1", "plot-loss-2", "plot-bars-2"]
    assert len(browser.all("#plot-loss-1 .trace.points")) == 2
    assert len(browser.all("#plot-loss-2 .trace.points")) == 2, "the third rule has no losses"
    assert [len(browser.all(f"#plot-bars-{n} .trace.bars")) for n in (1, 2)] == [4, 4]
    values = [float(cell.get_attribute("data-value") or "nan") for cell in browser.all("#rate-1 td[data-value]")]
    assert values == [20e6, 8.0, 800.0, 1.5, 5e6, 2.1, 210.0, 1.51]
    assert [cell.text for cell in browser.all("#rate-2 td.words")] == [
        "not measured",
        "not reached",
        "not measured",
        "not measured",
        "not measured",
    ]
    assert browser.run("return document.documentElement.scrollWidth") == 400
    assert browser.console() == []
    assert browser.requests() == []


@pytest.mark.slow
@pytest.mark.needs_chromium
def test_names_are_text_and_never_a_script(browser: Browser, tmp_path: Path) -> None:
    browser.open(rules.write_rules_page(rates(name=HOSTILE, title=HOSTILE), tmp_path / "rules.html"))
    assert browser.one("#verdict").text == HOSTILE
    assert len(browser.all(".plot")) == 4
    assert browser.run("return window.stolen") is None
