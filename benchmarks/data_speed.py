"""Samples per second of paceline and of its peers; a part of `data.py`."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import data_corpora as corpora
from data_serve import Task
from paceline.stats import Interval, median_interval
from paceline_lab.systems.started import python_of
from paceline_lab.systems.system import System

OURS, PEERS = "paceline", ("streaming", "litdata", "webdataset", "grain", "datasets")
WORKERS = (1, 2)
SKIPPED = 16  # batches at the start of an epoch, which loaders may have read before the epoch was requested
ROUNDS, QUICK_ROUNDS = 9, 3
SEED = 1
LONGEST = 700  # characters of a document, so that its tokens fit into the context

Rates = dict[str, list[float]]  # samples/s of each round, by system


class Work(NamedTuple):
    """A workload: its samples, which are a multiple of two batches, those of a quick run, and its batch."""

    samples: int
    quick: int
    batch: int
    make: Callable[[Path, int], Path]


WORKS = {
    "text": Work(16_384, 8192, 64, lambda folder, rows: corpora.text(folder, rows, longest=LONGEST)),
    "tokens": Work(81_920, 16_384, 64, corpora.tokens),
    "images": Work(4096, 1536, 32, corpora.images),
    "tars": Work(4096, 1536, 32, corpora.tars),
}


def measured(folder: Path, quick: bool) -> dict[str, float]:
    """Compare the samples of all systems, time them, and print a table for each workload."""
    figures: dict[str, float] = {}
    for name, work in WORKS.items():
        source = work.make(folder, work.quick if quick else work.samples)
        ratios = []
        for workers in WORKERS:
            place = str(source), str(folder / "own")
            task = Task(name, *place, work.batch, workers, str(corpora.tokenizer(folder)), corpora.CONTEXT, SEED)
            rates = interleaved(task, QUICK_ROUNDS if quick else ROUNDS)
            ratios.append(report(task, rates))
            figures |= {f"samples_per_s_{name}_{workers}_{of}": statistics.median(rates[of]) for of in rates}
        figures[f"samples_to_best_peer_{name}"] = min(ratio.middle for ratio in ratios)
    return figures | {"samples_to_best_peer": min(figures[f"samples_to_best_peer_{name}"] for name in WORKS)}


def interleaved(task: Task, rounds: int) -> Rates:
    """Compare the samples of all systems, then let them read an epoch in turn."""
    with ExitStack() as held:
        loaders = {system: held.enter_context(loader(system, task)).ask for system in (OURS, *PEERS)}
        must_be_equal({system: ask({"ask": "digest"}) for system, ask in loaders.items()}, task)
        rates: Rates = {system: [] for system in loaders}
        for turn in range(rounds):
            first = turn % len(loaders)
            for system in [*loaders][first:] + [*loaders][:first]:
                found = loaders[system]({"ask": "epoch", "skip": SKIPPED})
                rates[system].append(found["samples"] / found["time_s"])
    return rates


def must_be_equal(digests: Mapping[str, Any], task: Task) -> None:
    """Refuse systems that do not read the same samples.

    Raises:
        SystemExit: a system's multiset of decoded samples differs from ours.
    """
    differing = [
        f"{system} {found}"
        for system, found in digests.items()
        if any(found[key] != digests[OURS][key] for key in ("samples", "multiset", "kinds"))
    ]
    if differing:
        raise SystemExit(f"{task.work}: samples differ from {digests[OURS]}: {'; '.join(differing)}")


def report(task: Task, rates: Rates) -> Interval:
    """Print samples/s, and return our rate / that of the fastest peer."""
    print(
        f"{task.work}, {task.workers} loader process(es), batches of {task.batch}: samples/s, and ours / theirs (95 %)"
    )
    ratios = {
        system: median_interval([ours / theirs for ours, theirs in zip(rates[OURS], values, strict=True)])
        for system, values in rates.items()
    }
    for system, values in sorted(rates.items(), key=lambda pair: -statistics.median(pair[1])):
        print(
            f"  {system:12} {statistics.median(values):10.0f}   {'' if system == OURS else ratios[system]}", flush=True
        )
    return ratios[max(PEERS, key=lambda system: statistics.median(rates[system]))]


# Processes


class Loader(NamedTuple):
    """A process that loads data: what it said when it had opened the data, and a function that asks it."""

    opened: dict[str, float]
    ask: Callable[[Mapping[str, Any]], Any]


@contextmanager
def loader(system: str, task: Task) -> Iterator[Loader]:
    """Start the process that loads a task with a system.

    Raises:
        SystemExit: the process ended.
    """
    words = (
        [sys.executable, here("data_ours.py"), task.text()]
        if system == OURS
        else [str(peers_python()), here("data_peers.py"), system, task.text()]
    )
    log = Path(task.own) / f"{system}-{task.work}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as errors:
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdin is not None

    def answer() -> Any:
        assert process.stdout is not None
        if not (line := process.stdout.readline()):
            raise SystemExit(f"{system} ended while it loaded {task.work}; see {log}:\n{log.read_text()[-2000:]}")
        return json.loads(line)

    def ask(question: Mapping[str, Any]) -> Any:
        assert process.stdin is not None
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        return answer()

    try:
        yield Loader(answer(), ask)
    finally:
        process.stdin.close()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def here(name: str) -> str:
    """Return the path of a file beside this one."""
    return str(Path(__file__).with_name(name))


def peers_python() -> Path:
    """Return the interpreter of the environment with all peers, which is made once."""
    peers = System(
        name="data-loaders", title="other data loaders", documentation="", requirements=("data-loaders.txt",)
    )
    return python_of(peers, lambda line: print(line, file=sys.stderr, flush=True))
