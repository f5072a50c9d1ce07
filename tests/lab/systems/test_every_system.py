"""Every system, installed from its pinned packages, trains one job to the same losses; one rank is then killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.job.job import Job
from paceline_lab.systems.compare import Compare
from paceline_lab.systems.system import SYSTEMS

ROOT = Path(__file__).parents[3]
JOB = {
    "model": {"zoo": "mlp", "args": {"hidden": 64}},
    "data": "digits",
    "loss": "cross_entropy",
    "optimizer": {"name": "sgd", "lr": 0.1},
    "global_batch": 64,
    "stop": {"steps": 10_000},
}
GO_ON = {"paceline-1"}  # when a rank is killed


@pytest.mark.slow
@pytest.mark.timeout(3600)  # the first time, packages of 2 GB are installed and Horovod is built
def test_all_compute_what_one_process_computes_and_ours_outlives_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(ROOT / "build" / "cache"))
    said: list[str] = []
    compare = Compare(
        Job.model_validate(JOB),
        None,
        SYSTEMS.names,
        plans=["dp=2"],  # `auto` takes one rank, of which none can be killed
        repeat=1,
        steps=15,
        tuned=False,
        kill=True,
        out=tmp_path / "compared",
        say=said.append,
    )
    found = compare.run()
    assert found is not None
    assert found.left_out == {}, "\n".join(said)
    ways = {way.way: way for way in found.ways}
    assert set(SYSTEMS.names) <= ways.keys()
    assert {name for name, way in ways.items() if not way.same} == {"tf-server"}, "the asynchronous one"
    assert {name for name, way in ways.items() if way.recovery.startswith("goes on")} >= GO_ON
    assert "paceline, --plan auto: not killed: it has no second rank, or ended before its time" in said
    assert ways["ddp"].recovery == "the training ends"
    assert all(way.memory_bytes > 0 for way in ways.values() if way.first_step_s.middle > 3)
