"""Manifests of Kubernetes: TrainJob of Kubeflow, JobSet, or indexed Job with its service."""

from __future__ import annotations

from typing import Any

import yaml

from paceline.elastic.submit.scheduler import Request
from paceline.errors import LaunchError

Manifest = dict[str, Any]

# What each kind needs of the cluster: the group and version of its API.
KINDS = {"trainjob": "trainer.kubeflow.org/v1alpha1", "jobset": "jobset.x-k8s.io/v1alpha2", "job": "batch/v1"}
NAME_LABEL = "app.kubernetes.io/instance"
_PORT = 29_600  # each pod has a network of its own
_SECRETS = "/etc/paceline"  # the job file and the run's key
RUNS = "/runs"  # where the claim is mounted
_GRACE_S = 120  # from SIGTERM on, for the last step and a checkpoint
_RESTARTS = 3  # of a run that failed; one that was preempted or evicted starts again however often
_STOPPED = [130, 143]  # exit codes of a run that saved after SIGINT or SIGTERM
_WRONG_COMMAND = 2


def manifests(kind: str, request: Request, key: str) -> list[Manifest]:
    """Secret with job file and key, and the objects of a kind, in order.

    Raises:
        LaunchError: an option is missing, or the run's directory would be lost with its pod.
    """
    if "image" not in request.options:
        raise LaunchError("say which image has paceline and your code: --set image=REGISTRY/NAME:TAG")
    if not request.run_is_url and not ("claim" in request.options and request.run.startswith(f"{RUNS}/")):
        raise LaunchError(
            f"--run {request.run}: a pod's own disk is lost with it. Name a store (--run s3://bucket/run), or a claim "
            f"of a volume that all pods may write to (--set claim=NAME --run {RUNS}/NAME)."
        )
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(request),
        "type": "Opaque",
        "stringData": {"key.pem": key, "job.yaml": request.job.read_text()},
    }
    return [secret, *{"trainjob": _train_job, "jobset": _job_set, "job": _indexed_job}[kind](request)]


def as_yaml(documents: list[Manifest]) -> str:
    """The text of manifests, in which a script keeps its lines."""
    return str(yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120))


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _train_job(request: Request) -> list[Manifest]:
    """A TrainJob. How often it starts again is the runtime's to say."""
    pod = {
        "terminationGracePeriodSeconds": _GRACE_S,
        **_user(request),
        "volumes": _volumes(request),
        "containers": [{"name": "node", "volumeMounts": _mounts(request)}],
    }
    node = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    trainer: Manifest = {
        "image": request.options["image"],
        "numNodes": request.hosts,
        "command": _command(request),
        "env": [_variable("PACELINE_KEY_FILE", f"{_SECRETS}/key.pem")],
    }
    if resources := _resources(request):
        trainer["resourcesPerNode"] = resources
    patch = {
        "manager": "paceline/submit",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}},
    }
    spec = {
        "runtimeRef": {"name": request.options.get("runtime", "torch-distributed")},
        "trainer": trainer,
        "runtimePatches": [patch],
    }
    return [{"apiVersion": KINDS["trainjob"], "kind": "TrainJob", "metadata": _metadata(request), "spec": spec}]


def _job_set(request: Request) -> list[Manifest]:
    """A JobSet: when one pod fails, all start again together."""
    job = _job_spec(request, coordinator=f"{request.name}-host-0-0.{request.name}", backoff=0)
    # A job that its policy fails was stopped, not wrong: the reason tells the JobSet so.
    stopped = {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    job["podFailurePolicy"] = {
        "rules": [{"action": "FailJob", **stopped}, {"action": "FailJob", "onExitCodes": _exit_codes(_STOPPED)}]
    }
    preempted = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": request.name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": _RESTARTS, "rules": [preempted]},
        "replicatedJobs": [{"name": "host", "replicas": 1, "template": {"spec": job}}],
    }
    return [{"apiVersion": KINDS["jobset"], "kind": "JobSet", "metadata": _metadata(request), "spec": spec}]


