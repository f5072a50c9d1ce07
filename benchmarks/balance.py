"""Shares of the batch that follow the speed of a host that is slowed and released.

    python benchmarks/balance.py [--json] [--cases gpt,cnn,gpt_fsdp,pipeline] [--rounds N]

Needs root: four hosts are emulated on this machine, whose control groups allow each the same part of a core, and the
last one half of that. Figures, of each case (`gpt_`, `cnn_`, and `gpt_fsdp_`, whose replicas are two ranks that shard
the model):
- `share_of_sum_of_speeds`: samples per second of the four replicas together, once the shares have settled / the sum of
  those of the hosts when each trains for itself on a quarter of the batch, all at one time, as they are one machine:
  the mean of that before the runs and after them. The table has both, which tell how far the machine drifted.
- `even_share_of_sum_of_speeds`: the same with even shares (`balance=off`), as DDP deals them.
- `share_in_step`, `even_share_in_step`: samples per second / the sum of the ranks' speeds in the same step, the median
  of the steps. A rank's speed is its samples / the time in which it neither communicates nor waits, so drift of the
  machine does not count, and nor does what training together costs while computing.
- `even_again_steps`: from the step in which the slow host got its full speed back to the first one of even shares;
  `nearly_even_again_steps`: to the first in which that host's share is even to a tenth.
- `loss_difference`: largest relative difference of the losses to those of even shares, over as many steps as these were
  dealt.
- of `pipeline_`, a GPT in two stages on two hosts, the last one of which has half the cores: `speedup_of_recut` (step
  time with `balance=off` / that once the stages have moved), `share_of_sum_of_speeds` and
  `even_share_of_sum_of_speeds` (as above, of two hosts and the whole batch), `recut_step` (the step after which they
  moved), `recut_s` (what that cost), and `loss_difference`.
- `balance_cost`: on four equal hosts, step time with `balance=auto` / with `balance=off`, the median over rounds that
  take turns, with its 95 % interval in the table.

Every run is the command `paceline train` with its record; times are medians over the steps named. Figures of a busy
machine say little.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import environment_line, parser_of, print_figures
from paceline.cluster.cgroup import PREFIX, make_group, place_of_group
from paceline.run.record.goodput import goodput
from paceline.run.record.run import Run
from paceline.stats import Interval, median_interval

BIN = Path(sys.executable).parent
HOSTS, FULL, HALF = 4, 0.45, 0.225  # cores of a host: some are left for the commands themselves
ALONE_STEPS, RELEASED_STEPS, PIPELINE_SETTLED = 12, 25, 30
EQUAL_STEPS, WARM_UP, ROUNDS = 20, 5, 5
EVEN_STEPS = 30  # which losses are compared in, the shares having moved for a third of them
NEARLY = 0.1  # of an even share
PIPELINE_STEPS = 250  # enough for another cut to be worth it
DEADLINE_S = 1800.0
BASE = {
    "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
    "loss": "cross_entropy",
    "evaluate": {"every_steps": 10**6},  # once, at the end
}
GPT = {
    "model": {"zoo": "gpt", "args": {"layers": 3, "hidden": 128, "heads": 4, "context": 128}},
    "data": {"kind": "text", "path": "{stdlib}/pydoc_data", "context": 128},
}
CNN = {"model": "cifar_cnn", "data": {"kind": "synthetic", "samples": 32768, "shape": [3, 32, 32], "classes": 10}}


@dataclass(frozen=True)
class Case:
    """One model under one plan; `inside` is how a replica is split."""

    job: dict[str, Any]
    inside: str = ""
    ranks: int = 1  # of a replica
    batch: int = 256  # long steps beside the sum of the gradients
    settled_step: int = 45
    slow_steps: int = 70


CASES = {
    "gpt": Case(GPT),
    "cnn": Case(CNN, batch=2048, settled_step=90, slow_steps=140),
    "gpt_fsdp": Case(GPT, " fsdp=2", 2),
}
PIPELINE = "pipeline"
STAGES = Case(GPT | {"model": {"zoo": "gpt", "args": {"layers": 8, "hidden": 128, "heads": 4, "context": 128}}})


@dataclass(frozen=True)
class Found:
    """Measurements of a case; speeds in samples per second."""

    alone: list[list[float]]  # of each host, training for itself beside the others: before the run and after it
    settled: float
    even: float
    share_in_step: float
    even_share_in_step: float
    even_again_steps: int | None
    nearly_even_again_steps: int | None
    loss_difference: float
    cost: Interval

    def figures(self) -> dict[str, float | None]:
        """The figures by name."""
        sum_of_speeds = statistics.fmean(map(sum, self.alone))
        return {
            "share_of_sum_of_speeds": self.settled / sum_of_speeds,
            "even_share_of_sum_of_speeds": self.even / sum_of_speeds,
            "share_in_step": self.share_in_step,
            "even_share_in_step": self.even_share_in_step,
            "even_again_steps": self.even_again_steps,
            "nearly_even_again_steps": self.nearly_even_again_steps,
            "loss_difference": self.loss_difference,
            "balance_cost": self.cost.middle,
        }


def main() -> None:
    """Measure, print the tables, and with --json a last line for machines."""
    parser = parser_of(__doc__)
    cases = ",".join([*CASES, PIPELINE])
    parser.add_argument("--cases", default=cases, help=f"of {cases} (default: all)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of equal hosts (default {ROUNDS})")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    figures: dict[str, float | None] = {}
    for name in arguments.cases.split(","):
        if name == PIPELINE:
            figures |= {f"{name}_{figure}": value for figure, value in of_pipeline().items()}
            continue
        found = measured(CASES[name], arguments.rounds)
        print("\n".join(lines_of(name, found)), flush=True)
        figures |= {f"{name}_{figure}": value for figure, value in found.figures().items()}
    print(environment_line())
    if arguments.json:
        print_figures(figures)


def measured(case: Case, rounds: int) -> Found:
    """All runs of a case."""
    with tempfile.TemporaryDirectory(prefix="paceline-balance-") as folder:
        run = Runs(case, Path(folder))
        uneven = [FULL] * (HOSTS - 1) + [HALF]
        before = run.alone(uneven)
        followed = run.trained("auto", uneven, case.slow_steps + RELEASED_STEPS, released=True)
        even = run.trained("off", uneven, EVEN_STEPS)
        after = run.alone(uneven)
        ratios = []
        for number in range(rounds):
            times = {
                how: run.trained(how, [FULL] * HOSTS, EQUAL_STEPS).step_s(WARM_UP, EQUAL_STEPS)
                for how in (("auto", "off") if number % 2 else ("off", "auto"))
            }
            ratios.append(times["auto"] / times["off"])
        return Found(
            [before, after],
            followed.batch / followed.step_s(case.settled_step, case.slow_steps),
            even.batch / even.step_s(WARM_UP, EVEN_STEPS),
            followed.share_in_step(case.settled_step, case.slow_steps),
            even.share_in_step(WARM_UP, EVEN_STEPS),
            followed.steps_until(lambda shares: max(shares) - min(shares) <= 1),
            followed.steps_until(lambda shares: abs(shares[-1] / statistics.fmean(shares) - 1) <= NEARLY),
            max(abs(a - b) / abs(b) for a, b in zip(followed.losses, even.losses, strict=False)),
            median_interval(ratios or [1.0]),
        )


def of_pipeline() -> dict[str, float | None]:
    """Figures of a pipeline whose last stage is on a slow host; printed, too."""
    with tempfile.TemporaryDirectory(prefix="paceline-balance-") as folder:
        run = Runs(STAGES, Path(folder))
        alone = [run.trained_as("dp=1", [cores], ALONE_STEPS, microbatches=1) for cores in (FULL, HALF)]
        cut = run.trained_as("pp=2 balance=auto", [FULL, HALF], PIPELINE_STEPS)
        even = run.trained_as("pp=2 balance=off", [FULL, HALF], PIPELINE_STEPS)
        recuts = [event for event in cut.events if event["event"] == "recut"]
        last = PIPELINE_STEPS
        cut_s, even_s = cut.step_s(PIPELINE_SETTLED, last), even.step_s(WARM_UP, last)
        speeds = [one.batch / one.step_s(WARM_UP, ALONE_STEPS) for one in alone]
        found = {
            "speedup_of_recut": even_s / cut_s,
            "share_of_sum_of_speeds": cut.batch / cut_s / sum(speeds),
            "even_share_of_sum_of_speeds": even.batch / even_s / sum(speeds),
            "recut_step": recuts[-1]["step"] if recuts else None,
            "recut_s": cut.recut_s,
            "loss_difference": max(abs(a - b) / abs(b) for a, b in zip(cut.losses, even.losses, strict=True)),
        }
    print(f"{PIPELINE}: hosts alone at full and half speed {speeds[0]:.1f} and {speeds[1]:.1f} samples/s")
    print(*(f"  stages begin at {e['cut']} instead of {e['cut_before']}" for e in recuts), sep="\n")
    print(*(f"  {name:28} {'not' if value is None else f'{value:.4g}'}" for name, value in found.items()), sep="\n")
    return found


def lines_of(name: str, found: Found) -> Iterator[str]:
    """A case for people."""
    alone = "; ".join(", ".join(f"{speed:.1f}" for speed in speeds) for speeds in found.alone)
    yield f"{name}: hosts for themselves, before and after: {alone} samples/s; together {found.settled:.1f}"
    for figure, value in found.figures().items():
        yield f"  {figure:28} {'not within the run' if value is None else f'{value:.4g}'}"
    yield f"  balance_cost, 95 % interval  {found.cost.low:.4f} to {found.cost.high:.4f}"


@dataclass(frozen=True)
class Trained:
    """The record of a run."""

    steps: list[list[dict[str, Any]]]  # of each rank
    released_at: int | None
    events: list[dict[str, Any]]
    recut_s: float

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return int(self.steps[0][0]["samples"])

    @property
    def losses(self) -> list[float]:
        """The loss of every step."""
        return [step["loss"] for step in self.steps[0]]

    def step_s(self, first: int, last: int) -> float:
        """Median time of a step after `first`, up to `last`."""
        times = [step["step_s"] for step in self.steps[0] if first < step["step"] <= last]
        return float(statistics.median(times))

    def share_in_step(self, first: int, last: int) -> float:
        """Samples per second / the sum of the ranks' speeds, the median of the steps after `first`, up to `last`."""
        shares = []
        for ranks in zip(*self.steps, strict=False):
            if first < ranks[0]["step"] <= last:
                speeds = [
                    rank["local_samples"] / (rank["step_s"] - rank["comm_s"] - rank["imbalance_s"]) for rank in ranks
                ]
                shares.append(ranks[0]["samples"] / ranks[0]["step_s"] / sum(speeds))
        return float(statistics.median(shares))

    def time_of(self, step: int) -> float:
        """When a step ended; -1 for the last."""
        return float(self.steps[0][step]["time"])

    def step_s_between(self, first: float, last: float) -> float:
        """Median time of the steps that ended between two times."""
        return float(statistics.median(step["step_s"] for step in self.steps[0] if first < step["time"] <= last))

    def steps_until(self, are_even: Callable[[list[int]], bool]) -> int | None:
        """Steps from the release to the first one with such samples of the ranks; None if it did not come."""
        assert self.released_at is not None
        for ranks in zip(*self.steps, strict=False):
            if ranks[0]["step"] > self.released_at and are_even([rank["local_samples"] for rank in ranks]):
                return int(ranks[0]["step"]) - self.released_at
        return None


