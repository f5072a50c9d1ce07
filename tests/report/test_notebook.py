"""What notebooks and prompts show of runs, plans and benchmarks."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from handmade_comparisons import comparison
from handmade_live import begun_run, happens, trains
from handmade_reports import report
from paceline.planning.plan import Plan
from paceline.run.parity.check import LargestDifference, Parity, StepParity, Tolerance
from paceline.run.record.run import Run
from paceline_lab.report.notebook import comparison_html, report_html

SERVERS = "2x4xT4, 10gbit"


class Shown(HTMLParser):
    """Elements of a text in HTML, by name, and what a reader sees."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


def assert_safe(html: str) -> Shown:
    """It has no script, no handler, and nothing from elsewhere."""
    shown = Shown(html)
    assert "script" not in shown.elements
    assert not [name for name, _ in shown.attributes if name.startswith("on") or name in ("src", "href")]
    return shown


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = begun_run(tmp_path / "run <script>alert(1)</script>")
    for number in range(1, 9):
        trains(made, number, loss=1 / number)
    happens(made, "evaluation", step=8, metrics={"loss": 0.25, "<img onerror=x>": 0.5})
    happens(made, "end", step=8, reason="steps: 8 <b>done</b>", elapsed_s=3.0)
    return made


def test_a_run_shows_its_curve_and_its_figures_and_nothing_that_runs(run: Run) -> None:
    shown = assert_safe(run._repr_html_())
    assert {"svg", "table"} <= set(shown.elements)
    assert "img" not in shown.elements
    for figure in ("steps: 8 <b>done</b>", "0.25", str(run.path)):
        assert figure in shown.text
    assert "step 8, loss 0.125" in repr(run)


def test_a_run_before_its_first_step_and_a_record_of_something_else_are_shown_as_such(tmp_path: Path) -> None:
    made = begun_run(tmp_path / "run")
    assert "svg" not in assert_safe(made._repr_html_()).elements
    (made.path / "steps" / "rank-0.jsonl").write_text('{"loss": 1}\n')
    assert str(made.path) in repr(made), "a prompt shows something, whatever is in the directory"


@pytest.mark.parametrize("plan", ["dp=2 tp=2 sync=diloco:30", "pp=3 fsdp=2 microbatches=4"])
def test_a_plan_shows_every_rank_once_and_every_choice(plan: str) -> None:
    parsed = Plan.parse(plan)
    shown = assert_safe(parsed._repr_html_())
    assert [shown.text.split().count(str(rank)) > 0 for rank in range(parsed.ranks)] == [True] * parsed.ranks
    assert shown.elements.count("g") == parsed.ranks
    for word in plan.split():
        key, value = word.split("=")
        assert f" {key} {value} " in shown.text
    assert "svg" not in Shown(Plan(dp=4096)._repr_html_()).elements


def test_benchmarks_show_a_bar_and_a_row_for_each_setting() -> None:
    measured, compared = report(), comparison(job="<b>digits</b>")
    for html, rows in ((report_html(measured), measured.settings), (comparison_html(compared), compared.ways)):
        shown = assert_safe(html)
        assert "svg" in shown.elements
        assert shown.elements.count("tr") >= len(rows) + 1
    assert measured._repr_html_() == report_html(measured)
    assert compared._repr_html_() == comparison_html(compared)
    assert "<b>digits</b>" in Shown(comparison_html(compared)).text


def test_a_prompt_shows_what_an_object_is_in_one_line() -> None:
    job = paceline.Job(
        model="mlp", data="digits", loss="cross_entropy", optimizer="sgd", global_batch=64, stop={"epochs": 3}
    )
    plan = Plan.parse("dp=2 sync=local:4 fused=on")
    assert eval(repr(plan), {"Plan": Plan}) == plan
    model = nn.Linear(2, 2)
    engine = paceline.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.functional.mse_loss)
    engine.close()
    far = LargestDifference(2e-9, "weight", 1)
    parity = Parity(plan, Tolerance(1e-5, 1e-4, 1e-4, 1e-4), [StepParity(1.0, 1.0, far, far, far)])
    objects: dict[str, Any] = {
        "mlp on digits": job,
        "2 hosts of 4 × T4": paceline.Cluster(catalogue=SERVERS),
        "a rank, which fits": paceline.estimate(job, "dp=2", cluster=SERVERS),
        "rank 0 of 1": engine,
        "not updated: a spike": paceline.StepResult(3, 9.0, 64, 1.5, "a spike", {}, None),
        "fused=on sync=local:4: holds": parity,
        "2 devices, weak": report(),
    }
    for words, thing in objects.items():
        assert words in repr(thing)
        assert "\n" not in repr(thing)
        assert len(repr(thing)) < 300
