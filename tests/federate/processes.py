"""A federated server and clients as processes, each client with a file of its own samples."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from commands import DEADLINE_S, Outcome, ended, paceline, started, wait_for
from paceline.job.job import Job
from paceline.run.checkpoint.reader import load_latest
from paceline.wire.key import RunKey, write_key
from paceline_federated.client import LocalTraining, first_model
from paceline_federated.section import federate_spec
from paceline_federated.simulation.deal import deal

CLIENTS = 4
_LISTENING = re.compile(r"listen(?:s|ing) at ([\d.]+:\d+)")


def write_federated_job(folder: Path, steps: int = 3, **federate: Any) -> Path:
    """A small job of four clients in fp64, so that sums in another order agree; and the clients' data, and a key."""
    job: dict[str, Any] = {
        "name": "federated",
        "model": {"zoo": "mlp", "args": {"hidden": 8}},
        "data": {"kind": "synthetic", "samples": 96, "held_out": 0},
        "loss": "cross_entropy",
        "optimizer": {"name": "sgd", "lr": 0.1},
        "global_batch": 8,
        "precision": "fp64",
        "stop": {"steps": steps},
        "federate": {"clients": CLIENTS, "deadline_s": DEADLINE_S, **federate},
    }
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(job, sort_keys=False))
    what = Job.load(file)
    train = what.data.build(input_shape=what.model.input_shape(), seed=what.seed).train
    parts = deal(train, federate_spec(what).partition, federate_spec(what).clients, what.seed)
    for number in range(federate_spec(what).clients):
        inputs, targets = zip(*(train[int(row)] for row in parts[number]), strict=True)
        np.savez(folder / f"{number}.npz", x=torch.stack(inputs).numpy(), y=np.array([int(t) for t in targets]))
    if not (folder / "key").exists():
        write_key(RunKey.make(), folder / "key")
    return file


class Processes:
    """Processes of one federation, in one folder."""

    def __init__(self, folder: Path, held: ExitStack) -> None:
        self.folder, self._held = folder, held
        self.environment = {"PACELINE_KEY_FILE": str(folder / "key"), "PACELINE_HOME": str(folder / "home")}
        self._files = 0

    def start(self, *words: object) -> tuple[subprocess.Popen[str], Path]:
        """A command `paceline federate …` under way, and the file with its screen."""
        self._files += 1
        screen = self.folder / f"screen-{self._files}"
        file = self._held.enter_context(screen.open("w"))
        started_ = started(
            "paceline", "federate", *words, folder=self.folder, screen=file.fileno(), environment=self.environment
        )
        return self._held.enter_context(started_), screen

    def serve(self, *options: object, listen: str = "127.0.0.1:0") -> tuple[subprocess.Popen[str], str, Path]:
        """The server under way, its address, and its screen."""
        server, screen = self.start("serve", "job.yaml", "--run", "run", "--listen", listen, *options)
        return server, address_on(screen, server), screen

    def join(self, address: str, number: int, *options: object) -> tuple[subprocess.Popen[str], Path]:
        """A client under way, and its screen."""
        return self.start(
            "join", address, "--data", f"{number}.npz", "--name", f"client-{number}", "--number", number, *options
        )

    def weights(self) -> Tensor:
        """The server's weights in the newest checkpoint."""
        return weights_of(self.folder / "run", Job.load(self.folder / "job.yaml"))

    def simulated(self) -> Tensor:
        """Weights of a simulation of the same job."""
        outcome = paceline("federate", "simulate", "job.yaml", "--run", "simulated", folder=self.folder)
        assert outcome.code == 0, outcome.err
        return weights_of(self.folder / "simulated", Job.load(self.folder / "job.yaml"))


@contextmanager
def federation(folder: Path) -> Iterator[Processes]:
    """Processes that have all ended when the test has."""
    with ExitStack() as held:
        yield Processes(folder, held)


def address_on(screen: Path, process: subprocess.Popen[str]) -> str:
    """The address that a process says it listens at."""
    wait_for(lambda: _LISTENING.search(screen.read_text()), process)
    found = _LISTENING.search(screen.read_text())
    assert found is not None
    return found[1]


def end(processes: Sequence[tuple[subprocess.Popen[str], Path]]) -> list[Outcome]:
    """Wait for the end of processes; all have to end well."""
    outcomes = []
    for process, screen in processes:
        code = ended(process).code
        outcomes.append(Outcome(code, screen.read_text(), ""))
        assert code == 0, screen.read_text()
    return outcomes


def weights_of(run: Path, job: Job) -> Tensor:
    """The weights in a run's newest checkpoint, flat."""
    loaded = load_latest(run / "checkpoints", rank=0, world=1, report=lambda *_: None)
    assert loaded is not None
    training = LocalTraining(job, first_model(job))
    with torch.no_grad():
        for name, parameter in training.model.named_parameters():
            loaded.shared.fill(f"model/{name}", parameter)
    return training.layout.flatten(training.model)
