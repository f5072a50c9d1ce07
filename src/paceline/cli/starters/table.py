"""The rows of a table, and a network that predicts one of its columns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows of a CSV or Parquet file.

    The inputs are all numeric columns except the target, scaled to mean 0 and standard deviation 1. A target of text or
    whole numbers is a class; any other number is a quantity.
    """

    def __init__(self, path: str, target: str) -> None:
        read = pyarrow.parquet.read_table if Path(path).suffix == ".parquet" else pyarrow.csv.read_csv
        table = read(path)
        columns = {name: table.column(name).to_numpy() for name in table.column_names}
        wanted = columns.pop(target)
        numbers = [column.astype(np.float32) for column in columns.values() if column.dtype.kind in "iufb"]
        inputs = torch.from_numpy(np.stack(numbers, axis=1))
        if not inputs.isfinite().all():
            raise ValueError(f"{path} has empty or infinite cells: fill them before training")
        self.inputs = (inputs - inputs.mean(0)) / inputs.std(0).clamp(min=1e-6)
        if wanted.dtype.kind == "f":
            self.targets = torch.from_numpy(wanted.astype(np.float32)).unsqueeze(1)
        else:
            classes, numbered = np.unique(wanted.astype(str), return_inverse=True)
            self.classes = classes.tolist()
            self.targets = torch.from_numpy(numbered)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class Network(nn.Sequential):
    """Network with two hidden layers."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__(
            nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
        )
