"""`paceline report`: a page about a run or a benchmark, and helpful errors otherwise."""

from __future__ import annotations

from pathlib import Path

from commands import in_a_process, paceline, write_job
from handmade_reports import report


def test_it_writes_the_page_of_a_run_and_says_where(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", stop={"steps": 12})
    assert paceline("train", job, "--plan", "dp=1", "--run", "run", folder=tmp_path).code == 0
    shown = in_a_process("report", "run", folder=tmp_path)
    assert (shown.code, shown.out, shown.err) == (0, "run/report.html\n", "")
    assert "Trained 12 steps" in (tmp_path / "run" / "report.html").read_text()


def test_it_writes_the_page_of_a_benchmark(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "report.json").write_text(report().to_json())
    shown = paceline("report", "bench", folder=tmp_path)
    assert (shown.code, shown.out) == (0, "bench/report.html\n")
    assert "2.43 times as fast with 4 cores by plan dp=4" in (tmp_path / "bench" / "report.html").read_text()


def test_a_directory_that_is_neither_is_an_error(tmp_path: Path) -> None:
    error = paceline("report", ".", folder=tmp_path).error
    assert "[report.unknown_directory]" in error
    error = paceline("report", "absent", folder=tmp_path).error
    assert error.startswith("absent ")
    assert "[report.no_directory]" in error


def test_a_report_that_is_broken_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text('{"job": "digits"')
    assert paceline("report", ".", folder=tmp_path).error.startswith(
        "report.json cannot be read as a benchmark's report"
    )
