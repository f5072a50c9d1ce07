"""Request: a run to submit, checked before any scheduler is asked."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import LaunchError
from paceline.nearest import nearest

MOST_HOSTS = 65_536
_UNITS_S = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_TIME = re.compile(r"(?:[0-9]{1,6}[dhms])+")


@dataclass(frozen=True)
class Request:
    """A run to submit.

    Attributes:
        job: the job file, an absolute path.
        hosts: how many hosts.
        name: of the submission; letters, digits and hyphens, as the names of pods are.
        run: the run's directory or URL, where it is seen by the hosts.
        time_s: time after which the scheduler ends it, where it has such a limit.
        options: the scheduler's own options, from `--set`.
    """

    job: Path
    hosts: int
    name: str
    run: str
    plan: str = "auto"
    restarts: int = 0
    time_s: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def train_arguments(self, job: str | None = None) -> list[str]:
        """Arguments of `paceline` on each host; `job` is the job file's path there."""
        arguments = ["train", job or str(self.job), "--plan", self.plan, "--run", self.run, "--resume"]
        return [*arguments, "--restarts", str(self.restarts)] if self.restarts else arguments

    @property
    def run_is_url(self) -> bool:
        """True if the run is kept in a store, which every host reaches."""
        return "://" in self.run


def name_for(job_name: str) -> str:
    """A new name of a submission: the job's and the time."""
    plain = re.sub(r"[^a-z0-9]+", "-", job_name.lower()).strip("-")[:36].rstrip("-")
    return f"{plain or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"


def must_be_hosts(count: int) -> None:
    """Raise LaunchError where a number of hosts is none."""
    if not 1 <= count <= MOST_HOSTS:
        raise LaunchError(f"--hosts {count}: a run is on 1 host to {MOST_HOSTS:,}")


def time_from(text: str) -> int:
    """Seconds of a time such as 90m, 1h30m or 2d.

    Raises:
        LaunchError: it is not such a time.
    """
    if not _TIME.fullmatch(text):
        raise LaunchError(f'--time "{text[:40]}" is not a time such as 90m, 1h30m or 2d')
    seconds = sum(int(count) * _UNITS_S[unit] for count, unit in re.findall(r"([0-9]+)([dhms])", text))
    if not 60 <= seconds <= 3_650 * _UNITS_S["d"]:
        raise LaunchError(f"--time {text}: a limit is at least a minute and at most ten years")
    return seconds


def options_from(pairs: list[str], known: Mapping[str, str], scheduler: str) -> dict[str, str]:
    """The options of `--set NAME=VALUE`.

    Raises:
        LaunchError: one is not such a pair, is unknown to the scheduler, is given twice, or has a value with control
            characters.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not value:
            raise LaunchError(f'--set "{pair[:80]}" is not NAME=VALUE')
        if name not in known:
            raise LaunchError(f'--set {pair[:80]}: {scheduler} has no option "{name[:40]}". {nearest(name, known)}')
        if name in found:
            raise LaunchError(f"--set {name} is given twice")
        if not value.isprintable():
            raise LaunchError(f"--set {name}: the value has a line break or another character that cannot be shown")
        found[name] = value
    return found
