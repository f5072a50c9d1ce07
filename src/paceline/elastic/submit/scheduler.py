"""Schedulers: the common interface to Slurm, Ray, Kubernetes and SkyPilot."""

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
_EXIT_CODES: dict[Phase, int] = {"done": 0, "cancelled": 143}  # 143: as after SIGTERM
ANSWER_S = 120.0  # time limit for a scheduler's command
_AWAY_S, _AGAIN_S = (
    300.0,
    5.0,
)  # longest time that a scheduler may be unreachable; time between two attempts


@dataclass(frozen=True)
class State:
    """State of a submitted run.

    Attributes:
        code: exit code of the run, if the scheduler knows it.
        note: reason why the run waits or its state is unknown, if available.
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
        """Exit code for a command that followed the run to its end."""
        return self.code if self.code is not None else _EXIT_CODES.get(self.phase, 1)


class Scheduler:
    """Cluster scheduler, used through its own command-line tools."""

    name: ClassVar[str]
    options: ClassVar[Mapping[str, str]]  # options of `--scheduler-option`, each with its description
    limits_time: ClassVar[bool] = False  # True if it supports --time

    def text(self, request: Request) -> str:
        """The script or manifest to submit.

        Raises:
            LaunchError: the request lacks something that this scheduler needs.
        """
        raise NotImplementedError

    def submit(self, request: Request) -> str:
        """Submit the run, and return the scheduler's id of it.

        Raises:
            LaunchError: the scheduler is not available, or refuses the run.
        """
        raise NotImplementedError

    def state(self, submission: Submission) -> State:
        """Ask the scheduler for the state of a run. Raise LaunchError if it does not answer."""
        raise NotImplementedError

    def steady_state(self, submission: Submission) -> State:
        """Ask for the state of a run that is followed.

        If the scheduler does not answer, the request is repeated for some minutes.
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
        """End a run, with a checkpoint if the scheduler gives it enough time."""
        raise NotImplementedError


def ask(
    command: list[str], advice: str, *, text: str | None = None, environment: Mapping[str, str] | None = None
) -> str:
    """Run a scheduler's command, and return its output.

    Args:
        advice: what to do if the command is not installed.
        text: standard input of the command.
        environment: variables besides those of this process.

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
    """Run to submit.

    Attributes:
        job: absolute path of the job file.
        hosts: number of hosts.
        name: name of the submission; letters, digits and hyphens, like the names of pods.
        run: the run's directory or URL, as the hosts see it.
        time_s: time after which the scheduler ends the run, if it has such a limit.
        options: the scheduler's own options, from `--scheduler-option`.
        changes: overridden keys of the job, from `--set`.
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
        """Arguments of `paceline` on each host; `job` is the job file's path there."""
        arguments = ["train", job or str(self.job), "--plan", self.plan, "--run", self.run, "--resume"]
        arguments += [f"--set={change}" for change in self.changes]
        return [*arguments, "--restarts", str(self.restarts)] if self.restarts else arguments

    @property
    def run_is_url(self) -> bool:
        """True if the run is stored at a URL, which every host reaches."""
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
    """Parse a time such as 90m, 1h30m or 2d; return seconds.

    Raises:
        LaunchError: the text is not such a time.
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
        LaunchError: an option is not such a pair, is unknown to the scheduler, is given twice, or has a value with
            control characters.
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


_LIMIT = 2**16  # size limit of a file, in bytes


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """Submitted run.

    Attributes:
        name: paceline's name of the run, also for `paceline cancel`.
        engine: name of the scheduler.
        id: the scheduler's id of the run.
        since: Unix time of the submission, in seconds.
        options: options given by `--scheduler-option`.
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
    """Private folder, created if missing: `submitted` in PACELINE_HOME, or else in ~/.paceline.

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
    """Write the file of a submission."""
    write_whole(folder() / f"{submission.name}.json", msgspec.json.encode(submission))


def ended(submission: Submission, phase: str, code: int) -> Submission:
    """Store the final phase of a run, and remove its key."""
    known = msgspec.structs.replace(submission, phase=phase, code=code)
    save(known)
    (folder() / f"{submission.name}.key").unlink(missing_ok=True)
    return known


def submissions() -> list[Submission]:
    """All submissions, newest first. Invalid files are skipped."""
    found = []
    for path in folder().glob("*.json"):
        try:
            submission = msgspec.json.decode(read_text(path, _LIMIT), type=Submission)
        except (OSError, ValueError, msgspec.MsgspecError):  # truncated, or of another program
            continue
        if submission.name == path.stem:
            found.append(submission)
    return sorted(found, key=lambda submission: submission.since, reverse=True)


def find(name: str) -> Submission:
    """Find a submission by name, or by a scheduler's id that is unique.

    Raises:
        LaunchError: there is no such submission, or several have the id.
    """
    known = submissions()
    found = [s for s in known if s.name == name] or [s for s in known if s.id == name]
    if len(found) > 1:
        names = ", ".join(s.name for s in found)
        raise LaunchError(
            "submit.run_ambiguous",
            "{name} is the number of several runs: {names}. Give the name of one of them.",
            name=name,
            names=names,
        )
    if not found:
        hint = nearest(name, [s.name for s in known]) if known else "Nothing was submitted from here."
        raise LaunchError(
            "submit.run_unknown", 'no run named "{name}" was submitted. {hint}', name=name[:80], hint=hint
        )
    return found[0]
