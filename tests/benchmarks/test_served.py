"""Processes that take turns in a benchmark answer in rank order, and none is waited for without end."""

from __future__ import annotations

from pathlib import Path

import pytest

import served

_ANSWERS = """
import json, os, sys, time
for line in sys.stdin:
    question = json.loads(line)
    if question == "end" and os.environ["RANK"] == "1":
        sys.exit(3)
    if question == "hang" and os.environ["RANK"] == "1":
        time.sleep(600)
    print(json.dumps([question, int(os.environ["RANK"]), os.environ.get("SETTING")]), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "answers.py"
    file.write_text(_ANSWERS)
    return str(file)


def test_all_ranks_answer_in_order_with_the_variables_they_are_given(script: str) -> None:
    with served.Ranks([script], ranks=3, environment={"SETTING": "here"}) as ranks:
        assert ranks.ask("a") == [["a", rank, "here"] for rank in range(3)]
        assert ranks.ask("b" * 200_000)[2][0] == "b" * 200_000  # more than a pipe holds


def test_a_variable_can_be_taken_from_the_ranks(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SETTING", "of the caller")
    with served.Ranks([script], ranks=1, environment={"SETTING": None}) as ranks:
        assert ranks.ask("a") == [["a", 0, None]]


def test_a_rank_that_ends_stops_the_benchmark_and_is_named(script: str) -> None:
    with (
        pytest.raises(SystemExit, match=r"rank 1 of .*answers\.py, asked for end, ended"),
        served.Ranks([script], ranks=2) as ranks,
    ):
        ranks.ask("end")


@pytest.mark.slow
def test_a_rank_that_hangs_stops_the_benchmark_at_the_deadline(script: str) -> None:
    with (
        pytest.raises(SystemExit, match=r"rank 1 .* did not answer within 5 s"),
        served.Ranks([script], ranks=2, deadline_s=5) as ranks,
    ):
        ranks.ask("hang")
    assert all(process.returncode is not None for process in ranks.processes)
