"""Planted mistakes of synchronisation, device and staging: does the table of cases see them?

    python benchmarks/simulated_mutations.py [--json] [--only TEXT]

Each mistake is an edit of one place in `src/paceline`: a wait left out, a stream not ordered behind another, a tensor
on the wrong device, a buffer used too early. The trainings that reach this place are run on a copy with the mistake;
it is caught when one has wrong numbers, crashes, or does not end. The same trainings are right without it.

Figures: `mutations`, `caught`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from measure import parser_of, print_figures

# There `simulated` is the accelerator's package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from measure import environment_line
from paceline.files import scratch_folder
from simulated_cases import Case, extensions, table
from simulated_mistakes import MISTAKES, Mistake
from simulated_ranks import Outcome
from simulated_sets import Result, device_variables, references, simulated

SOURCE = Path(__file__).resolve().parents[1] / "src"


@dataclass(frozen=True)
class Tried:
    """A mistake, and the first case that it changes; None where it changes none."""

    mistake: Mistake
    seen: Result | None


@extensions()
def main() -> None:
    """Try every mistake, print the table, and with --json a last line for machines."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="only mistakes with this in their names")
    arguments = parser.parse_args()
    mistakes = [mistake for mistake in MISTAKES if arguments.only in mistake.name]
    for mistake in mistakes:
        planted(mistake)  # all of them first: a list that is no longer true tells so at once
    tried = try_all(mistakes)
    caught = sum(one.seen is not None for one in tried)
    print(f"{caught} of {len(tried)} caught; {environment_line()}")
    if arguments.json:
        figures = {"mutations": len(tried), "caught": caught}
        print_figures(figures)


def try_all(mistakes: Sequence[Mistake]) -> list[Tried]:
    """Try mistakes one after the other, and print each.

    Raises:
        SystemExit: a case is not right without any mistake.
    """
    device = device_variables()
    cases = {mistake: cases_of(mistake) for mistake in mistakes}
    every = list(dict.fromkeys(case for of_one in cases.values() for case in of_one))
    expected = references(every, device)
    for result in simulated(every, expected, device):
        if result.verdict != "right":
            raise SystemExit(f"{result.case.name} is {result.verdict} without any mistake: {result.why}")
    tried = []
    for mistake in mistakes:
        tried.append(Tried(mistake, _first_seen(mistake, cases[mistake], expected, device)))
        seen = tried[-1].seen
        how = f"{seen.verdict}: {seen.case.name}" if seen is not None else f"not caught. {mistake.harmless}".strip()
        print(f"  {mistake.name:60} {mistake.file:45} {how}", flush=True)
    return tried


def cases_of(mistake: Mistake) -> list[Case]:
    """The cases of the table that reach the place, those in late order first.

    Raises:
        ValueError: the table has no such training.
    """
    found = [case for case in table() if case.training in mistake.trainings and case.order != "eager"]
    if missing := set(mistake.trainings) - {case.training for case in found}:
        raise ValueError(f"{mistake.name}: the table has no training {', '.join(sorted(missing))}")
    return sorted(found, key=lambda case: case.order)


def planted(mistake: Mistake) -> str:
    """The file's text with the mistake in it.

    Raises:
        ValueError: the text to be replaced is not there exactly once.
    """
    text = (SOURCE / "paceline" / mistake.file).read_text()
    if text.count(mistake.old) != 1:
        times = text.count(mistake.old)
        raise ValueError(f"{mistake.name}: {mistake.file} has {mistake.old!r} {times} times, and not once")
    return text.replace(mistake.old, mistake.new)


def _first_seen(
    mistake: Mistake, cases: Sequence[Case], expected: Mapping[Case, Outcome], device: Mapping[str, str]
) -> Result | None:
    with _copy(mistake) as source:
        path = f"{source}:{device['PYTHONPATH']}"
        results = simulated(cases, expected, {**device, "PYTHONPATH": path}, lambda result: result.verdict == "right")
    return next((result for result in results if result.verdict != "right"), None)


@contextmanager
def _copy(mistake: Mistake) -> Iterator[Path]:
    """A copy of the sources with the mistake."""
    with scratch_folder() as folder:
        shutil.copytree(SOURCE / "paceline", folder / "paceline")
        (folder / "paceline" / mistake.file).write_text(planted(mistake))
        yield folder


if __name__ == "__main__":
    main()
