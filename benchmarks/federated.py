"""Rounds a second of simulated federated training against Flower's, and ten thousand clients.

    python benchmarks/federated.py [--flower PYTHON] [--json] [--repeats N] [--clients 10,100]

Figures:
- `rounds_to_flower_10`, `rounds_to_flower_100`: rounds a second with so many clients / Flower's with as many; all take
  part in each round, one epoch each. Model (64-32-10), data (digits), weights, division and order of samples are the
  same, and so are the weights after the last of Flower's rounds, to rounding, which is checked first. `--flower` is the
  interpreter of an environment with `flwr[simulation]`; without it these are left out.
- `rounds_10`, `rounds_100`: our rounds a second, by the clock, with the record.
- `in_turn_10`: the same as `rounds_10` / clients one by one, in the same process.
- `round_10000_s`, `memory_10000_gib`: seconds of a round of 100 of 10,000 clients with 50 samples each, the median, and
  the process's peak resident memory.

Ours and Flower's run in turn, `--repeats` times; each ratio is of neighbours, and the median is shown with its 95 %
interval. Of Flower's rounds the first is left out, which starts its processes; of ours the first ten.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from measure import environment_line, parser_of
from paceline.job.job import Job
from paceline.run.convert import export
from paceline.run.record.run import Run
from paceline.stats import median_interval
from paceline_federated.client import order
from paceline_federated.simulation import Simulation, simulate

FLOWER = Path(__file__).with_name("federated_flower.py").resolve()
NAMES = {"w1": "first.weight", "b1": "first.bias", "w2": "second.weight", "b2": "second.bias"}
FLOWER_ROUNDS = {10: 30, 100: 8}
OUR_ROUNDS, WARM_UP, IN_TURN_ROUNDS = 300, 10, 40
LR, BATCH = 0.1, 32
MANY, A_ROUND, SAMPLES_EACH, MANY_ROUNDS = 10_000, 100, 50, 30


class Small(nn.Module):
    """64-32-10 with ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images or vectors of 64 numbers."""
        y: Tensor = self.second(torch.relu(self.first(x.flatten(1))))
        return y


def network() -> nn.Module:
    """The model, by import path."""
    return Small()


def main() -> None:
    """Measure, print the table, and with --json a last line for machines."""
    parser = parser_of(__doc__)
    parser.add_argument("--flower", metavar="PYTHON", help="interpreter of an environment with flwr[simulation]")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--clients", default="10,100", help="numbers of clients to compare with (default 10,100)")
    parser.add_argument("--many", action="store_true", help=argparse.SUPPRESS)  # the process that has 10,000 clients
    arguments = parser.parse_args()
    if arguments.many:
        print(json.dumps(many()))
        return
    figures: dict[str, float] = {}
    for clients in map(int, arguments.clients.split(",")):
        figures |= compared(clients, arguments.flower, arguments.repeats)
    figures |= in_turn() | measured_apart()
    print(environment_line())
    if arguments.json:
        print(json.dumps({"figures": figures, "environment": {"machine": environment_line()}}))


def job(clients: int, rounds: int, **changes: Any) -> Job:
    """The job of the comparison."""
    values: dict[str, Any] = {
        "name": "federated",
        "model": {"factory": f"{Path(__file__).resolve()}:network"},
        "data": {"kind": "digits", "shape": [1, 8, 8]},
        "loss": "cross_entropy",
        "metrics": ["accuracy"],
        "optimizer": {"name": "sgd", "lr": LR},
        "global_batch": BATCH,
        "stop": {"steps": rounds},
        "federate": {"clients": clients},
    }
    return Job(**(values | changes))


def compared(clients: int, flower: str | None, repeats: int) -> dict[str, float]:
    """Our rounds a second, and how many times as many they are as Flower's."""
    ours, ratios = [], []
    for _ in range(repeats):
        ours.append(our_rounds(clients))
        if flower is not None:
            theirs = flower_rounds(flower, clients)
            ratios.append(ours[-1] / theirs)
            print(f"{clients} clients: {ours[-1]:.1f} rounds/s, Flower {theirs:.2f}", flush=True)
    print(f"{clients} clients: {median_interval(ours)} rounds/s", flush=True)
    figures = {f"rounds_{clients}": median_interval(ours).middle}
    if ratios:
        print(f"{clients} clients: {median_interval(ratios)} times Flower's rounds a second", flush=True)
        figures[f"rounds_to_flower_{clients}"] = median_interval(ratios).middle
    return figures


