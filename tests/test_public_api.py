"""The public names of the packages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import paceline
import paceline_lab
import paceline_server

PACKAGES = [paceline, paceline_lab, paceline_server]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_has_the_name_of_a_public_function(package: ModuleType) -> None:
    folders = {path.name for path in Path(str(package.__file__)).parent.iterdir() if path.is_dir()}
    assert folders.isdisjoint(package.__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_leads_to_something_that_can_be_called(package: ModuleType) -> None:
    assert [name for name in package.__all__ if not callable(getattr(package, name))] == []


# The forms of job, plan and cluster

NAME = "2x4xT4, 10gbit"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "job.yaml").write_text(
        "model: mlp\ndata: digits\nloss: cross_entropy\noptimizer: sgd\nglobal_batch: 64\nstop: {steps: 3}\n"
    )
    (folder / "cluster.yaml").write_text(f"catalogue: {NAME}\n")
    return folder


@pytest.mark.parametrize("ask", [paceline.estimate, paceline.plan_errors])
def test_a_job_a_plan_and_a_cluster_have_the_same_forms_everywhere(ask: Callable[..., Any], files: Path) -> None:
    job, cluster = paceline.Job.load(files / "job.yaml"), paceline.Cluster(catalogue=NAME)
    expected = ask(job, paceline.Plan(dp=16), cluster=cluster)
    for named_job in (files / "job.yaml", str(files / "job.yaml"), f"file://{files / 'job.yaml'}"):
        for named_cluster in (NAME, files / "cluster.yaml", str(files / "cluster.yaml")):
            assert ask(named_job, "dp=16", cluster=named_cluster) == expected
            assert paceline.plan(named_job, cluster=named_cluster) == paceline.plan(job, cluster=cluster)


def test_another_thing_in_the_place_of_a_job_a_plan_or_a_cluster_is_named(files: Path) -> None:
    job: Any = paceline.Job.load(files / "job.yaml")
    cluster: Any = paceline.Cluster(catalogue=NAME)
    plan: Any = paceline.Plan()
    ask: Any
    for ask, code in (
        (lambda: paceline.train(job, cluster), "api.not_a_plan"),
        (lambda: paceline.check(plan, "dp=2"), "api.not_a_job"),
        (lambda: paceline.estimate(job, "dp=2", cluster=job), "api.not_a_cluster"),
        (lambda: paceline.estimate(job, "auto"), "api.auto_plan"),
        (lambda: paceline.plan_errors(job, "auto"), "api.auto_plan"),
        (lambda: paceline.train(job, "dp=2", cluster=NAME), "cluster.catalogue_only"),
        (lambda: paceline.check(job, "dp=2", cluster=NAME), "cluster.catalogue_only"),
    ):
        with pytest.raises(paceline.PacelineError) as error:
            ask()
        assert error.value.code == code