class Runs:
    """Trainings of one case, each the command in a directory of its own."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder

    def alone(self, cores: list[float]) -> list[float]:
        """Samples per second of each host with its part of the batch, while all train."""
        batch = self.case.batch // len(cores)

        def trained(own: float) -> Trained:
            # the slow ones end last, and begin last
            steps = round(ALONE_STEPS * own / min(cores)) + WARM_UP
            return self._run(batch, f"dp=1{self.case.inside}", [own], steps, None)

        with ThreadPoolExecutor(len(cores)) as pool:
            runs = list(pool.map(trained, cores))
        first = max(run.time_of(WARM_UP) for run in runs)
        last = min(run.time_of(-1) for run in runs)
        return [run.batch / run.step_s_between(first, last) for run in runs]

    def trained(self, balance: str, cores: list[float], steps: int, *, released: bool = False) -> Trained:
        """A training on all hosts; `released`: the last one gets its full speed after `slow_steps`."""
        plan = f"dp={HOSTS}{self.case.inside} balance={balance}"
        return self._run(self.case.batch, plan, cores, steps, self.case.slow_steps if released else None)

    def trained_as(self, plan: str, cores: list[float], steps: int, microbatches: int = 4) -> Trained:
        """A training by a plan with a small batch, and a rank on each host."""
        return self._run(8, f"{plan} microbatches={microbatches}", cores, steps, None)

    def _run(self, batch: int, plan: str, cores: list[float], steps: int, release: int | None) -> Trained:
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        job = {"name": "balance", "global_batch": batch, **BASE, **self.case.job, "stop": {"steps": steps}}
        (folder / "job.yaml").write_text(json.dumps(job))
        (folder / "cluster.yaml").write_text(json.dumps({"emulate": {"hosts": len(cores), "cpu": cores}}))
        cluster, run = folder / "cluster.yaml", folder / "run"
        options = ["--plan", f"{plan} threads=1", "--cluster", str(cluster), "--run", str(run)]
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                [BIN / "paceline", "train", str(folder / "job.yaml"), *options], stdout=output, stderr=output
            )
        released_at = None
        try:
            if release is not None:
                file = folder / "run" / "steps" / "rank-0.jsonl"
                _wait_for(lambda: _lines(file) >= release, process, folder)
                _set_cores(process.pid, len(cores) - 1, FULL)
                released_at = _lines(file)
            _wait_for(lambda: process.poll() is not None, process, folder)
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            sys.exit(f"the training with plan {plan} failed:\n{(folder / 'output').read_text()}")
        ranks = len(cores) * self.case.ranks
        lines = [_steps(run / "steps" / f"rank-{rank}.jsonl") for rank in range(ranks)]
        return Trained(lines, released_at, Run(run).events(), goodput(Run(run)).parts_s["recut"])


def _wait_for(come: Callable[[], bool], process: subprocess.Popen[bytes], folder: Path) -> None:
    until = time.monotonic() + DEADLINE_S
    while not come() and process.poll() is None:
        if time.monotonic() > until:
            sys.exit(f"a training did not end within {DEADLINE_S:g} s:\n{(folder / 'output').read_text()}")
        time.sleep(0.05)


def _set_cores(launcher: int, host: int, cores: float) -> None:
    """Give an emulated host of that launcher other cores while it runs."""
    [group] = place_of_group(PREFIX).parent.glob(f"{PREFIX}{launcher}-*-{host}")
    make_group(group, cores)


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _steps(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


if __name__ == "__main__":
    main()
