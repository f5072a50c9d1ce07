"""Ray: a job on a running cluster; its driver is `elastic/on_ray.py`."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from typing import ClassVar

from paceline.elastic.submit.scheduler import Phase, Request, Scheduler, State, Submission, ask, show
from paceline.errors import LaunchError

_ADVICE = 'Install it: pip install "ray[default]", of the version that the cluster has.'
_ADDRESS = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
_STOP_S = 120  # from SIGTERM on, for the last step and a checkpoint; Ray's own time is 3 s
_POLL_S = 2.0
_PHASES: dict[str, Phase] = {
    "PENDING": "queued",
    "RUNNING": "running",
    "SUCCEEDED": "done",
    "STOPPED": "cancelled",
    "FAILED": "failed",
}


class Ray(Scheduler):
    """A Ray cluster, by its jobs."""

    name = "ray"
    options: ClassVar = {
        "address": "of the cluster, e.g. http://head:8265 (default: RAY_ADDRESS)",
        "cpus": "CPUs that each host's actor asks for (default: 1)",
        "gpus": "GPUs that each host's actor asks for (default: 0)",
        "key": "file of a key of `paceline key`, the same on every host (default: a new one, which Ray carries)",
        "python": "Python that has paceline and ray, on the cluster (default: python)",
    }

    def text(self, request: Request) -> str:
        return shlex.join(self._command(request)) + "\n"

    def _command(self, request: Request) -> list[str]:
        """The command that submits."""
        driver = [
            request.options.get("python", "python"),
            "-m",
            "paceline.elastic.on_ray",
            "--hosts",
            str(request.hosts),
        ]
        for name in ("cpus", "gpus"):
            if (count := request.options.get(name)) is not None:
                if not (count.isascii() and count.isdecimal()):
                    raise LaunchError(f"--set {name}={count[:40]}: a whole number")
                driver += [f"--{name}", count]
        if (key := request.options.get("key")) is not None:
            if not key.startswith("/"):
                raise LaunchError(f"--set key={key[:80]}: the whole path of the file on every host, from / on")
            driver += ["--key", key]
        environment = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_S), "RAY_DEDUP_LOGS": "0"}}
        options = ["--submission-id", request.name, "--no-wait", "--runtime-env-json", json.dumps(environment)]
        return [
            *("ray", "job", "submit", *_address(request.options.get("address"))),
            *(*options, "--", *driver, "--", *request.train_arguments()),
        ]

    def submit(self, request: Request) -> str:
        ask(self._command(request), _ADVICE)
        return request.name

    def state(self, submission: Submission) -> State:
        command = ["ray", "job", "status", *_address(submission.options.get("address")), submission.id]
        answer = ask(command, _ADVICE)
        found = re.search(rf"\b({'|'.join(_PHASES)})\b|\b({'|'.join(map(str.lower, _PHASES))})\b", answer)
        if found is None:
            return State("unknown", note="`ray job status` answers in a form that is not known")
        phase = _PHASES[found[0].upper()]
        code = re.search(r"exit code (\d{1,3})\b", answer) if phase == "failed" else None
        return State(phase, int(code[1]) if code else None)

    def follow(self, submission: Submission) -> State:
        log = ["ray", "job", "logs", "--follow", *_address(submission.options.get("address")), submission.id]
        while not (state := self.steady_state(submission)).ended and state.phase != "unknown":
            if state.phase == "queued" or show(log, _ADVICE):
                time.sleep(_POLL_S)
        return state

    def cancel(self, submission: Submission) -> None:
        ask(["ray", "job", "stop", "--no-wait", *_address(submission.options.get("address")), submission.id], _ADVICE)


def _address(given: str | None) -> list[str]:
    """The options that name the cluster."""
    if given is not None:
        return ["--address", given]
    if not any(os.environ.get(name) for name in _ADDRESS):
        raise LaunchError(
            "say which Ray cluster: --set address=http://HEAD:8265, or RAY_ADDRESS. paceline starts none; "
            "`ray start --head` does."
        )
    return []
