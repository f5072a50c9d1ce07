"""Traces as Perfetto's own trace processor reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

import perfetto_page
from browser import Browser
from commands import paceline, write_job

pytestmark = pytest.mark.needs_chromium


def test_perfetto_reads_every_slice_arrow_and_counter_of_a_run_of_two_ranks(tmp_path: Path, browser: Browser) -> None:
    job = write_job(tmp_path / "job.yaml", stop={"steps": 20})
    assert paceline("train", job, "--plan", "dp=2", "--run", "run", folder=tmp_path).code == 0
    assert paceline("trace", "run", "--steps", "5-14", folder=tmp_path).code == 0
    with perfetto_page.opened(tmp_path / "run" / "trace.json", browser) as read:
        assert not read.problems()
        names = [row[0] for row in read.ask("select name from process where pid > 0 order by pid")]
        assert names == ["critical path", "run", "rank 0", "rank 1"]
        steps = read.ask(
            "select process.name, count(*) from slice join thread_track on track_id = thread_track.id "
            "join thread using (utid) join process using (upid) where slice.category = 'step' group by 1 order by 1"
        )
        assert steps == [["rank 0", 10], ["rank 1", 10]]
        # the parts of a step are inside of it, and fill it
        left = "select parent.dur - sum(child.dur) from slice child join slice parent on child.parent_id = parent.id"
        assert {row[0] for row in read.ask(f"{left} where parent.category = 'step' group by parent.id")} == {0}
        assert read.ask("select count(*) from slice where category = 'part' and depth = 0") == [[0]]
        arrows = read.ask(
            "select source.name, target.name, target.ts > source.ts from flow join slice source on slice_out = "
            "source.id join slice target on slice_in = target.id"
        )
        assert arrows == 10 * [["compute", "exposed communication", 1]]


@pytest.mark.slow
def test_perfetto_reads_the_operations_of_two_ranks(tmp_path: Path, browser: Browser) -> None:
    job = write_job(tmp_path / "job.yaml", stop={"steps": 12})
    assert paceline("train", job, "--plan", "dp=2", "--run", "run", folder=tmp_path).code == 0
    assert paceline("trace", "run", "--operations", folder=tmp_path).code == 0
    with perfetto_page.opened(tmp_path / "run" / "operations.json", browser) as read:
        assert not read.problems()
        found = read.ask(
            "select process.name, count(*) from slice join thread_track on track_id = thread_track.id join thread "
            "using (utid) join process using (upid) where slice.name glob 'paceline step *' group by 1 order by 1"
        )
        assert found == [["rank 0", 3], ["rank 1", 3]]
        # an operation's gradient is joined to it, within its own rank
        assert read.ask("select count(*) > 0 from flow") == [[1]]
