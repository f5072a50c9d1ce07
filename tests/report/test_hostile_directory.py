"""`paceline report` on a directory that somebody else has made.

Nothing of the reader's is overwritten, run or waited for.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import PacelineError, RunError
from paceline.report import run_record
from paceline.report.run_page import write_run_page
from paceline.report.run_record import RunRecord
from paceline.run.record.run import Run
from paceline_lab.report.bench_view import write_bench_page
from paceline_lab.scaling.result import Report
from refusals import raises
from small_jobs import small_job, train_here


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_here(tmp_path_factory.mktemp("trained") / "run", small_job(stop={"steps": 8})).path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_no_file_of_the_reader_is_written_through_a_link_with_the_name_of_a_temporary_file(
    run: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("the reader's")
    for name in (f".report.html.{os.getpid()}", ".report.html", "report.html", ".report.html.partial"):
        (run / name).symlink_to(precious)
    write_run_page(Run(run))
    assert precious.read_text() == "the reader's"
    assert not (run / "report.html").is_symlink()
    assert stat.S_IMODE((run / "report.html").stat().st_mode) == 0o600


def test_a_file_of_a_rank_with_a_huge_number_costs_nothing(run: Path) -> None:
    shutil.copy(run / "steps/rank-0.jsonl", run / "steps/rank-99999999.jsonl")
    (run / "steps/rank-9999999999999999999999.jsonl").write_text("")
    record = RunRecord.read(Run(run))
    assert list(record.ranks) == [0, 99999999]
    assert record.gaps == ["steps/rank-1.jsonl to rank-99999998.jsonl are missing: ranks 1 to 99999998 are not shown."]
    write_run_page(Run(run))


def test_a_plan_of_a_hundred_million_ranks_costs_nothing(run: Path) -> None:
    (run / "plan.txt").write_text("dp=100000000")
    assert "ranks 1 to 99999999 are not shown" in RunRecord.read(Run(run)).gaps[0]


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


def deep(path: Path) -> None:
    path.write_text("[" * 200_000)  # slow to parse, or too deep


def folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("name", ["steps/rank-0.jsonl", "events.jsonl", "environment.json", "plan.txt", "cluster.yaml"])
@pytest.mark.parametrize("made", [endless, pipe, sparse, deep, folder])
def test_what_is_no_file_of_a_run_is_told_and_never_waited_for(
    run: Path, name: str, made: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_record, "FILE_LIMIT", 2**22)
    (run / name).unlink()
    made(run / name)
    if name in ("events.jsonl", "environment.json"):  # the page does without
        page = write_run_page(Run(run)).read_text()
        assert (
            f"{name} cannot be read" in page
            or "cannot be read and is left out" in page
            or "missing or cannot be read" in page
        )
    else:
        with pytest.raises(PacelineError, match=r"plan|cluster|rank-0|no finished step"):
            write_run_page(Run(run))


@pytest.mark.parametrize(
    "line",
    [
        '{"step": NaN, "time": 1, "samples": 8}',
        '{"step": 1e308, "epoch": 0}',
        '{"use": {"memory_bytes": "many"}}',
        '{"loss": Infinity}',
        '{"step_s": -Infinity}',
        "[]",
        "null",
        '"text"',
        '{"step": ' + "9" * 5000 + "}",
    ],
)
def test_a_line_with_values_that_no_run_writes_is_left_out(run: Path, line: str) -> None:
    steps = run / "steps/rank-0.jsonl"
    whole = json.loads(steps.read_text().splitlines()[0])
    try:
        changed = json.loads(line)
        text = json.dumps(whole | changed) if isinstance(changed, dict) else line
    except ValueError:
        text = line
    steps.write_text(steps.read_text() + text + "\n")
    record = RunRecord.read(Run(run))
    assert len(record.ranks[0]) == 8
    assert "1 line of steps/rank-0.jsonl cannot be read" in record.gaps[0]
    write_run_page(Run(run))


@pytest.mark.parametrize(
    "event",
    ["start", "end", "resume", "evaluation", "restart", "sync", "rewind", "nonfinite", "spike", "links", "experts"],
)
def test_an_event_without_what_belongs_to_it_breaks_no_page(run: Path, event: str) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write(
            json.dumps({"event": event, "time": 1e9, "step": "x", "said": 3, "parameters": "<b>", "elapsed_s": 2})
            + "\n"
        )
    try:
        assert write_run_page(Run(run)).is_file()
    except RunError as error:
        assert error.code == "report.folder_invalid"  # noqa: PT017 - either is right


def test_the_page_of_a_benchmark_made_of_wrong_types_is_an_error_of_one_line(tmp_path: Path) -> None:
    for text in ("[]", '{"settings": 3}', "[" * 100_000, '{"settings": [{"step_time_s": 1}]}'):
        (tmp_path / "report.json").write_text(text)
        with raises(RunError, "bench.report_unreadable"):
            write_bench_page(Report.load(tmp_path / "report.json"), tmp_path)


def test_a_cluster_file_that_unfolds_to_gigabytes_is_refused(run: Path) -> None:
    lines = [
        "a: &a [x,x,x,x,x,x,x,x,x]",
        *(f"{b}: &{b} [{','.join(['*' + a] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
    ]
    (run / "cluster.yaml").write_text("\n".join(lines))
    with raises(RunError, "run.file_invalid"):
        write_run_page(Run(run))
