"""Record of submissions: a private folder with one JSON file each, for `paceline runs` and `paceline cancel`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from paceline.errors import LaunchError
from paceline.files import home_folder, private_folder, read_text, write_whole
from paceline.nearest import nearest

_LIMIT = 2**16  # bytes of a file


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was submitted.

    Attributes:
        name: ours, also for `paceline cancel`.
        engine: name of the scheduler.
        id: the scheduler's own.
        since: when it was submitted, in seconds since 1970.
        options: of `--set`.
        phase: how it ended; empty until that was seen.
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
    """The private folder, made if missing: `submitted` in PACELINE_HOME, or else in ~/.paceline.

    Raises:
        LaunchError: it cannot be made, or belongs to another user.
    """
    home = home_folder()
    try:
        private_folder(home)
        private_folder(home / "submitted")
    except OSError as error:
        raise LaunchError(
            f"{home / 'submitted'} cannot be used: {error.strerror}. Name another folder in PACELINE_HOME."
        ) from error
    return home / "submitted"


def save(submission: Submission) -> None:
    """Write the file of a submission."""
    write_whole(folder() / f"{submission.name}.json", msgspec.json.encode(submission))


def ended(submission: Submission, phase: str, code: int) -> Submission:
    """Remember how a run ended, and remove its key."""
    known = msgspec.structs.replace(submission, phase=phase, code=code)
    save(known)
    (folder() / f"{submission.name}.key").unlink(missing_ok=True)
    return known


def submissions() -> list[Submission]:
    """All submissions, the newest first. A file that is none is left out."""
    found = []
    for path in folder().glob("*.json"):
        try:
            submission = msgspec.json.decode(read_text(path, _LIMIT), type=Submission)
        except (OSError, ValueError, msgspec.MsgspecError):  # cut short, or somebody else's
            continue
        if submission.name == path.stem:
            found.append(submission)
    return sorted(found, key=lambda submission: submission.since, reverse=True)


def find(name: str) -> Submission:
    """The submission of a name, or of a scheduler's id that only one has.

    Raises:
        LaunchError: there is none, or several have the id.
    """
    known = submissions()
    found = [s for s in known if s.name == name] or [s for s in known if s.id == name]
    if len(found) > 1:
        names = ", ".join(s.name for s in found)
        raise LaunchError(f"{name} is the number of several runs: {names}. Say the name of one.")
    if not found:
        hint = nearest(name, [s.name for s in known]) if known else "Nothing was submitted from here."
        raise LaunchError(f'no run "{name[:80]}" was submitted. {hint}')
    return found[0]
