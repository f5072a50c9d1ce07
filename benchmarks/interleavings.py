"""Random interleavings of losses, messages and steps, played against the recovery protocol in virtual time.

    python benchmarks/interleavings.py [--json] [--millions N] [--minutes N] [--seed N] [--processes N]

Each plays 100 to 400 random events in a world of 1 to 4 replicas, of 1 to 3 processes each (`membership_world.py`),
then lets the processes settle. After each event all ranks of one step must have the same model, made of every step
once; no step may be lost that a living replica took; in the end all that can train do. Figures:
- `interleavings`: how many were played, `events` and `events_per_second` of all processes together.
- `violations`: how many broke a promise. Each is shown with its seed, and `--seed` plays that one again.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import signal
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from random import Random

from measure import environment_line
from membership_world import played
from paceline.cluster.discover import environment

KILLS = 0.0, 0.01, 0.03, 0.05, 0.15
PACKAGE = 2000  # interleavings that a process plays between two words of it
SHOWN = 5  # violations
_PR_SET_PDEATHSIG = 1  # of prctl
Found = tuple[int, int, list[tuple[int, str]]]  # interleavings, events, and seeds with what was wrong


def main() -> None:
    options = _options()
    if options.seed is not None:
        print(f"seed {options.seed}: {play(options.seed)} events, all promises held")
        return
    began = time.monotonic()
    interleavings, events, violations = 0, 0, []
    wanted = round(options.millions * 1e6)
    for some, of_them, wrong in found(options.first, wanted, options.minutes, options.processes):
        interleavings, events = interleavings + some, events + of_them
        violations += wrong
        for seed, what in wrong[: max(0, SHOWN - len(violations) + len(wrong))]:
            print(f"seed {seed}: {what}", flush=True)
        if interleavings % 100_000 < PACKAGE:
            print(f"{interleavings:,} interleavings, {len(violations)} violations", flush=True)
    seconds = time.monotonic() - began
    figures = {
        "interleavings": interleavings,
        "events": events,
        "events_per_second": round(events / seconds),
        "violations": len(violations),
        "seconds": round(seconds, 1),
    }
    print(f"{interleavings:,} interleavings of {events:,} events in {seconds:.0f} s: {len(violations)} violations")
    print(environment_line())
    if options.json:
        print(json.dumps({"figures": figures, "environment": environment()}))
    raise SystemExit(1 if violations else 0)


def play(seed: int) -> int:
    """Play the interleaving of a seed; returns its events.

    Raises:
        AssertionError: a promise was broken.
    """
    random = Random(seed)
    replicas, replica_size = random.randint(1, 4), random.choice((1, 1, 2, 3))
    events, kills = random.randint(100, 400), random.choice(KILLS)
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with one line of figures")
    parser.add_argument("--millions", type=float, default=10.0, help="of interleavings; 10 unless told")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="that it takes at most")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--seed", type=int, help="play one alone")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    return parser.parse_args()


if __name__ == "__main__":
    main()
