"""Common interface to the schedulers Slurm, Ray, Kubernetes and SkyPilot."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import msgspec

from paceline.errors import LaunchError
from paceline.files import home_folder, private_folder, read_text, write_whole
from paceline.text import nearest, printable

Phase = Literal["queued", "running", "done", "failed", "cancelled", "unknown"]
ENDED: frozenset[Phase] = frozenset(("done", "failed", "cancelled"))
_EXIT_CODES: dict[Phase, int] = {"done": 0, "cancelled": 143}  # 143 is the exit code after SIGTERM
ANSWER_S = 120.0  # time limit in seconds for a command of a scheduler
# longest time that a scheduler may be unreachable, and time between two attempts
_AWAY_S, _AGAIN_S = 300.0, 5.0


@dataclass(frozen=True)
class State:
    """State of a submitted run.

    Attributes:
        code: exit code of the run, if the scheduler knows it.
        note: reason why the run waits, has failed or is in an unknown state, if available.
    """

    phase: Phase
    code: int | None = None
    note: str = ""

    @property
    def ended(self) -> bool:
        """True if the run has ended."""
        return self.phase in ENDED

    @property
    def exit_code(self) -> int:
        """Exit code of a command that has followed the run to its end."""
        return self.code if self.code is not None else _EXIT_CODES.get(self.phase, 1)


class Scheduler:
    """Scheduler of a cluster, used through its own command-line tools."""

    name: ClassVar[str]
    options: ClassVar[Mapping[str, str]]  # names of options for `--scheduler-option`, each with a description
    limits_time: ClassVar[bool] = False  # True if it supports --time

    def text(self, request: Request) -> str:
        """Return the script or manifest to submit.

        Raises:
            LaunchError: an option that this scheduler needs is missing or invalid.
        """
        raise NotImplementedError

    def submit(self, request: Request) -> str:
        """Submit the run; return its id in the scheduler.

        Raises:
            LaunchError: the scheduler is not available, or refuses the run.
        """
        raise NotImplementedError

    def state(self, submission: Submission) -> State:
        """Ask the scheduler for the state of a run. Raise LaunchError if the scheduler does not answer."""
        raise NotImplementedError

    def steady_state(self, submission: Submission) -> State:
        """Ask for the state of a run. Repeat the request if the scheduler does not answer.

        The request is repeated for some minutes. Then the error of `state` is raised.
        """
        until, told = time.monotonic() + _AWAY_S, False
        while True:
            try:
                return self.state(submission)
            except LaunchError as error:
                if time.monotonic() > until:
                    raise
                if not told:
                    told = True
                    print(f"paceline: {error}. It is asked again for {_AWAY_S / 60:.0f} minutes.", flush=True)
            time.sleep(_AGAIN_S)

    def follow(self, submission: Submission) -> State:
        """Show the log until the run has ended."""
        raise NotImplementedError

    def cancel(self, submission: Submission) -> None:
        """End a run. The run saves a checkpoint if the scheduler gives it enough time."""
        raise NotImplementedError


def ask(
    command: list[str], advice: str, *, text: str | None = None, environment: Mapping[str, str] | None = None
) -> str:
    """Run a command of a scheduler, and return the output of the command.

    Args:
        advice: sentence for the user if the command is not installed.
        text: text for the standard input of the command.
        environment: environment variables to add to the variables of this process.

    Raises:
        LaunchError: the command is not installed, fails, or does not answer.
    """
    shown = shlex.join(command[:3])
    try:
        ended = subprocess.run(
            command,
            input=text or "",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_S,
            env={**os.environ, **(environment or {})},
        )
    except FileNotFoundError:
        raise LaunchError(
            "submit.command_missing",
            "the command {command} is not on this machine. {advice}",
            command=command[0],
            advice=advice,
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            "submit.timeout",
            "`{command}` did not answer within {deadline_s:.0f} s. Check that the cluster can be reached from this "
            "machine.",
            command=shown,
            deadline_s=ANSWER_S,
        ) from None
    if ended.returncode:
        why = "\n".join((ended.stderr.strip() or ended.stdout.strip()).splitlines()[-8:])
        raise LaunchError(
            "submit.command_failed",
            "`{command}` failed with exit code {exit_status}: {why}",
            command=shown,
            exit_status=ended.returncode,
            why=printable(why),
        )
    return ended.stdout


def show(command: list[str], advice: str) -> int:
    """Run a command that shows a log, and return its exit code."""
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL).returncode
    except FileNotFoundError:
        raise LaunchError(
            "submit.command_missing",
            "the command {command} is not on this machine. {advice}",
            command=command[0],
            advice=advice,
        ) from None


MOST_HOSTS = 65_536
_UNITS_S = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_TIME = re.compile(r"(?:[0-9]{1,6}[dhms])+")


@dataclass(frozen=True)
class Request:
    """Request to submit a run.

    Attributes:
        job: absolute path of the job file.
        hosts: number of hosts.
        name: name of the submission. It consists of letters, digits and hyphens, as in the name of a pod.
        run: directory or URL of the run, as seen from the hosts.
        time_s: time limit in seconds after which the scheduler ends the run; None for no limit.
        options: the scheduler's own options, from `--scheduler-option`.
        changes: keys of the job with new values, from `--set`.
    """

    job: Path
    hosts: int
    name: str
    run: str
    plan: str = "auto"
    restarts: int = 0
    time_s: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    changes: Sequence[str] = ()

    def train_arguments(self, job: str | None = None) -> list[str]:
        """Return the arguments of `paceline` on each host. `job` is the path of the job file on the host."""
        arguments = ["train", job or str(self.job), "--plan", self.plan, "--run", self.run, "--resume"]
        arguments += [f"--set={change}" for change in self.changes]
        return [*arguments, "--restarts", str(self.restarts)] if self.restarts else arguments

    @property
    def run_is_url(self) -> bool:
        """True if the run is stored at a URL, which every host can reach."""
        return "://" in self.run


def name_for(job_name: str) -> str:
    """Make a new name for a submission from the job's name and the time."""
    plain = re.sub(r"[^a-z0-9]+", "-", job_name.lower()).strip("-")[:36].rstrip("-")
    return f"{plain or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"


