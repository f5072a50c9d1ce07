"""What Flower's clients compute in the benchmark is what ours do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from federated import BATCH, LR, NAMES, job, must_agree, written
from federated_flower import trained
from paceline.job.samples import Selection
from paceline_federated.client import ClientState
from paceline_federated.simulation import Simulation


def test_a_client_in_numpy_gets_the_weights_of_ours(tmp_path: Path) -> None:
    simulation = Simulation(job(20, 2))
    written(tmp_path, simulation, 2)
    with np.load(tmp_path / "job.npz") as held:
        arrays = {name: held[name] for name in held.files}
    order = arrays["orders"][1, 7, : arrays["counts"][7]]
    inputs, labels = arrays["inputs"][order], arrays["labels"][order]
    theirs = trained([arrays[name] for name in NAMES], inputs, labels, BATCH, LR)
    task, mine = simulation.server.task(2), Selection(simulation.data.train, simulation.deal[7])
    update = simulation.training.train(task, 7, mine, ClientState())
    ours = simulation.training.layout.named(task.weights + update.delta)
    assert float(update.delta.norm()) > 0.01
    must_agree({name: tensor.clone() for name, tensor in ours.items()}, dict(zip(NAMES, theirs, strict=True)))
    for name, array in zip(NAMES, theirs, strict=True):
        torch.testing.assert_close(ours[NAMES[name]], torch.from_numpy(array), rtol=1e-4, atol=1e-6)
