"""Invariants of a run that was disturbed: what paceline promises, whatever happens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from paceline.errors import CheckpointError
from paceline.run.checkpoint.manifest import checkpoints
from paceline.run.record.run import Run, read_lines
from paceline_lab.chaos.play import STILL_SAVES, Ended, Played
from paceline_lab.chaos.reference import Reference, difference, losses_of

_MOST_TOLD = 3
# words of an error by which a fault may end a command that starts again as often as it may
_MAY_END = {
    "disk-full": ("No space left",),
    "corrupt": ("is different on rank", "holds other values"),
    "cut": ("is lost", "did not come"),
    "partition": ("is lost", "did not come"),
    "store": ("is lost", "did not come"),
}
_ABOUT_S = 0.005  # between what a rank writes and what others do at that moment


@dataclass(frozen=True)
class Invariant:
    """One promise: its name, and how it was broken; nothing where it was held."""

    name: str
    broken: tuple[str, ...] = ()

    @property
    def held(self) -> bool:
        """True if nothing speaks against it."""
        return not self.broken


def check(played: Played, reference: Reference) -> list[Invariant]:
    """Hold a run against every invariant."""
    questions = {
        "the run ends": _ends(played),
        "losses are those of an undisturbed run": _losses(played, reference),
        "every sample once an epoch": _samples(played, reference),
        "no checkpoint lost": _checkpoints(played),
        "nothing left behind": iter(played.left),
        "nothing grows": (str(course) for course in played.grown if course.grows),
    }
    return [Invariant(name, tuple(islice(broken, _MOST_TOLD))) for name, broken in questions.items()]


def _ends(played: Played) -> Iterator[str]:
    if played.hung:
        yield played.hung
    since, was_killed_before = 0.0, False
    for end in played.ends:
        if end.code:
            faults = [injected.fault for injected in played.made if since <= injected.time <= end.time]
            expected = any(word in end.text for fault in faults for word in _MAY_END.get(fault.kind, ()))
            was_killed = any(fault.kind == "kill" and fault.target == "command" for fault in faults)
            if was_killed and end.code < 0:
                was_killed_before = True
            elif was_killed_before and STILL_SAVES in end.text:
                continue  # it said so, and the next one goes on
            elif end.code < 0 or "paceline: " not in end.text:
                yield f"a command ended with code {end.code} and no error of paceline's: {_said(end)}"
            elif not expected:
                yield f"a command ended with an error that no fault explains: {_said(end)}"
        since = end.time
    if not played.hung and (not played.ends or played.ends[-1].code):
        said = _said(played.ends[-1]) if played.ends else "it did not start"
        yield f"it does not go on when it is resumed: {said}"


def _losses(played: Played, reference: Reference) -> Iterator[str]:
    if played.hung or not reference.allowed:
        return
    found, first = losses_of(played.run), reference.losses[min(reference.losses)]
    known = found.keys() | (_committed(played).keys() if _disk_was_full(played) else set())
    for step, loss in sorted(reference.losses.items()):
        if step not in known:
            yield f"step {step} is not in the record"
        elif step in found and step <= _trusted_until(played):
            by = difference(found[step], loss, first)
            if not by <= reference.allowed[step]:
                yield (
                    f"the loss of step {step} is {found[step]:.7g} instead of {loss:.7g}: it differs by {by:.2g}, and "
                    f"may by {reference.allowed[step]:.2g}"
                )


def _samples(played: Played, reference: Reference) -> Iterator[str]:
    if played.hung:
        return
    seen = _committed(played)
    changed = _steps_of_changes(played)
    for step, due in sorted(reference.samples.items()):
        samples = seen.get(step)
        if samples is None:
            continue  # nobody who took the step lives to tell
        if twice := [sample for sample, count in (Counter(samples) - Counter(due)).items() if count > 0]:
            yield f"step {step} had the samples {twice[:5]}, which are not its own or came twice"
        # around a change, who read some may have died right after the step
        elif step not in changed and (missing := list((Counter(due) - Counter(samples)).keys())):
            yield f"step {step} was without the samples {missing[:5]}"


def _checkpoints(played: Played) -> Iterator[str]:
    if not (played.run / "job.yaml").exists():
        return
    from paceline.run.checkpoint.reader import load

    run = Run(played.run)
    folder = run.checkpoints
    saved = {event["path"]: event["time"] for event in run.events() if event["event"] == "checkpoint_saved"}
    damaged = {injected.checkpoint: injected.time for injected in played.made if injected.checkpoint}
    there = {path.name: path for _, path in checkpoints(folder)}
    for name in sorted(saved)[-run.job.checkpoint.keep :]:
        if name not in there and not played.hung:
            yield f"{name} was saved, and is gone"
    for name, path in there.items():
        is_damaged = damaged.get(name, 0.0) > saved.get(name, 0.0)
        try:
            load(path, 0, 1)
        except CheckpointError as error:
            if not is_damaged:
                yield f"{name} does not load: {error}"
        else:
            if is_damaged:
                yield f"{name} loads, though a bit of it was changed"


def _committed(played: Played) -> dict[int, list[int]]:
    """Samples of each step; of one that was taken again, those of the last time."""
    files = _witnessed(played)
    again = _starts(files)
    found: dict[int, list[int]] = {}
    for lines in files:
        own: dict[int, list[int]] = {}
        for line in lines:
            if "samples" not in line:
                continue
            step, time = line["step"], line["time"]
            if not any(at > time + _ABOUT_S and went_on_from < step for at, went_on_from in again):
                own[step] = line["samples"]
        for step, samples in own.items():
            found.setdefault(step, []).extend(samples)
    return found


def _steps_of_changes(played: Played) -> set[int]:
    """Steps at which ranks were lost or came, and their neighbours."""
    changes = {step for _, step in _starts(_witnessed(played))}
    changes |= {injected.step for injected in played.made}
    return {step + near for step in changes for near in (-1, 0, 1, 2)}


def _starts(files: list[list[dict[str, Any]]]) -> list[tuple[float, int]]:
    """Times at which ranks began or went on, and the step after which they did."""
    return [(line["time"], line["from"]) for lines in files for line in lines if "from" in line]


def _witnessed(played: Played) -> list[list[dict[str, Any]]]:
    """Lines of each process. The run's own record may have lost some, where its disk was full."""
    return [list(read_lines(file)) for file in played.witness.glob("*.jsonl")]


def _trusted_until(played: Played) -> float:
    """Last step before a rank computed with other weights.

    Until that is seen, all take over what it computed.
    """
    return min((i.step for i in played.made if i.fault.target == "weights"), default=float("inf"))


def _disk_was_full(played: Played) -> bool:
    return any(injected.fault.kind == "disk-full" for injected in played.made)


def _said(end: Ended) -> str:
    text = end.text[end.text.rfind("paceline: ") :] if "paceline: " in end.text else end.text[-400:]
    return re.sub(r"\s+", " ", text)[:400]
