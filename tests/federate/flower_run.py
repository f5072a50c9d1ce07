"""A Flower simulation of an exported app, by the interpreter of an environment with Flower.

    flower_run.py FOLDER NODES [average ROUNDS]

With `average`, the clients of the app are asked by Flower's own FedAvg instead of the app's server.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any


def main(folder: str, nodes: str, *average: str) -> None:
    sys.path.insert(0, folder)
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    clients = importlib.import_module("federated_job.client_app").app
    server = ServerApp() if average else importlib.import_module("federated_job.server_app").app
    if average:
        server.main()(lambda grid, context: averaged(folder, grid, int(nodes), int(average[1])))
    backend: Any = {"init_args": {"num_cpus": 2}, "client_resources": {"num_cpus": 2, "num_gpus": 0.0}}
    run_simulation(server, clients, num_supernodes=int(nodes), backend_config=backend)


def averaged(folder: str, grid: Any, nodes: int, rounds: int) -> None:
    """Train by Flower's FedAvg, as a script of its users does."""
    from flwr.app import ArrayRecord
    from flwr.serverapp.strategy import FedAvg
    from safetensors.torch import save_file

    from paceline.job.job import Job
    from paceline_federated.client import first_model

    model = first_model(Job.load(f"{folder}/federated_job/job.yaml"))
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=rounds)
    save_file(result.arrays.to_torch_state_dict(), "final_model.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
