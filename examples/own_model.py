"""A model and a data set of one's own, for own_model.yaml: plain PyTorch, nothing of paceline in it."""

from __future__ import annotations

import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.utils.data import Dataset


def network(hidden: int = 32) -> nn.Module:
    """30 measurements of a cell sample to the logits of two diagnoses."""
    return nn.Sequential(
        nn.Linear(30, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 2),
    )


class Tumours(Dataset[tuple[Tensor, Tensor]]):
    """569 real tumours (UCI's breast cancer data, which come with scikit-learn).

    A sample is (measurements, 0 malignant or 1 benign).

    `labels` is optional: it is what `partition: stratified` keeps in proportion.
    """

    def __init__(self) -> None:
        measured, diagnosis = load_breast_cancer(return_X_y=True)
        inputs = torch.from_numpy(measured).float()
        self.inputs = (inputs - inputs.mean(0)) / inputs.std(0)
        self.labels = torch.from_numpy(diagnosis).long()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.labels[index]
