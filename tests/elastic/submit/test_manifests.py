"""Manifests of Kubernetes, held to the published models of Kubeflow, JobSet and the core kinds.

The models accept unknown keys and drop them, so what they give back is compared with what went in.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.elastic.submit.kubernetes import KINDS, Kubernetes, as_yaml, manifests
from paceline.elastic.submit.scheduler import Request
from paceline.errors import LaunchError
from paceline.wire.key import RunKey
from refusals import raises

ALL = {
    "image": "registry/mine:1",
    "claim": "shared",
    "namespace": "team",
    "cpus": "8",
    "memory": "64Gi",
    "gpus": "4",
    "user": "1000",
}


@pytest.fixture
def models() -> Any:
    """Kubeflow's published models; to import them takes longer than all other tests of this file."""
    return importlib.import_module("kubeflow_trainer_api.models")


@pytest.fixture
def request_(tmp_path: Path) -> Request:
    (tmp_path / "job.yaml").write_text("name: mine\n# “quoted” \\ text\n")
    return Request(tmp_path / "job.yaml", 4, "mine-1", "/runs/mine-1", options=ALL)


def objects(kind: str, request: Request, key: str = "KEY") -> dict[str, Any]:
    """The objects by kind, as a cluster would read them from the text."""
    documents = list(yaml.safe_load_all(as_yaml(manifests(kind, request, key))))
    return {document["kind"]: document for document in documents}


@pytest.mark.parametrize(
    ("kind", "name", "model"),
    [
        ("trainjob", "TrainJob", "TrainerV1alpha1TrainJob"),
        ("jobset", "JobSet", "JobsetV1alpha2JobSet"),
    ],
)
def test_the_published_model_knows_every_key(models: Any, kind: str, name: str, model: str, request_: Request) -> None:
    manifest = objects(kind, request_)[name]
    read = getattr(models, model).from_dict(manifest)
    assert read.to_dict() == manifest
    assert manifest["apiVersion"] == KINDS[kind]


def test_the_pods_of_the_jobs_are_known_as_well(models: Any, request_: Request) -> None:
    for kind in ("jobset", "job"):
        template = pod_template(kind, request_)
        assert models.IoK8sApiCoreV1PodTemplateSpec.from_dict(template).to_dict() == template
    job = objects("job", request_)["Job"]["spec"]
    assert models.IoK8sApiBatchV1JobSpec.from_dict(job).to_dict() == job


def pod_template(kind: str, request: Request) -> dict[str, Any]:
    found = objects(kind, request)
    spec = found["Job"]["spec"] if kind == "job" else found["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    template: dict[str, Any] = spec["template"]
    return template


@pytest.mark.parametrize("kind", KINDS)
def test_the_key_is_in_the_secret_alone_and_readable_by_its_user_only(kind: str, request_: Request) -> None:
    pem = RunKey.make().to_pem().decode()
    found = objects(kind, request_, pem)
    secret = found.pop("Secret")
    assert secret["stringData"] == {"key.pem": pem, "job.yaml": request_.job.read_text()}
    assert "PRIVATE" not in str(found)
    assert "'secret': {'secretName': 'mine-1', 'defaultMode': 256}" in str(found)  # 0400


@pytest.mark.parametrize("kind", KINDS)
def test_every_object_has_the_label_by_which_cancel_deletes_it(kind: str, request_: Request) -> None:
    for manifest in manifests(kind, request_, "KEY"):
        assert manifest["metadata"]["labels"] == {"app.kubernetes.io/instance": "mine-1"}
        assert manifest["metadata"]["namespace"] == "team"


@pytest.mark.parametrize("kind", ["jobset", "job"])
def test_a_pod_finds_the_first_one_by_its_name(kind: str, request_: Request) -> None:
    container = pod_template(kind, request_)["spec"]["containers"][0]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    first = {"jobset": "mine-1-host-0-0.mine-1", "job": "mine-1-0.mine-1"}[kind]
    assert variables["PACELINE_COORDINATOR"] == f"{first}:29600"
    assert variables["PACELINE_HOSTS"] == "4"
    assert container["command"][:4] == ["python", "-m", "paceline", "train"]
    assert {"--resume", "/etc/paceline/job.yaml", "/runs/mine-1"} <= set(container["command"])


def test_a_service_names_the_pods_of_a_job_before_they_are_ready(request_: Request) -> None:
    found = objects("job", request_)
    service = found["Service"]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert service["selector"].items() <= found["Job"]["spec"]["template"]["metadata"]["labels"].items()
    assert found["Job"]["spec"]["template"]["spec"]["subdomain"] == found["Service"]["metadata"]["name"]


def test_a_preempted_run_starts_again_and_is_not_counted(request_: Request) -> None:
    job_set = objects("jobset", request_)["JobSet"]["spec"]
    [rule] = job_set["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    job = job_set["replicatedJobs"][0]["template"]["spec"]
    assert {r["action"] for r in job["podFailurePolicy"]["rules"]} == {"FailJob"}
    assert 143 in job["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"]
    disruption, stopped, wrong = objects("job", request_)["Job"]["spec"]["podFailurePolicy"]["rules"]
    assert (disruption["action"], stopped["action"], wrong["action"]) == ("Ignore", "Ignore", "FailJob")
    assert stopped["onExitCodes"]["containerName"] == "node"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"options": {"claim": "shared"}}, "submit.image_missing"),
        ({"options": {"image": "a"}}, "submit.run_in_pod"),
        ({"options": {"image": "a", "claim": "b"}, "run": "/elsewhere/a"}, "submit.run_in_pod"),
        ({"options": {"image": "a", "claim": "b", "kind": "pod"}}, "submit.kind_unknown"),
    ],
)
def test_what_a_pod_would_lack_is_told_before(changes: dict[str, Any], code: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("")
    given: dict[str, Any] = {"job": tmp_path / "job.yaml", "hosts": 2, "name": "a", "run": "/runs/a"} | changes
    given["options"] = {"kind": "job"} | given["options"]
    with raises(LaunchError, code):
        Kubernetes().text(Request(**given))


@pytest.mark.parametrize("kind", KINDS)
def test_containers_of_another_user_than_root_get_the_secret_by_their_group(kind: str, request_: Request) -> None:
    found = str(objects(kind, request_))
    assert "'runAsUser': 1000" in found
    assert "'fsGroup': 1000" in found
    of_the_image = {name: value for name, value in ALL.items() if name != "user"}
    assert "runAsUser" not in str(objects(kind, replace(request_, options=of_the_image)))


@pytest.mark.parametrize("user", ["0", "root", "-1", "99999999999", "1e3"])
def test_a_user_that_is_no_number_is_refused(user: str, request_: Request) -> None:
    with raises(LaunchError, "submit.user_invalid"):
        manifests("job", replace(request_, options=ALL | {"user": user}), "KEY")
