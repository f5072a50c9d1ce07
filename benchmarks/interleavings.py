"""Random interleavings of losses, messages and steps, played against the recovery protocol in virtual time.

    python benchmarks/interleavings.py [--json] [--millions N] [--minutes N] [--seed N] [--processes N] [--out FILE]

Each plays 30 to 300 random events, most often few, in a world of 1 to 4 replicas, of 1 to 3 processes each
(`membership_world.py`), then lets the processes settle. After each event all ranks of one step must have the same
model, made of every step once; no step may be lost that a living replica took; in the end all that can train do.
Figures, of this start and of those before it that `--out` knows, while the protocol is the same:
- `interleavings`: how many were played, `events` and `events_per_second` of all processes together.
- `violations`: how many broke a promise. Each is shown with its seed, and `--seed` plays that one again.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import inspect
import json
import os
import signal
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from random import Random

from measure import environment_line, parser_of, print_figures
from membership_world import World, played
from paceline.elastic.membership import Membership, newest_of
from paceline.files import write_whole
from paceline.wire.status import Generation

KILLS = 0.0, 0.01, 0.03, 0.05, 0.15
FEWEST = 30  # events; the most are ten times as many
PACKAGE = 2000  # interleavings that a process plays between two words of it
SHOWN = 5  # violations
_PR_SET_PDEATHSIG = 1  # of prctl
Found = tuple[int, int, list[tuple[int, str]]]  # interleavings, events, and seeds with what was wrong


def main() -> None:
    options = _options()
    if options.seed is not None:
        print(f"seed {options.seed}: {play(options.seed)} events, all promises held")
        return
    so_far = Played.read(options.out)
    seconds_before, began = so_far.seconds, time.monotonic()
    wanted = round(options.millions * 1e6) - so_far.interleavings
    for number, of_them, wrong in found(so_far.interleavings, wanted, options.minutes, options.processes):
        so_far.interleavings += number
        so_far.events += of_them
        so_far.violations += [seed for seed, _ in wrong]
        so_far.seconds = seconds_before + time.monotonic() - began
        so_far.write(options.out)
        for seed, what in wrong[: max(0, SHOWN - len(so_far.violations) + len(wrong))]:
            print(f"seed {seed}: {what}", flush=True)
        if so_far.interleavings % 100_000 < PACKAGE:
            print(f"{so_far.interleavings:,} interleavings, {len(so_far.violations)} violations", flush=True)
    figures = so_far.figures()
    print(
        "{interleavings:,} interleavings of {events:,} events in {seconds:.0f} s: {violations} violations".format(
            **figures
        )
    )
    print(environment_line())
    if options.json:
        print_figures(figures)
    raise SystemExit(1 if so_far.violations else 0)


@dataclass
class Played:
    """What was played so far, with one version of the protocol; seeds are numbered from 0."""

    protocol: str  # hash of its source
    interleavings: int = 0
    events: int = 0
    seconds: float = 0.0
    violations: list[int] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path | None) -> Played:
        """What a file tells; nothing, if it is not there or the protocol was another."""
        played_before = cls(protocol=hash_of_source())
        if file is not None and file.exists():
            told = cls(**json.loads(file.read_text()))
            if told.protocol == played_before.protocol:
                return told
            print(f"{file}: the protocol has changed since, so all is played anew", flush=True)
        return played_before

    def write(self, file: Path | None) -> None:
        """Have a later start go on from here."""
        if file is not None:
            write_whole(file, json.dumps(asdict(self)))

    def figures(self) -> dict[str, float]:
        """The figures by name."""
        return {
            "interleavings": self.interleavings,
            "events": self.events,
            "events_per_second": round(self.events / max(self.seconds, 1e-9)),
            "violations": len(self.violations),
            "seconds": round(self.seconds, 1),
        }


def hash_of_source() -> str:
    """Hash of the files that the interleavings test, and of the world they are played in."""
    modules = [inspect.getmodule(part) for part in (Membership, newest_of, Generation, World)]
    source = [inspect.getsource(part) for part in (*modules, play) if part is not None]
    return sha256("".join(source).encode()).hexdigest()


def play(seed: int) -> int:
    """Play the interleaving of a seed; returns its events.

    Raises:
        AssertionError: a promise was broken.
    """
    random = Random(seed)
    replicas, replica_size = random.randint(1, 4), random.choice((1, 1, 2, 3))
    events, kills = round(FEWEST * 10 ** random.random()), random.choice(KILLS)
    spared = replica_size if random.random() < 0.3 else 0
    played(random.getrandbits(64), replicas, replica_size, events, kills, spared)
    return events


def package(first: int) -> Found:
    """Play interleavings from a seed on."""
    events, wrong = 0, []
    for seed in range(first, first + PACKAGE):
        try:
            events += play(seed)
        except Exception as error:  # noqa: BLE001 - whatever the protocol does wrong
            last = traceback.extract_tb(error.__traceback__)[-1]
            wrong.append((seed, f"{error or type(error).__name__} ({last.name}, line {last.lineno})"))
    return PACKAGE, events, wrong


def found(first: int, wanted: int, minutes: float, processes: int) -> Iterator[Found]:
    """Results of all processes, package by package, until the number or the time is reached."""
    until = time.monotonic() + 60 * minutes
    with ProcessPoolExecutor(processes, initializer=_prepare) as pool:
        waiting = []
        for seed in range(first, first + wanted, PACKAGE):
            if time.monotonic() > until:
                break
            waiting.append(pool.submit(package, seed))
            if len(waiting) > 2 * processes:
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()


def _prepare() -> None:
    # what was imported is never garbage
    gc.freeze()
    # with the process that started it
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--millions", type=float, default=10.0, help="of interleavings; 10 unless told")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="that it takes at most")
    parser.add_argument("--out", type=Path, help="a file to go on from, as an earlier start has left it")
    parser.add_argument("--seed", type=int, help="play one alone")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    return parser.parse_args()


if __name__ == "__main__":
    main()
