"""Kubernetes: manifests created, watched and deleted by kubectl."""

from __future__ import annotations

import json
import sys
import time
from typing import Any, ClassVar

from paceline.elastic.submit.manifests import KINDS, NAME_LABEL, as_yaml, manifests
from paceline.elastic.submit.scheduler import Request, Scheduler, State, Submission, ask, show
from paceline.errors import LaunchError
from paceline.wire.key import RunKey

_ADVICE = "Install kubectl, and check with `kubectl get nodes` that it reaches your cluster."
_POLL_S = 5.0
_KEY_SHOWN = "(the run's key, made when it is submitted)"
_PHASES = {"Complete": "done", "Completed": "done", "Failed": "failed"}  # of conditions


class Kubernetes(Scheduler):
    """A cluster that kubectl reaches: its TrainJobs, or else JobSets, or else indexed Jobs."""

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
                    "note: no cluster answers, so this is for one with TrainJobs; --set kind=… says another",
                    file=sys.stderr,
                )
        return as_yaml(manifests(_known(kind), request, _KEY_SHOWN))

    def _kind(self, request: Request) -> str:
        """The kind asked for, or else the first of `KINDS` that the cluster has."""
        wanted = request.options.get("kind")
        if wanted is not None:
            _known(wanted)
        known = set(ask(["kubectl", "api-versions"], _ADVICE).split())
        there = [kind for kind, version in KINDS.items() if version in known]
        if wanted is None and there:
            return there[0]
        if wanted in there:
            return str(wanted)
        have = f"It has: {', '.join(there)}; say --set kind={there[0]}." if there else "It has none of the other kinds."
        raise LaunchError(
            f"the cluster has no {wanted or 'job'} (no {KINDS[wanted or 'job']} in `kubectl api-versions`). {have}"
        )

    def submit(self, request: Request) -> str:
        kind = self._kind(request)
        key = RunKey.make().to_pem().decode()
        # by standard input, where no other user sees the key
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
                continue  # that pod has ended: the run as well, or another comes
            time.sleep(_POLL_S)
        return state

    def cancel(self, submission: Submission) -> None:
        kinds = f"{submission.id.partition('/')[0]},service,secret"
        label = f"--selector={NAME_LABEL}={submission.name}"
        ask(["kubectl", "delete", kinds, label, "--wait=false", *_namespace(submission)], _ADVICE)


def _known(kind: str) -> str:
    if kind not in KINDS:
        raise LaunchError(f"--set kind={kind[:40]}: there are {', '.join(KINDS)}")
    return kind


def _namespace(submission: Submission) -> list[str]:
    return [f"--namespace={name}"] if (name := submission.options.get("namespace")) else []


def _state_of(status: dict[str, Any]) -> State:
    """State by the `status` of a TrainJob, a JobSet or a Job."""
    for condition in status.get("conditions") or []:
        if condition.get("status") == "True" and (phase := _PHASES.get(condition.get("type", ""))):
            note = "" if phase == "done" else str(condition.get("message", ""))
            return State("done" if phase == "done" else "failed", note=note)
    # a JobSet's and a TrainJob's jobs; a Job counts its own pods
    parts = [status, *(status.get("replicatedJobsStatus") or []), *(status.get("jobsStatus") or [])]
    running = any(part.get("ready") or part.get("active") for part in parts)
    return State("running" if running else "queued")
