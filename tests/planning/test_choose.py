"""`paceline.plan(job, cluster)`: the best plan, from objects, files or names."""

from __future__ import annotations

from pathlib import Path

import pytest

from handmade_search import cluster, job
from paceline.cluster.cluster import Cluster
from paceline.errors import ClusterError, PlanError
from paceline.planning.check.check_plan import check_plan
from paceline.planning.search.search import plan, search


def test_the_plan_is_the_best_that_the_search_finds_and_can_run() -> None:
    chosen = plan(job(), cluster())
    assert chosen == search(job(), cluster(), top=1).best[0].plan
    assert check_plan(chosen, job(), cluster()) == []


def test_files_and_names_stand_for_jobs_and_clusters(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(job().to_yaml())
    (tmp_path / "cluster.yaml").write_text(cluster().to_yaml())
    assert plan(tmp_path / "job.yaml", tmp_path / "cluster.yaml") == plan(job(), cluster())
    assert plan(job(), "2x8xH100-SXM, 400gbit").ranks <= 16


def test_unknown_hardware_is_an_error_with_the_nearest_names() -> None:
    with pytest.raises(ClusterError, match="H100"):
        plan(job(), "2x8xH1000-SXM")


def test_a_model_that_fits_nowhere_is_an_error_that_says_what_is_missing() -> None:
    large = job(model={"transformer": {"layers": 80, "hidden": 16384, "heads": 128, "seq": 1024, "vocab": 32000}})
    small = Cluster.model_validate({"catalogue": "V100-SXM-16"})
    with pytest.raises(PlanError, match="GiB"):
        plan(large, small)
