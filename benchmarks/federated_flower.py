"""Flower's simulation of the job of `federated.py`, with clients in NumPy, which cost it less than any library.

    PYTHON benchmarks/federated_flower.py FOLDER    (started by `federated.py --flower PYTHON`)

`FOLDER/job.npz` has the first weights, every client's samples, and the order in which it reads them in each round. The
weights after the last round, and the time at the end of each round, go to `FOLDER/flower.npz`.
"""

from __future__ import annotations

import os
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def trained(weights: list[Floats], inputs: Floats, labels: NDArray[np.int64], batch: int, lr: float) -> list[Floats]:
    """One epoch of SGD on two layers with ReLU and cross-entropy, over samples in the order of the arrays."""
    w1, b1, w2, b2 = (weight.copy() for weight in weights)
    for start in range(0, len(labels), batch):
        x, y = inputs[start : start + batch], labels[start : start + batch]
        hidden = np.maximum(x @ w1.T + b1, 0)
        logits = hidden @ w2.T + b2
        logits -= logits.max(axis=1, keepdims=True)
        slope = np.exp(logits)
        slope /= slope.sum(axis=1, keepdims=True)
        slope[np.arange(len(y)), y] -= 1
        slope /= len(y)
        back = (slope @ w2) * (hidden > 0)
        w2 -= lr * (slope.T @ hidden)
        b2 -= lr * slope.sum(axis=0)
        w1 -= lr * (back.T @ x)
        b1 -= lr * back.sum(axis=0)
    return [w1, b1, w2, b2]


@cache
def job_in(folder: str) -> dict[str, NDArray[Any]]:
    """The arrays of the job, read once in each process."""
    with np.load(Path(folder) / "job.npz") as held:
        return {name: held[name] for name in held.files}


def main(folder: str) -> None:
    """Run all rounds."""
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    job = job_in(folder)
    clients, rounds = len(job["counts"]), len(job["orders"])
    ends: list[float] = []
    client_app, server_app = ClientApp(), ServerApp()

    def train(message: Message, context: Context) -> Message:
        mine, number = job_in(folder), int(context.node_config["partition-id"])
        of_round = int(message.content["config"]["server-round"]) - 1
        order = mine["orders"][of_round, number, : mine["counts"][number]]
        weights = message.content["arrays"].to_numpy_ndarrays()
        found = trained(weights, mine["inputs"][order], mine["labels"][order], int(mine["batch"]), float(mine["lr"]))
        metrics = MetricRecord({"num-examples": int(mine["counts"][number])})
        return Message(RecordDict({"arrays": ArrayRecord(found), "metrics": metrics}), reply_to=message)

    def serve(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients
        )
        first = ArrayRecord([job[name] for name in ("w1", "b1", "w2", "b2")])

        def note(of_round: int, arrays: ArrayRecord) -> MetricRecord:
            ends.append(time.perf_counter())
            return MetricRecord({"round": of_round})

        result = strategy.start(
            grid=grid, initial_arrays=first, num_rounds=rounds, train_config=ConfigRecord({}), evaluate_fn=note
        )
        weights = result.arrays.to_numpy_ndarrays()
        np.savez(Path(folder) / "flower.npz", ends=ends, w1=weights[0], b1=weights[1], w2=weights[2], b2=weights[3])

    client_app.train()(train)
    server_app.main()(serve)
    cores = os.cpu_count() or 1
    backend = {"init_args": {"num_cpus": cores}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, num_supernodes=clients, backend_config=backend)


if __name__ == "__main__":
    import federated_flower  # Ray's workers find a module by its name, and not what a script defines

    federated_flower.main(sys.argv[1])