def must_be_hosts(count: int) -> None:
    """Raise LaunchError unless the number of hosts is valid."""
    if not 1 <= count <= MOST_HOSTS:
        raise LaunchError(
            "submit.hosts_out_of_range",
            "--num-hosts {count}: a run can use 1 to {most:,} hosts",
            count=count,
            most=MOST_HOSTS,
        )


def time_from(text: str) -> int:
    """Parse a time such as 90m, 1h30m or 2d; return the time in seconds.

    Raises:
        LaunchError: the text is not a valid time, or the time is out of range.
    """
    if not _TIME.fullmatch(text):
        raise LaunchError(
            "submit.time_invalid", '--time "{text}" is not a time such as 90m, 1h30m or 2d', text=text[:40]
        )
    seconds = sum(int(count) * _UNITS_S[unit] for count, unit in re.findall(r"([0-9]+)([dhms])", text))
    if not 60 <= seconds <= 3_650 * _UNITS_S["d"]:
        raise LaunchError(
            "submit.time_out_of_range",
            "--time {text}: a limit must be at least one minute and at most ten years",
            text=text,
        )
    return seconds


def options_from(pairs: list[str], known: Mapping[str, str], scheduler: str) -> dict[str, str]:
    """Parse the options of `--scheduler-option NAME=VALUE`.

    Raises:
        LaunchError: an option does not have the form NAME=VALUE, is unknown to the scheduler, is given twice, or has a
            value with control characters.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not value:
            raise LaunchError(
                "submit.option_malformed", '--scheduler-option "{option}" is not NAME=VALUE', option=pair[:80]
            )
        if name not in known:
            raise LaunchError(
                "submit.option_unknown",
                '--scheduler-option {option}: {scheduler} has no option "{name}". {hint}',
                option=pair[:80],
                scheduler=scheduler,
                name=name[:40],
                hint=nearest(name, known),
            )
        if name in found:
            raise LaunchError(
                "submit.option_twice", "--scheduler-option {name} is given twice. Leave one out.", name=name
            )
        if not value.isprintable():
            raise LaunchError(
                "submit.option_unprintable",
                "--scheduler-option {name}: the value contains a line break or another unprintable character",
                name=name,
            )
        found[name] = value
    return found


_LIMIT = 2**16  # largest size in bytes of a submission file


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a submitted run.

    Attributes:
        name: name of the run in paceline, for example for `paceline cancel`.
        engine: name of the scheduler.
        id: id of the run in the scheduler.
        since: Unix time of the submission, in seconds.
        options: options given with `--scheduler-option`.
        phase: final phase of the run; empty until it is known.
    """

    name: str
    engine: str
    id: str
    hosts: int
    job: str
    run: str
    since: float
    options: dict[str, str] = {}
    phase: str = ""
    code: int | None = None


def folder() -> Path:
    """Return the private folder of submissions, and create the folder if it is missing.

    The folder is `submitted` in PACELINE_HOME, or in ~/.paceline if that variable is not set.

    Raises:
        LaunchError: the folder cannot be created, or belongs to another user.
    """
    home = home_folder()
    try:
        private_folder(home)
        private_folder(home / "submitted")
    except OSError as error:
        raise LaunchError(
            "submit.home_unusable",
            "{home} cannot be used: {reason}. Choose another folder with PACELINE_HOME.",
            home=home / "submitted",
            reason=error.strerror,
        ) from error
    return home / "submitted"


def save(submission: Submission) -> None:
    """Write a submission to its file."""
    write_whole(folder() / f"{submission.name}.json", msgspec.json.encode(submission))


def ended(submission: Submission, phase: str, code: int) -> Submission:
    """Store the final phase of a run, and delete the run's key."""
    known = msgspec.structs.replace(submission, phase=phase, code=code)
    save(known)
    (folder() / f"{submission.name}.key").unlink(missing_ok=True)
    return known


def submissions() -> list[Submission]:
    """Return all submissions, newest first. Invalid files are skipped."""
    found = []
    for path in folder().glob("*.json"):
        try:
            submission = msgspec.json.decode(read_text(path, _LIMIT), type=Submission)
        except (OSError, ValueError, msgspec.MsgspecError):  # the file is truncated, or belongs to another program
            continue
        if submission.name == path.stem:
            found.append(submission)
    return sorted(found, key=lambda submission: submission.since, reverse=True)


def find(name: str) -> Submission:
    """Find a submission by its name, or by an id that only one scheduler uses.

    Raises:
        LaunchError: no submission has this name or id, or several submissions have this id.
    """
    known = submissions()
    found = [s for s in known if s.name == name] or [s for s in known if s.id == name]
    if len(found) > 1:
        names = ", ".join(s.name for s in found)
        raise LaunchError(
            "submit.run_ambiguous",
            "several runs have the id {name}: {names}. Give the name of one of them.",
            name=name,
            names=names,
        )
    if not found:
        hint = nearest(name, [s.name for s in known]) if known else "Nothing was submitted from here."
        raise LaunchError(
            "submit.run_unknown", 'no run named "{name}" was submitted. {hint}', name=name[:80], hint=hint
        )
    return found[0]
