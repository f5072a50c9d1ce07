"""Slurm: a batch script that starts one process per node and requeues itself."""

from __future__ import annotations

import math
import re
import shlex
import sys
import time
from pathlib import Path
from typing import ClassVar

from paceline.elastic.submit.scheduler import Phase, Request, Scheduler, State, Submission, ask, folder
from paceline.errors import LaunchError
from paceline.files import create_private, read_text
from paceline.text import printable
from paceline.wire.key import RunKey, write_key

_ADVICE = "Submit from a login node of the cluster, or load its module of Slurm."
_WARNING_S = 120  # seconds before the time limit, for the last step and a checkpoint
_POLL_S = 2.0
_VALUE = re.compile(r"[\w.,:+*@%/=\[\]()&|-]+")  # values that need no quotes in a directive
_PHASES: dict[str, Phase] = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SUSPENDED", "PREEMPTED"), "queued"),
    **dict.fromkeys(
        ("CONFIGURING", "RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "RESIZING", "STOPPED"), "running"
    ),
    "COMPLETED": "done",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
}

# Slurm sends USR1 only to this script (B:), because USR1 would end a host process that is still importing modules. A
# run that SIGTERM has ended has the exit code 143, and has saved a checkpoint if it had taken a step. Such a run is
# queued again, but a run that finished or failed is not.
_SCRIPT = """\
set -u
export PACELINE_KEY_FILE={key} PYTHONUNBUFFERED=1
rm -f {end}
warned=
trap 'warned=yes; echo "paceline: the time limit is near; saving"; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
trap : TERM
{setup}srun --kill-on-bad-exit=0 {step}{command} < /dev/null &
step=$!
wait "$step"
while kill -0 "$step" 2> /dev/null; do wait "$step"; done
wait "$step"
code=$?
if [ -n "$warned" ] && [ "$code" -eq 143 ]; then
    echo "paceline: saved; back into the queue"
    scontrol requeue "$SLURM_JOB_ID" && exit 143
fi
echo "$code" > {end}
exit "$code"
"""


class Slurm(Scheduler):
    """Slurm cluster whose nodes share the home folder and the run's directory."""

    name = "slurm"
    limits_time = True
    _directives: ClassVar = {
        "account": "account that pays for it",
        "constraint": "features that nodes must have",
        "cpus-per-task": "cores of each node (default: whole nodes)",
        "exclude": "nodes not to use",
        "gpus-per-node": "GPUs of each node",
        "gres": "other resources of each node",
        "mem": "memory of each node",
        "nodelist": "nodes to use",
        "partition": "partition",
        "qos": "quality of service",
        "reservation": "reservation",
    }
    options: ClassVar = {
        **_directives,
        "python": "Python that has paceline, on the nodes (default: this one)",
        "setup": "a line of shell to run first, e.g. `module load …`",
    }

    def text(self, request: Request) -> str:
        place = folder() / request.name
        command = [request.options.get("python", sys.executable), "-m", "paceline", *request.train_arguments()]
        setup, cores = request.options.get("setup"), request.options.get("cpus-per-task")
        return "\n".join(["#!/bin/bash", *self._lines(request, place), ""]) + _SCRIPT.format(
            key=shlex.quote(f"{place}.key"),
            end=shlex.quote(f"{place}.end"),
            setup=f"{setup}\n" if setup else "",
            step=f"--cpus-per-task={cores} " if cores else "",
            command=shlex.join(command),
        )

    def _lines(self, request: Request, place: Path) -> list[str]:
        if re.search(r"[\s'\"\\%]", str(place)):
            raise LaunchError(
                "submit.slurm_log_path",
                "Slurm cannot write a log to {place}. Set PACELINE_HOME to a path without special characters.",
                place=place,
            )
        limit_s = request.time_s
        warning_s = _WARNING_S if limit_s is None else min(_WARNING_S, limit_s // 3)
        given = {
            "job-name": request.name,
            "nodes": str(request.hosts),
            "ntasks-per-node": "1",
            "output": f"{place}.log",
            "open-mode": "append",
            "signal": f"B:USR1@{warning_s}",
        }
        if limit_s is not None:
            given["time"] = str(math.ceil(limit_s / 60))
        for name in self._directives:
            if (value := request.options.get(name)) is None:
                continue
            if not _VALUE.fullmatch(value):
                raise LaunchError(
                    "submit.slurm_value",
                    '--scheduler-option {name}="{value}": Slurm does not accept this value',
                    name=name,
                    value=value[:80],
                )
            given[name] = value
        flags = ["requeue"] if "cpus-per-task" in given else ["requeue", "exclusive"]
        return [f"#SBATCH --{name}={value}" for name, value in given.items()] + [f"#SBATCH --{flag}" for flag in flags]

    def submit(self, request: Request) -> str:
        place, script = folder() / request.name, self.text(request)
        key, path = Path(f"{place}.key"), Path(f"{place}.sbatch")
        write_key(RunKey.make(), key)
        try:
            with create_private(path) as file:
                file.write(script.encode())
            answer = ask(["sbatch", "--parsable", str(path)], _ADVICE)
        except BaseException:
            key.unlink()
            path.unlink(missing_ok=True)
            raise
        return answer.strip().partition(";")[0]

    def state(self, submission: Submission) -> State:
        try:
            answer = ask(
                ["squeue", "--noheader", f"--jobs={submission.id}", "--states=all", "--format=%T %r"], _ADVICE
            ).strip()
        except LaunchError as error:
            if "Invalid job id" not in str(error):
                raise
            answer = ""  # the job ended long ago, and Slurm no longer knows it
        code = _code(submission)
        if not answer:
            if code is None:
                return State("unknown", note="Slurm has forgotten it")
            return State("failed" if code else "done", code)
        word, _, reason = answer.splitlines()[0].partition(" ")
        phase = _PHASES.get(word, "failed")
        if phase == "queued":
            return State(phase, note="" if reason == "None" else reason)
        return State(phase, code if phase in ("done", "failed") else None, note=word if phase == "failed" else "")

    def follow(self, submission: Submission) -> State:
        log, seen, told = folder() / f"{submission.name}.log", 0, None
        while True:
            # asked before the log is read, so that the log is complete once the run has ended
            state = self.steady_state(submission)
            if (state.phase, state.note) != told:
                told = (state.phase, state.note)
                note = f" ({state.note})" if state.note else ""
                print(f"paceline: Slurm's job {submission.id} is {state.phase}{note}", flush=True)
            seen = _show_lines(log, seen, to_the_end=state.ended)
            if state.ended or state.phase == "unknown":
                return state
            time.sleep(_POLL_S)

    def cancel(self, submission: Submission) -> None:
        ask(["scancel", submission.id], _ADVICE)


def _code(submission: Submission) -> int | None:
    """Return the exit code that the script has written, or None while the script runs."""
    try:
        text = read_text(folder() / f"{submission.name}.end", 100).strip()
    except OSError:
        return None
    return int(text) if text.isascii() and text.isdecimal() else None


def _show_lines(log: Path, seen: int, *, to_the_end: bool) -> int:
    """Show the complete lines of a log after byte `seen`. Return the offset of the next line."""
    try:
        with log.open("rb") as file:
            file.seek(seen)
            new = file.read()
    except FileNotFoundError:  # the run has not started yet
        return seen
    new = new if to_the_end else new[: new.rfind(b"\n") + 1]
    for line in new.decode(errors="replace").splitlines():
        print(printable(line), flush=True)
    return seen + len(new)