def our_rounds(clients: int, *, batched: bool = True, rounds: int = OUR_ROUNDS) -> float:
    """Rounds a second by the clock, warm-up left out."""
    with tempfile.TemporaryDirectory() as folder:
        run = simulate(job(clients, rounds + WARM_UP), Path(folder) / "run", batched=batched)
        times = [line["time"] for line in run.steps()][WARM_UP - 1 :]
        return float((len(times) - 1) / (times[-1] - times[0]))


def flower_rounds(python: str, clients: int) -> float:
    """Flower's rounds a second, the first round left out; its weights have to be ours."""
    rounds = FLOWER_ROUNDS.get(clients, 8)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written(folder, Simulation(job(clients, rounds)), rounds)
        own = {"PYTHONPATH": str(FLOWER.parent)}  # for Ray's workers
        command = [python, str(FLOWER), name]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=os.environ | own)
        if not (folder / "flower.npz").exists():
            sys.exit(f"Flower failed (exit code {ended.returncode}):\n{ended.stderr[-3000:]}")
        with np.load(folder / "flower.npz") as found:
            ends, theirs = found["ends"], {name: found[name] for name in NAMES}
        run = simulate(job(clients, rounds), folder / "run")
        must_agree(weights_of(run, folder), theirs)
        return float((len(ends) - 2) / (ends[-1] - ends[1]))  # it notes the weights before the first round, too


def written(folder: Path, simulation: Simulation, rounds: int) -> None:
    """Write the job as arrays for Flower."""
    samples = simulation.deal.samples
    orders = np.zeros((rounds, len(samples), samples.max()), np.int64)
    for number in range(rounds):
        for client, count in enumerate(samples):
            mine = order(simulation.job.seed, client, number + 1, 0, int(count))
            orders[number, client, :count] = simulation.deal[client][mine]
    whole = [simulation.data.train[index] for index in range(len(simulation.data.train))]  # type: ignore[arg-type]
    inputs = torch.stack([sample[0] for sample in whole]).flatten(1).numpy()
    labels = torch.stack([sample[1] for sample in whole]).numpy()
    held = dict(simulation.training.model.named_parameters())
    weights = {name: held[ours].detach().numpy() for name, ours in NAMES.items()}
    fixed = {"orders": orders, "counts": samples, "inputs": inputs, "labels": labels, "batch": BATCH, "lr": LR}
    arrays: dict[str, Any] = fixed | weights
    np.savez(folder / "job.npz", **arrays)


def weights_of(run: Run, folder: Path) -> dict[str, Tensor]:
    """A run's newest weights."""
    from safetensors.torch import load_file

    export(run.path, folder / "ours.safetensors")
    return load_file(folder / "ours.safetensors")


def must_agree(ours: dict[str, Tensor], theirs: dict[str, Any]) -> None:
    """End where the weights of the two simulations differ by more than rounding."""
    for name, our_name in NAMES.items():
        difference = float((ours[our_name] - torch.from_numpy(theirs[name])).abs().max())
        if not difference < 1e-3 * max(1.0, float(ours[our_name].abs().max())):
            sys.exit(f"the weights {our_name} differ by {difference:.2g}: the two do not train the same")


def in_turn() -> dict[str, float]:
    """Speed of clients side by side over one by one."""
    ratio = our_rounds(10) / our_rounds(10, batched=False, rounds=IN_TURN_ROUNDS)
    print(f"10 clients side by side: {ratio:.1f} times as fast as one by one")
    return {"in_turn_10": ratio}


def measured_apart() -> dict[str, float]:
    """The figures of ten thousand clients, from a process that has nothing else."""
    command = [sys.executable, str(Path(__file__).resolve()), "--many"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if ended.returncode:
        sys.exit(f"10,000 clients failed:\n{ended.stderr[-3000:]}")
    figures: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    print(f"10,000 clients, 100 a round: {figures['round_10000_s']:.3f} s, {figures['memory_10000_gib']:.2f} GiB")
    return figures


def many() -> dict[str, float]:
    """A round's time, and peak memory, with ten thousand clients that differ."""
    changes: dict[str, Any] = {
        "data": {"kind": "synthetic", "shape": [64], "samples": MANY * SAMPLES_EACH, "held_out": 0.001},
        "federate": {"clients": MANY, "per_round": A_ROUND, "partition": {"kind": "dirichlet", "alpha": 1.0}},
    }
    with tempfile.TemporaryDirectory() as folder:
        run = simulate(job(MANY, MANY_ROUNDS, **changes), Path(folder) / "run")
        times: Sequence[float] = [line["step_s"] for line in run.steps()]
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return {"round_10000_s": statistics.median(times), "memory_10000_gib": int(peak.split()[1]) / math.pow(2, 20)}


if __name__ == "__main__":
    main()
