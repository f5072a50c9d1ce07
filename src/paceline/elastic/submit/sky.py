"""SkyPilot: managed jobs, whose nodes are replaced when a cloud reclaims them."""

from __future__ import annotations

import base64
import json
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from paceline.elastic.submit.kubernetes import as_yaml
from paceline.elastic.submit.scheduler import Phase, Request, Scheduler, State, Submission, ask, folder, show
from paceline.errors import LaunchError
from paceline.files import create_private
from paceline.wire.key import RunKey

_ADVICE = "Install it: pip install skypilot, with the extras of your clouds."
_SECRET = "PACELINE_KEY"  # environment variable on the nodes, which is unset before paceline starts
_JOB = "~/paceline-job.yaml"
_PHASES: dict[str, Phase] = {
    **dict.fromkeys(("PENDING", "SUBMITTED", "STARTING", "RECOVERING"), "queued"),
    **dict.fromkeys(("RUNNING", "WINDING_DOWN", "CANCELLING"), "running"),
    "SUCCEEDED": "done",
    "CANCELLED": "cancelled",
}
_RUN = """\
set -eu
umask 077
PACELINE_KEY_FILE=$(mktemp)
printf %s "${secret}" | base64 -d > "$PACELINE_KEY_FILE"
unset {secret}
export PACELINE_KEY_FILE
trap 'rm -f "$PACELINE_KEY_FILE"' EXIT
{command}
"""


class Sky(Scheduler):
    """Managed jobs of SkyPilot."""

    name = "sky"
    _resources: ClassVar = {
        "accelerators": "accelerators of each node, e.g. H100:8",
        "cpus": "cores of each node, e.g. 16+",
        "memory": "GiB of memory of each node, e.g. 64+",
        "infra": "where, e.g. aws/us-east-1",
        "image": "image of the nodes",
        "spot": "yes: nodes that may be taken away",
    }
    options: ClassVar = {
        **_resources,
        "setup": "shell to run on a new node (default: pip install paceline)",
        "python": "Python that has paceline, on the nodes (default: python)",
    }

    def text(self, request: Request) -> str:
        if not request.run_is_url:
            raise LaunchError(
                "submit.run_on_node",
                "--run {run}: the disk of a node is lost together with the node. Use an object store: --run "
                "s3://bucket/run",
                run=request.run,
            )
        python = request.options.get("python", "python")
        command = [python, "-m", "paceline", *request.train_arguments("JOB")]
        # the shell expands the tilde only without quotes
        shown = shlex.join(command).replace("train JOB ", f"train {_JOB} ", 1)
        task: dict[str, Any] = {"name": request.name, "num_nodes": request.hosts}
        if resources := self._resources_of(request):
            task["resources"] = resources
        task["secrets"] = {_SECRET: None}  # the command that submits the job passes the value
        task["file_mounts"] = {_JOB: str(request.job)}
        task["setup"] = request.options.get("setup", f"pip install paceline=={version('paceline')}")
        task["run"] = _RUN.format(secret=_SECRET, command=shown)
        return as_yaml([task])

    def _resources_of(self, request: Request) -> dict[str, Any]:
        options = request.options
        found: dict[str, Any] = {name: options[name] for name in self._resources if name in options}
        if image := found.pop("image", None):
            found["image_id"] = image
        if (spot := found.pop("spot", "no")) not in ("yes", "no"):
            raise LaunchError("submit.spot_invalid", "--scheduler-option spot={spot}: give yes or no", spot=spot)
        return found | ({"use_spot": True} if spot == "yes" else {})

    def submit(self, request: Request) -> str:
        task = self.text(request)
        path = folder() / f"{request.name}.yaml"
        with create_private(path) as file:
            file.write(task.encode())
        # only the variable's name is on the command line
        command = ["sky", "jobs", "launch", "--yes", "--detach-run", "--secret", _SECRET, str(path)]
        try:
            ask(command, _ADVICE, environment={_SECRET: base64.b64encode(RunKey.make().to_pem()).decode()})
        except BaseException:
            Path(path).unlink()
            raise
        return request.name

    def state(self, submission: Submission) -> State:
        answer = ask(["sky", "jobs", "queue", "--all", "--output=json"], _ADVICE)
        try:
            jobs = json.loads(answer[answer.index("[") :])
            words = [str(job["status"]) for job in jobs if job.get("job_name") == submission.id]
        except (ValueError, KeyError, TypeError, AttributeError):
            return State("unknown", note="`sky jobs queue` answers in a form that is not known")
        if not words:
            return State("unknown", note="SkyPilot does not list it")
        word = words[0].rpartition(".")[2]
        phase = _PHASES.get(word, "failed")
        return State(phase, note=word if phase == "failed" else "")

    def follow(self, submission: Submission) -> State:
        while not (state := self.steady_state(submission)).ended and state.phase != "unknown":
            if show(["sky", "jobs", "logs", "--follow", "--name", submission.id], _ADVICE):
                break  # the command prints the reason itself
        return self.steady_state(submission)

    def cancel(self, submission: Submission) -> None:
        ask(["sky", "jobs", "cancel", "--yes", "--name", submission.id], _ADVICE)