def _indexed_job(request: Request) -> list[Manifest]:
    """An indexed Job, whose pods are replaced singly, and the service that names them."""
    job = _job_spec(request, coordinator=f"{request.name}-0.{request.name}", backoff=_RESTARTS * request.hosts)
    job["template"]["spec"]["subdomain"] = request.name
    job["podFailurePolicy"] = {
        "rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "Ignore", "onExitCodes": _exit_codes(_STOPPED)},
            {"action": "FailJob", "onExitCodes": _exit_codes([_WRONG_COMMAND])},
        ]
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(request),
        "spec": {
            "clusterIP": "None",
            "selector": {NAME_LABEL: request.name},
            "publishNotReadyAddresses": True,
            "ports": [{"name": "paceline", "port": _PORT}],
        },
    }
    return [service, {"apiVersion": KINDS["job"], "kind": "Job", "metadata": _metadata(request), "spec": job}]


def _job_spec(request: Request, coordinator: str, backoff: int) -> Manifest:
    container: Manifest = {
        "name": "node",
        "image": request.options["image"],
        "command": _command(request),
        "env": [
            _variable("PACELINE_KEY_FILE", f"{_SECRETS}/key.pem"),
            _variable("PACELINE_HOSTS", str(request.hosts)),
            _variable("PACELINE_COORDINATOR", f"{coordinator}:{_PORT}"),
        ],
        "volumeMounts": _mounts(request),
    }
    if resources := _resources(request):
        container["resources"] = resources
    pod: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_S,
        **_user(request),
        "containers": [container],
        "volumes": _volumes(request),
    }
    return {
        "completions": request.hosts,
        "parallelism": request.hosts,
        "completionMode": "Indexed",
        "backoffLimit": backoff,
        "template": {"metadata": {"labels": {NAME_LABEL: request.name}}, "spec": pod},
    }


def _metadata(request: Request) -> Manifest:
    found: Manifest = {"name": request.name, "labels": {NAME_LABEL: request.name}}
    return found | ({"namespace": name} if (name := request.options.get("namespace")) else {})


def _command(request: Request) -> list[str]:
    python = request.options.get("python", "python")
    return [python, "-m", "paceline", *request.train_arguments(f"{_SECRETS}/job.yaml")]


def _resources(request: Request) -> Manifest:
    names = {"cpus": "cpu", "memory": "memory", "gpus": request.options.get("gpu-resource", "nvidia.com/gpu")}
    asked = {resource: request.options[name] for name, resource in names.items() if name in request.options}
    return {"requests": asked, "limits": dict(asked)} if asked else {}  # one object twice would be written as an anchor


def _user(request: Request) -> Manifest:
    """User of the containers, in whose group the Secret is mounted.

    Raises:
        LaunchError: it is no number of a user.
    """
    if (text := request.options.get("user")) is None:
        return {}
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:11]) < 2**31):
        raise LaunchError(f"--set user={text[:40]}: the number of a user other than root, e.g. 1000")
    number = int(text)
    ours = {"runAsUser": number, "runAsGroup": number, "fsGroup": number, "fsGroupChangePolicy": "OnRootMismatch"}
    return {"securityContext": {"runAsNonRoot": True, **ours}}


def _volumes(request: Request) -> list[Manifest]:
    volumes: list[Manifest] = [
        {"name": "paceline", "secret": {"secretName": request.name, "defaultMode": 0o400}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # a container's own has 64 MiB
    ]
    if claim := request.options.get("claim"):
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": claim}})
    return volumes


def _mounts(request: Request) -> list[Manifest]:
    mounts: list[Manifest] = [
        {"name": "paceline", "mountPath": _SECRETS, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    return [*mounts, {"name": "runs", "mountPath": RUNS}] if "claim" in request.options else mounts


def _variable(name: str, value: str) -> Manifest:
    return {"name": name, "value": value}


def _exit_codes(values: list[int]) -> Manifest:
    return {"containerName": "node", "operator": "In", "values": values}
