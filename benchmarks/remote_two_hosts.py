"""A model over two emulated hosts: remote modules beside pipeline parallel. A part of `remote.py`; needs root.

    remote_two_hosts.py [--json] [--rounds 3] [--steps 60]

- `remote_to_pipeline`: median step of `paceline train --plan "pp=2 microbatches=4"` / of a loop with the first half of
  the same model on one host and the second half, with its loss, as a remote module on the other. Both go over TCP with
  the run's key, with four microbatches, one thread a host, and SGD.

Both in turn; their losses are compared before their times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import paceline_server as remote
from measure import environment_line, parser_of, print_figures
from paceline.cluster.emulate import Emulation
from paceline.cluster.host import Emulate
from paceline.elastic.forkserver import ALLOCATOR
from paceline.stats import Interval, median_interval
from paceline.wire.key import RunKey, read_key, write_key

FILE = Path(__file__).resolve()
INPUTS, WIDTH, LAYERS, CLASSES, BATCH, MICROBATCHES, LR, SEED = 64, 512, 8, 10, 512, 4, 0.05, 3
WARM_UP, PORT = 10, 7000


def whole() -> nn.Sequential:
    """The model."""
    layers: list[nn.Module] = [nn.Linear(INPUTS, WIDTH)]
    for _ in range(LAYERS - 2):
        layers += [nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(WIDTH, CLASSES))


class Second(nn.Module):
    """The second half of the model, and the loss of a microbatch as its part of the batch's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = whole()[LAYERS:]

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.layers(hidden), labels) / MICROBATCHES


class OneBatch(Dataset[tuple[Tensor, Tensor]]):
    """As many samples as a global batch has, so that every step is on all of them, in whatever order."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self.inputs = torch.randn(BATCH, INPUTS, generator=generator)
        self.labels = torch.randint(0, CLASSES, (BATCH,), generator=generator)

    def __len__(self) -> int:
        return BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.labels[index]


def main() -> None:
    """Measure, or be the loop with the remote module."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of each (default: 3)")
    parser.add_argument("--steps", type=int, default=60, help="of a round (default: 60)")
    parser.add_argument("--loop", nargs=2, metavar=("ADDRESS", "KEY"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.loop:
        where, key = asked.loop
        print(json.dumps(loop(where, key, asked.steps)))
        return
    figures = measured(asked.rounds, asked.steps)
    print(environment_line())
    if asked.json:
        print_figures(figures)


def measured(rounds: int = 3, steps: int = 60) -> dict[str, float]:
    """The figures by name, printed as well."""
    found: dict[str, list[float]] = {"pipeline": [], "remote": []}
    with tempfile.TemporaryDirectory(prefix="paceline-two-hosts-") as folder:
        for number in range(rounds):
            by_pipeline = pipeline(Path(folder) / str(number), steps)
            by_remote = remote_modules(Path(folder) / f"{number}.key", steps)
            must_agree(by_pipeline[0], by_remote[0])
            for name, (_, step_s) in (("pipeline", by_pipeline), ("remote", by_remote)):
                found[name].append(statistics.median(step_s[WARM_UP:]))
    over: Interval = median_interval([a / b for a, b in zip(found["pipeline"], found["remote"], strict=True)])
    print("a model over two emulated hosts: milliseconds a step")
    for name, medians in found.items():
        print(f"  {name:10} {1000 * statistics.median(medians):9.3f}")
    print(f"  pipeline / remote {over}")
    milliseconds = {f"{name}_step_ms": round(1000 * statistics.median(m), 3) for name, m in found.items()}
    return milliseconds | {"remote_to_pipeline": round(over.middle, 3)}


def must_agree(ours: Sequence[float], others: Sequence[float]) -> None:
    """Exit where the losses are not those of the same training."""
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours, others, strict=True))
    if worst > 1e-3:
        sys.exit(f"the losses differ by {worst:.2%}: {ours[:3]} … and {others[:3]} …")


def pipeline(folder: Path, steps: int) -> tuple[list[float], list[float]]:
    """Losses and seconds of each step of a pipeline of two stages."""
    folder.mkdir()
    job: dict[str, Any] = {
        "name": "two_hosts",
        "model": {"factory": f"{FILE}:whole"},
        "data": {"kind": "dataset", "factory": f"{FILE}:OneBatch", "held_out": 0.0},
        "loss": "cross_entropy",
        "optimizer": {"name": "sgd", "lr": LR},
        "global_batch": BATCH,
        "seed": SEED,
        "stop": {"steps": steps},
        "checkpoint": {"every_seconds": 3600},
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    (folder / "cluster.yaml").write_text(json.dumps({"emulate": {"hosts": 2}}))
    plan = f"pp=2 microbatches={MICROBATCHES} threads=1 balance=off"
    command = [sys.executable, "-m", "paceline", "train", folder / "job.yaml", "--plan", plan]
    command += ["--cluster", folder / "cluster.yaml", "--run", folder / "run"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    if done.returncode:
        sys.exit(f"the pipeline failed:\n{done.stderr}")
    lines = list(map(json.loads, (folder / "run" / "steps" / "rank-0.jsonl").read_text().splitlines()))
    return [line["loss"] for line in lines], [line["step_s"] for line in lines]


def remote_modules(key: Path, steps: int) -> tuple[list[float], list[float]]:
    """The same of a loop on one host, whose model goes on on the other."""
    write_key(RunKey.make(), key)
    # the allocator settings of the pipeline's ranks
    environ = os.environ | ALLOCATOR | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(FILE.parent)}
    with Emulation(Emulate(hosts=2)) as emulation, ExitStack() as held:
        first, second = emulation.hosts
        where = f"{second.address}:{PORT}"
        serve = ["-m", "paceline", "serve", f"{FILE}:Second", "--listen", where, "--key", str(key)]
        command = ["nsenter", f"--net={second.namespace}", sys.executable, *serve]
        server = held.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ))
        held.callback(server.terminate)
        assert server.stdout is not None
        server.stdout.readline()  # it serves
        run = [sys.executable, str(FILE), "--loop", where, str(key), "--steps", str(steps)]
        command = ["nsenter", f"--net={first.namespace}", *run]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environ, timeout=300)
    if done.returncode:
        sys.exit("the loop with remote modules failed")
    losses, step_s = json.loads(done.stdout)
    return losses, step_s


def loop(where: str, key: str, steps: int) -> tuple[list[float], list[float]]:
    """Train with the second half of the model elsewhere."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    here = whole()[:LAYERS]
    data = OneBatch()
    parts = list(zip(data.inputs.chunk(MICROBATCHES), data.labels.chunk(MICROBATCHES), strict=True))
    losses, step_s = [], []
    with remote.connect("second", where, read_key(Path(key))):
        there = remote.module("second", f"{FILE}:Second", seed=SEED)
        own, other = torch.optim.SGD(here.parameters(), lr=LR), remote.optimizer(there, "sgd", lr=LR)

        def step(part: tuple[Tensor, Tensor]) -> float:
            loss: Tensor = there(here(part[0]), part[1])
            loss.backward()
            return loss.item()

        for _ in range(steps):
            begin = time.perf_counter()
            own.zero_grad()
            losses.append(sum(remote.microbatches(step, parts)))
            own.step()
            other.step()
            step_s.append(time.perf_counter() - begin)
    return losses, step_s


if __name__ == "__main__":
    main()
