"""Scheduler: what `paceline submit`, `runs` and `cancel` ask of Slurm, Ray, Kubernetes and SkyPilot."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from paceline.elastic.submit.record import Submission
from paceline.elastic.submit.request import Request
from paceline.errors import LaunchError
from paceline.printable import printable

Phase = Literal["queued", "running", "done", "failed", "cancelled", "unknown"]
ENDED: frozenset[Phase] = frozenset(("done", "failed", "cancelled"))
_EXIT_CODES: dict[Phase, int] = {"done": 0, "cancelled": 143}  # 143: as after SIGTERM
ANSWER_S = 120.0  # in which a scheduler's command has to answer
_AWAY_S, _AGAIN_S = 300.0, 5.0  # that a scheduler may fail to answer while a run is followed; until it is asked again


@dataclass(frozen=True)
class State:
    """State of a submitted run.

    Attributes:
        code: exit code of the run, where the scheduler knows it.
        note: why it waits or is unknown, where that is known.
    """

    phase: Phase
    code: int | None = None
    note: str = ""

    @property
    def ended(self) -> bool:
        """True if the run goes on no more."""
        return self.phase in ENDED

    @property
    def exit_code(self) -> int:
        """Exit code for whoever followed the run to its end."""
        return self.code if self.code is not None else _EXIT_CODES.get(self.phase, 1)


class Scheduler:
    """A cluster's scheduler, asked by its own commands."""

    name: ClassVar[str]
    options: ClassVar[Mapping[str, str]]  # those of `--set`, each with what it is
    limits_time: ClassVar[bool] = False  # whether it takes --time

    def text(self, request: Request) -> str:
        """The script or manifest to submit.

        Raises:
            LaunchError: the request lacks something that this scheduler needs.
        """
        raise NotImplementedError

    def submit(self, request: Request) -> str:
        """Submit, and return the scheduler's name or number of the run.

        Raises:
            LaunchError: the scheduler is not there, or refuses.
        """
        raise NotImplementedError

    def state(self, submission: Submission) -> State:
        """State of a run, as the scheduler says. Raises LaunchError where it does not answer."""
        raise NotImplementedError

    def steady_state(self, submission: Submission) -> State:
        """State of a run that is followed.

        A scheduler that fails to answer is asked again for some minutes.
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
        """End a run, with a checkpoint as far as the scheduler gives time for one."""
        raise NotImplementedError


def ask(
    command: list[str], advice: str, *, text: str | None = None, environment: Mapping[str, str] | None = None
) -> str:
    """Output of a scheduler's command.

    Args:
        advice: what to do where the command is not installed.
        text: for its standard input.
        environment: variables besides those of this process.

    Raises:
        LaunchError: it is not there, fails, or does not answer.
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
        raise LaunchError(f"the command {command[0]} is not on this machine. {advice}") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"`{shown}` did not answer in {ANSWER_S:.0f} s. Is the cluster reachable from here?"
        ) from None
    if ended.returncode:
        why = "\n".join((ended.stderr.strip() or ended.stdout.strip()).splitlines()[-8:])
        raise LaunchError(f"`{shown}` failed with exit code {ended.returncode}: {printable(why)}")
    return ended.stdout


def show(command: list[str], advice: str) -> int:
    """Run a command that shows a log, and return its exit code."""
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL).returncode
    except FileNotFoundError:
        raise LaunchError(f"the command {command[0]} is not on this machine. {advice}") from None
