"""`benchmarks/gpu.py`: nothing is silently absent, a crash is a row, marks say where it ran, the page is text."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gpu
import gpu_page
import gpu_results as of
from browser import Browser
from paceline.device import ON_CPU
from paceline.errors import PlanError
from paceline.stats import Interval
from simulated.environment import Simulated

_FOLDER = Path(__file__).parents[2] / "benchmarks"
HOSTILE = "</script><script>window.stolen = 1</script>"


def results(name: str = "H100 80GB", kind: str = "cuda") -> Any:
    """Two checks, one of them crashed, and a speed beside one that no time was left for."""
    described = of.Described(kind, name, 80 * 2**30, True, {"bf16": True, "graphs": False}, {"cuDNN": "9"})
    found = of.Results(described, 2, 10.0, "benchmarks/gpu.py", {"torch": "2.13.0"})
    found.checks += [
        of.CheckRow("One device", "GPT", "dp=1", "holds", "loss 1e-12 of 1e-09", {"loss": 1e-12}, {"loss": 1e-9}, 3.0),
        of.CheckRow("Splits", "tensor parallel", "tp=2", "crashed", f"LaunchError: {HOSTILE}"),
        of.CheckRow("Splits", "pipeline", "pp=2", "not run", of.NO_TIME),
    ]
    ours, theirs = of.Side(Interval(0.09, 0.1, 0.11), 3 * 2**30), of.Side(Interval(0.11, 0.12, 0.13), None)
    ratio = Interval(1.1, 1.2, 1.3)
    whole = of.SpeedRow("gpt", "GPT", "dp=1", "plain PyTorch", 1, 8, "measured", "losses agree", "bf16", 1024)
    whole = replace(whole, ours=ours, theirs=theirs, ratio=ratio, peak_share=0.04, predicted_step_s=0.08)
    found.speeds += [whole, replace(whole, key="gpt_ddp", beside="DDP", devices=2, global_batch=16)]
    found.speeds.append(of.SpeedRow("cnn", "CNN", "dp=1", "plain PyTorch", 1, 512, "not run", of.NO_TIME))
    return found


def test_figures_are_counts_of_checks_and_ratios_with_predictions_beside_them() -> None:
    figures = results().figures()
    assert {name: figures[name] for name in ("checks", "checks_holds", "checks_crashed", "checks_not_run")} == {
        "checks": 3,
        "checks_holds": 1,
        "checks_crashed": 1,
        "checks_not_run": 1,
    }
    assert figures["gpt_ratio_to_plain"] == 1.2
    assert figures["gpt_samples_per_s"] == pytest.approx(80)
    assert figures["gpt_tokens_per_s"] == pytest.approx(80 * 1024)
    assert figures["gpt_mfu"] == pytest.approx(0.4)
    assert figures["gpt_predicted_to_step"] == pytest.approx(0.8)
    assert figures["gpt_weak_efficiency"] == pytest.approx(1.0)
    assert not any(name.startswith("cnn") for name in figures)


def test_simulated_devices_are_marked_and_have_no_speeds(tmp_path: Path) -> None:
    found = results("simulated accelerator", "other")
    found.write(tmp_path / "result.json")
    text = json.loads((tmp_path / "result.json").read_text())
    assert text["heading"].startswith("SIMULATED, no accelerator")
    assert {name.partition("_")[0] for name in text["figures"]} == {"checks"}
    assert [row["verdict"] for row in text["speeds"]] == ["measured", "measured", "not run"]
    assert all(row["ours"] is row["ratio"] is row["predicted_step_s"] is None for row in text["speeds"])
    assert results("CPU", "cpu").heading.startswith("A TRY ON THE CPU")


def test_texts_name_no_folder_of_the_machine() -> None:
    text = of.without_places(f'File "{_FOLDER}/gpu.py", in {Path.home()}/data/x.py and /opt/some/where/lib.so')
    assert str(_FOLDER) not in text
    assert str(Path.home() / "data") not in text
    assert "/opt" not in text
    assert "gpu.py" in text
    assert "lib.so" in text
    kept = of.public({"host": "secret", "torch": "2", "variables": {"MASTER_ADDR": "10.0.0.1", "NCCL_DEBUG": "INFO"}})
    assert kept == {"torch": "2", "variables": {"NCCL_DEBUG": "INFO"}}


def test_a_crash_or_an_endless_row_is_a_row_and_what_does_not_fit_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "ROW_S", 0.2)
    empty = results()
    empty.checks.clear()
    measurement = gpu.Measurement(empty, tmp_path, time.monotonic())

    def crash() -> Any:
        raise ZeroDivisionError("of a kernel")

    def refuse() -> Any:
        raise PlanError("test.planted", "no such split")

    cases = [of.CheckRow("g", str(i), "dp=1", "not run") for i in range(4)]
    rows = [crash, refuse, lambda: time.sleep(60), lambda: replace(cases[3], verdict="holds")]
    pending = [measurement.pending(case, do) for case, do in zip(cases, rows, strict=True)]
    unfit = [measurement.pending(of.CheckRow("g", "late", "dp=1", "not run"), crash)]
    measurement.take([(1.0, pending), (0.0, unfit)])
    assert [row.verdict for row in empty.checks] == ["crashed", "refused", "crashed", "holds", "crashed"]
    assert empty.checks[0].about == "ZeroDivisionError: of a kernel"
    assert len(json.loads((tmp_path / "result.json").read_text())["checks"]) == 5

    short = gpu.Measurement(
        replace(empty, minutes=0.1, checks=[]), tmp_path, time.monotonic()
    )  # less than a start takes
    short.take([(0.0, [short.pending(cases[0], crash)])])
    assert [(row.verdict, row.about) for row in short.results.checks] == [("not run", "not run: time")]


@pytest.mark.slow
@pytest.mark.needs_chromium
def test_the_page_shows_every_row_as_text(browser: Browser, tmp_path: Path) -> None:
    page = gpu_page.write_results_page(results(), tmp_path / "report.html")
    browser.open(page, width=400)
    assert "1 of 2 paths are wrong here" in browser.one("#verdict").text
    verdicts = [row.get_attribute("data-verdict") for row in browser.all("#checks tr")]
    assert verdicts == ["holds", "crashed", "not run"]
    values = [float(cell.get_attribute("data-value") or "nan") for cell in browser.all("#speeds td[data-value]")]
    assert values[:4] == [1.2, 1.2, 0.1, 0.1]
    assert [cell.text for cell in browser.all("#outcomes td")] == ["losses agree"] * 2 + ["not run: time"]
    assert len(browser.all(".plot")) == 1
    assert browser.run("return window.stolen") is None
    assert browser.run("return document.documentElement.scrollWidth") == 400
    assert browser.console() == []
    assert browser.requests() == []


@pytest.mark.slow
def test_without_an_accelerator_it_says_what_it_would_do(tmp_path: Path) -> None:
    ended = _started(tmp_path, "--json", stdout=subprocess.PIPE)
    said, _ = ended.communicate(timeout=120)
    assert ended.returncode == 2
    assert "finds no accelerator" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_try_on_the_cpu_checks_and_measures(tmp_path: Path) -> None:
    found = measured(tmp_path, "gpt_ratio_to_plain", 5, "--device", "cpu", "--json")
    figures = found["figures"]
    assert figures["checks_differs"] + figures["checks_crashed"] + figures["checks_cannot_tell"] == 0, found
    assert figures["checks_holds"] >= 5
    assert figures["gpt_ratio_to_plain"] > 0
    assert all(row["about"] == "not run: time" for row in found["checks"] if row["verdict"] == "not run")
    assert (tmp_path / "out" / "report.html").stat().st_size > 10**4


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_simulated_accelerators_are_used_and_marked(simulated: Simulated, tmp_path: Path) -> None:
    found = measured(tmp_path, "checks", 3, env=os.environ | simulated.environment())
    assert found["heading"].startswith("SIMULATED, no accelerator: 2 × ")
    assert found["figures"]["checks_holds"] >= 3, found
    assert found["figures"]["checks_differs"] + found["figures"]["checks_crashed"] == 0, found
    assert "SIMULATED" in (tmp_path / "out" / "report.html").read_text()


def measured(folder: Path, figure: str, checks: int, *options: str, **about: Any) -> dict[str, Any]:
    """Result of a try of minutes; a longer one where a busy machine came to less than a figure and so many checks."""
    for minutes in ("1.5", "15"):
        shutil.rmtree(folder / "out", ignore_errors=True)
        tried = (*options, "--minutes", minutes, "--out", "out")
        with _started(folder, *tried, stdout=subprocess.PIPE, **about) as ended:
            said, _ = ended.communicate(timeout=60 * float(minutes) + 300)
        assert ended.returncode == 0, said
        found: dict[str, Any] = json.loads((folder / "out" / "result.json").read_text())
        if figure in found["figures"] and found["figures"]["checks_holds"] >= checks:
            break
    return found


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    with _started(tmp_path, "--device", "cpu", "--out", "out", stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert "holds" in running.stdout.readline()
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=120)
    assert running.returncode == 130
    kept = json.loads((tmp_path / "out" / "result.json").read_text())
    assert kept["interrupted"] is True
    assert kept["checks"][0]["verdict"] == "holds"
    assert kept["checks"][-1]["verdict"] == "not run"
    assert (tmp_path / "out" / "report.html").exists()


def _started(folder: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    options = {"env": os.environ | ON_CPU, **options}
    command = [sys.executable, str(_FOLDER / "gpu.py"), *arguments]
    return subprocess.Popen(command, cwd=folder, text=True, **options)
