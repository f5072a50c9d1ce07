"""The parameter server: `sync=server` beside all-reduce, and beside TensorFlow's ParameterServerStrategy.

    python benchmarks/server.py [--json] [--tensorflow PYTHON] [--only updates,sync,straggler,stale] [--rounds 5]
                                [--updates 4000]

- `updates_to_tensorflow`: updates a second of 2 asynchronous workers and 1 server (`staleness=inf`) / TensorFlow's, for
  the same model (784-336-10, 267 k parameters), batches of 32 and SGD, in turn, median over the rounds. Without
  `--tensorflow` the updates of paceline alone. `updates_with_backup`: with a second process for the server, which has
  every update before it is acknowledged; TensorFlow's has none.
- `sync_to_allreduce`: median step of `sync=allreduce` / of `sync=server`, 2 replicas of the same model on this machine,
  in turn. Where servers have no core of their own (`cores_for_servers` 0) the ranks wait for them.
- `straggler_share`: pieces a second of 4 asynchronous workers on emulated hosts, one with half the others' cores / the
  sum of what each does alone; the server has a host of its own (needs root; the hosts are network namespaces).
- `stale_samples`: samples until the loss of a small job is below a target with `staleness=4` / the same synchronously,
  median over seeds.

Medians, with the lowest and the highest round; the machine, versions and load stand under the table.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

import paceline
from measure import environment_line, parser_of, print_figures
from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Emulate
from paceline.job.job import Job

FEATURES, HIDDEN, CLASSES, BATCH, WORKERS = 784, 336, 10, 32, 2
PARTS = ("updates", "sync", "straggler", "stale")
ASYNCHRONOUS = "server:staleness=inf,backup=off"
WITH_BACKUP = "server:staleness=inf,backup=on"
WARM_UP = 20  # steps
MODEL = {"zoo": "mlp", "args": {"hidden": HIDDEN}}


def main() -> None:
    """Measure, print a table, and with --json a last line for machines."""
    parser = parser_of(__doc__)
    parser.add_argument("--tensorflow", metavar="PYTHON", help="a Python that has TensorFlow")
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=5, help="of each figure")
    parser.add_argument("--updates", type=int, default=4000, help="in a round; a few hundred are too short to time")
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="paceline-server-") as folder:
        trials = Trials(Path(folder), arguments.rounds, arguments.updates)
        if "updates" in parts:
            found |= trials.updates(arguments.tensorflow)
        if "sync" in parts:
            found |= trials.synchronous()
        if "straggler" in parts:
            found |= trials.straggler()
        if "stale" in parts:
            found |= trials.stale()
    print(environment_line())
    if arguments.json:
        print_figures({k: round(v, 4) for k, v in found.items()})


class Trials:
    """Runs of paceline and of its peer, in turn."""

    def __init__(self, folder: Path, rounds: int, updates: int) -> None:
        self.folder, self.rounds, self.count = folder, rounds, updates
        self._number = 0

    def updates(self, tensorflow: str | None) -> dict[str, float]:
        """Updates a second, ours and TensorFlow's."""
        ours: list[float] = []
        backed: list[float] = []
        theirs: list[float] = []
        with _peer(tensorflow) as peer:
            for _ in range(self.rounds):
                ours.append(self._updates_per_s(ASYNCHRONOUS))
                if peer is not None:
                    theirs.append(self.count / _asked(peer, self.count)["seconds"])
                backed.append(self._updates_per_s(WITH_BACKUP))
        _show("updates a second, paceline", ours)
        _show("updates a second, paceline with a backup", backed)
        found = {"updates_per_s": statistics.median(ours), "updates_with_backup": statistics.median(backed)}
        if theirs:
            _show("updates a second, TensorFlow", theirs)
            ratio = statistics.median(ours) / statistics.median(theirs)
            print(f"{'to TensorFlow':50} {ratio:8.2f}")
            found |= {"tensorflow_updates_per_s": statistics.median(theirs), "updates_to_tensorflow": ratio}
        return found

    def synchronous(self) -> dict[str, float]:
        """Step times of the synchronous rules."""
        steps: dict[str, list[float]] = {"allreduce": [], "server": []}
        for _ in range(self.rounds):
            for sync in steps:
                run = self._trained(_job(self.count // WORKERS), f"dp={WORKERS} sync={sync}")
                steps[sync].append(statistics.median(step["step_s"] for step in list(run.steps())[WARM_UP:]))
        for sync, found in steps.items():
            _show(f"ms a step, sync={sync}", [1e3 * seconds for seconds in found])
        ratio = statistics.median(steps["allreduce"]) / statistics.median(steps["server"])
        free = max(0, len(os.sched_getaffinity(0)) - WORKERS)
        print(f"{'allreduce / server':50} {ratio:8.2f}   cores for servers: {free}")
        return {"sync_to_allreduce": ratio, "cores_for_servers": float(free)}

    def straggler(self) -> dict[str, float]:
        """The sum of the workers' speeds that is reached with one at half speed."""
        fast, slow = 0.3, 0.15
        together: list[float] = []
        alone: list[float] = []
        for _ in range(self.rounds):
            together.append(self._pieces_per_s(4, (fast, fast, fast, slow)))
            alone.append(3 * self._pieces_per_s(1, (fast,)) + self._pieces_per_s(1, (slow,)))
        _show("pieces a second of 4 workers, one at half speed", together)
        _show("the sum of each alone", alone)
        share = statistics.median(together) / statistics.median(alone)
        print(f"{'share':50} {share:8.3f}")
        return {"straggler_share": share}

    def stale(self) -> dict[str, float]:
        """Samples to a target, with a staleness and without."""
        plans = {"allreduce": "dp=4 sync=allreduce", "stale": "dp=4 sync=server:staleness=4,backup=off"}
        samples: dict[str, list[float]] = {name: [] for name in plans}
        for seed in range(self.rounds):
            for name, plan in plans.items():
                samples[name].append(_samples_to(self._trained(_digits(seed), plan), 0.25))
        for name, found in samples.items():
            _show(f"samples to the target, {plans[name]}", found)
        ratio = statistics.median(samples["stale"]) / statistics.median(samples["allreduce"])
        print(f"{'staleness 4 / synchronous':50} {ratio:8.3f}")
        return {"stale_samples": ratio}

    def _updates_per_s(self, sync: str) -> float:
        run = self._trained(_job(self.count // WORKERS), f"dp={WORKERS} threads=1 sync={sync}")
        return WORKERS * _steps_per_s(run)

    def _pieces_per_s(self, workers: int, cores: Sequence[float]) -> float:
        job = _heavy_job(steps=200, batch=8 * workers)
        cluster = Cluster(name="straggler", emulate=Emulate(hosts=workers + 1, cpu=(*cores, 0.6)))
        run = self._trained(job, f"dp={workers} threads=1 sync={ASYNCHRONOUS}", cluster)
        return workers * _steps_per_s(run)

    def _trained(self, job: Job, plan: str, cluster: Cluster | None = None) -> Any:
        self._number += 1
        quiet = Console(file=StringIO())
        return paceline.train(job, plan, cluster=cluster, run=self.folder / f"run-{self._number}", console=quiet)


def _job(steps: int) -> Job:
    data = {"kind": "synthetic", "samples": 4096, "shape": [FEATURES], "classes": CLASSES, "held_out": 0}
    return Job(
        name="updates",
        model=MODEL,
        data=data,
        loss="cross_entropy",
        optimizer={"name": "sgd", "lr": 0.05},
        global_batch=BATCH * WORKERS,
        stop={"steps": steps},
        evaluate={"every_epochs": 10**6},
        checkpoint={"every_seconds": 1e9},
    )


def _heavy_job(steps: int, batch: int) -> Job:
    """Images through convolutions: much to compute, and little to push."""
    data = {"kind": "synthetic", "samples": 2048, "shape": [3, 32, 32], "classes": CLASSES, "held_out": 0}
    return Job(
        name="straggler",
        model="cifar_cnn",
        data=data,
        loss="cross_entropy",
        optimizer={"name": "sgd", "lr": 0.01},
        global_batch=batch,
        stop={"steps": steps},
        evaluate={"every_epochs": 10**6},
        checkpoint={"every_seconds": 1e9},
    )


def _digits(seed: int) -> Job:
    return Job(
        name="stale",
        model={"zoo": "mlp", "args": {"hidden": 64}},
        data="digits",
        loss="cross_entropy",
        optimizer={"name": "sgd", "lr": 0.02, "momentum": 0.5},
        global_batch=64,
        seed=seed,
        stop={"epochs": 25},
        evaluate={"every_epochs": 10**6},
        checkpoint={"every_seconds": 1e9},
    )


def _steps_per_s(run: Any) -> float:
    """Batches a second, by the clock, without the first ones and what is behind the last."""
    steps = list(run.steps())[2 * WARM_UP :]
    return (len(steps) - 1) / float(sum(step["step_s"] for step in steps[1:]))


def _samples_to(run: Any, target: float) -> float:
    """Samples until the mean loss of 10 steps is below the target.

    Raises:
        SystemExit: it never was.
    """
    steps, losses = list(run.steps()), run.losses
    for i in range(10, len(losses)):
        if statistics.mean(losses[i - 10 : i]) < target:
            return float(sum(step["samples"] for step in steps[:i]))
    raise SystemExit(f"{run.path}: the loss was never below {target}; last {losses[-1]:.3f}")


@contextmanager
def _peer(python: str | None) -> Iterator[subprocess.Popen[str] | None]:
    """TensorFlow's coordinator, ready; None without a Python for it."""
    if python is None:
        yield None
        return
    script = str(Path(__file__).with_name("server_tensorflow.py"))
    command = [python, script, *map(str, (WORKERS, FEATURES, HIDDEN, CLASSES, BATCH))]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    errors = None if "PACELINE_VERBOSE" in os.environ else subprocess.DEVNULL
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=variables
    ) as process:
        try:
            _line(process)
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()  # it ends its servers
            process.wait(30)


def _asked(peer: subprocess.Popen[str], updates: int) -> dict[str, float]:
    assert peer.stdin is not None
    peer.stdin.write(f"{updates}\n")
    peer.stdin.flush()
    return _line(peer)


def _line(peer: subprocess.Popen[str]) -> dict[str, Any]:
    assert peer.stdout is not None
    line = peer.stdout.readline()
    if not line:
        raise SystemExit("TensorFlow's coordinator ended; PACELINE_VERBOSE=1 shows why")
    answer: dict[str, Any] = json.loads(line)
    return answer


def _show(what: str, values: Sequence[float]) -> None:
    print(f"{what:50} {statistics.median(values):8.2f}   {min(values):.2f} to {max(values):.2f}", flush=True)


if __name__ == "__main__":
    main()
