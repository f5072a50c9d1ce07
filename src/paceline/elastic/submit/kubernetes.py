"""Kubernetes: manifests of a run, which kubectl creates, monitors and deletes.

A run is a TrainJob of Kubeflow, a JobSet, or an indexed Job with a service.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, ClassVar

import yaml

from paceline.elastic.submit.scheduler import Request, Scheduler, State, Submission, ask, show
from paceline.errors import LaunchError
from paceline.wire.key import RunKey

_ADVICE = "Install kubectl, and check with `kubectl get nodes` that it reaches your cluster."
_POLL_S = 5.0
_KEY_SHOWN = "(the run's key, made when it is submitted)"
_PHASES = {"Complete": "done", "Completed": "done", "Failed": "failed"}  # phase of a run by the type of its condition


class Kubernetes(Scheduler):
    """Kubernetes cluster, used through kubectl. A run is a TrainJob, a JobSet or an indexed Job."""

    name = "kubernetes"
    options: ClassVar = {
        "image": "image with paceline and your code (needed)",
        "kind": "trainjob, jobset or job (default: the first that the cluster has)",
        "namespace": "namespace (default: kubectl's)",
        "claim": "claim of a volume for runs, mounted at /runs",
        "runtime": "runtime of a TrainJob (default: torch-distributed)",
        "cpus": "cores of each pod",
        "memory": "memory of each pod, e.g. 64Gi",
        "gpus": "GPUs of each pod",
        "gpu-resource": "their name in the cluster (default: nvidia.com/gpu)",
        "python": "Python in the image that has paceline (default: python)",
        "user": "number of the user that the containers run as, e.g. 1000 (default: the image's)",
    }

    def text(self, request: Request) -> str:
        kind = request.options.get("kind")
        if kind is None:
            try:
                kind = self._kind(request)
            except LaunchError:
                kind = "trainjob"
                print(
                    "note: no cluster answers, so this is for one with TrainJobs; "
                    "--scheduler-option kind=… names another kind",
                    file=sys.stderr,
                )
        return as_yaml(manifests(_known(kind), request, _KEY_SHOWN))

    def _kind(self, request: Request) -> str:
        """Return the requested kind, or else the first of `KINDS` that the cluster supports."""
        wanted = request.options.get("kind")
        if wanted is not None:
            _known(wanted)
        known = set(ask(["kubectl", "api-versions"], _ADVICE).split())
        there = [kind for kind, version in KINDS.items() if version in known]
        if wanted is None and there:
            return there[0]
        if wanted in there:
            return str(wanted)
        have = (
            f"It has: {', '.join(there)}; say --scheduler-option kind={there[0]}."
            if there
            else "It has none of the other kinds."
        )
        raise LaunchError(
            "submit.kind_unsupported",
            "the cluster does not support a {wanted}: `kubectl api-versions` does not list {kinds}. {have}",
            wanted=wanted or "job",
            kinds=KINDS[wanted or "job"],
            have=have,
        )

    def submit(self, request: Request) -> str:
        kind = self._kind(request)
        key = RunKey.make().to_pem().decode()
        # passed on standard input, which hides the key from other users
        ask(["kubectl", "create", "-f", "-"], _ADVICE, text=as_yaml(manifests(kind, request, key)))
        return f"{kind}/{request.name}"

    def state(self, submission: Submission) -> State:
        command = ["kubectl", "get", submission.id, "--output=json", "--ignore-not-found", *_namespace(submission)]
        answer = ask(command, _ADVICE)
        if not answer.strip():
            return State("unknown", note="it was deleted")
        return _state_of(json.loads(answer).get("status") or {})

    def follow(self, submission: Submission) -> State:
        owner = "batch.kubernetes.io/job-name" if submission.id.startswith("job/") else "jobset.sigs.k8s.io/jobset-name"
        pod = f"{owner}={submission.name},batch.kubernetes.io/job-completion-index=0"
        log = ["kubectl", "logs", "--follow", "--tail=-1", f"--selector={pod}", *_namespace(submission)]
        told = None
        while not (state := self.steady_state(submission)).ended and state.phase != "unknown":
            if state.phase != told:
                told = state.phase
                print(f"paceline: {submission.id} is {state.phase}", flush=True)
            if state.phase == "running" and show(log, _ADVICE) == 0:
                continue  # the pod has ended: either the run has ended too, or another pod starts
            time.sleep(_POLL_S)
        return state

    def cancel(self, submission: Submission) -> None:
        kinds = f"{submission.id.partition('/')[0]},service,secret"
        label = f"--selector={NAME_LABEL}={submission.name}"
        ask(["kubectl", "delete", kinds, label, "--wait=false", *_namespace(submission)], _ADVICE)


def _known(kind: str) -> str:
    if kind not in KINDS:
        raise LaunchError(
            "submit.kind_unknown",
            "--scheduler-option kind={kind}: the kind must be one of {kinds}",
            kind=kind[:40],
            kinds=list(KINDS),
        )
    return kind


def _namespace(submission: Submission) -> list[str]:
    return [f"--namespace={name}"] if (name := submission.options.get("namespace")) else []


def _state_of(status: dict[str, Any]) -> State:
    """Derive the state from the `status` of a TrainJob, a JobSet or a Job."""
    for condition in status.get("conditions") or []:
        if condition.get("status") == "True" and (phase := _PHASES.get(condition.get("type", ""))):
            note = "" if phase == "done" else str(condition.get("message", ""))
            return State("done" if phase == "done" else "failed", note=note)
    # a JobSet and a TrainJob list their jobs, and a Job counts its own pods
    parts = [status, *(status.get("replicatedJobsStatus") or []), *(status.get("jobsStatus") or [])]
    running = any(part.get("ready") or part.get("active") for part in parts)
    return State("running" if running else "queued")


Manifest = dict[str, Any]

# the API group and version of each kind
KINDS = {"trainjob": "trainer.kubeflow.org/v1alpha1", "jobset": "jobset.x-k8s.io/v1alpha2", "job": "batch/v1"}
NAME_LABEL = "app.kubernetes.io/instance"
_PORT = 29_600  # the same port for all runs, because each pod has its own network
_SECRETS = "/etc/paceline"  # mount path of the job file and the run's key
RUNS = "/runs"  # mount path of the volume claim
_GRACE_S = 120  # seconds after SIGTERM for the last step and a checkpoint
_RESTARTS = 3  # restarts allowed for a failed run; preemptions and evictions do not count
_STOPPED = [130, 143]  # exit codes of a run that saved after SIGINT or SIGTERM
_WRONG_COMMAND = 2


def manifests(kind: str, request: Request, key: str) -> list[Manifest]:
    """Make the manifests of a run.

    These are a Secret with the job file and the key, and the objects of the given kind.

    Raises:
        LaunchError: an option is missing, or the run's directory would be deleted together with its pod.
    """
    if "image" not in request.options:
        raise LaunchError(
            "submit.image_missing",
            "name the container image that contains paceline and your code: --scheduler-option image=REGISTRY/NAME:TAG",
        )
    if not request.run_is_url and not ("claim" in request.options and request.run.startswith(f"{RUNS}/")):
        raise LaunchError(
            "submit.run_in_pod",
            "--run {run}: the disk of a pod is lost together with the pod. Use an object store (--run "
            "s3://bucket/run), or a claim of a volume that all pods can write to (--scheduler-option claim=NAME "
            "--run {runs}/NAME).",
            run=request.run,
            runs=RUNS,
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
    """Format manifests as YAML, with scripts as block literals."""
    return str(yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120))


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _train_job(request: Request) -> list[Manifest]:
    """Make a TrainJob. Its runtime limits the number of restarts."""
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
    """Make a JobSet, which restarts all pods together when one pod fails."""
    job = _job_spec(request, coordinator=f"{request.name}-host-0-0.{request.name}", backoff=0)
    # The failure policy ends a job only after a preemption or a stop signal. The job's failure reason tells the JobSet.
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
    """Make an indexed Job, and the service that names its pods. Failed pods are replaced one by one."""
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
    # YAML would write the second use of the same object as an alias
    return {"requests": asked, "limits": dict(asked)} if asked else {}


def _user(request: Request) -> Manifest:
    """Return the security settings for the user id of the containers. The Secret is mounted with the same group id.

    Raises:
        LaunchError: the `user` option is not a valid user id.
    """
    if (text := request.options.get("user")) is None:
        return {}
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:11]) < 2**31):
        raise LaunchError(
            "submit.user_invalid",
            "--scheduler-option user={text}: give the numeric ID of a user other than root, such as 1000",
            text=text[:40],
        )
    number = int(text)
    ours = {"runAsUser": number, "runAsGroup": number, "fsGroup": number, "fsGroupChangePolicy": "OnRootMismatch"}
    return {"securityContext": {"runAsNonRoot": True, **ours}}


def _volumes(request: Request) -> list[Manifest]:
    volumes: list[Manifest] = [
        {"name": "paceline", "secret": {"secretName": request.name, "defaultMode": 0o400}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # the default size in a container is only 64 MiB
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
