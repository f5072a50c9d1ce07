"""Works of systems.py: jobs of every kind that the systems of the field train.

The graph network needs PyTorch Geometric (`pip install torch-geometric`) in paceline's environment; without it that
work is left out, and said to be.
"""

from __future__ import annotations

import importlib.util
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.job.model import ModelSpec

HERE = str(Path(__file__).resolve())
ROWS, FIELDS, WIDTH = 20_000, 8, 32  # of the embedding tables
NODES, FEATURES, CLASSES = 24, 16, 4  # of a graph
TEXT: dict[str, Any] = {"kind": "text", "path": "{stdlib}/pydoc_data", "context": 64}
IMAGES: dict[str, Any] = {"kind": "synthetic", "samples": 512, "held_out": 0}
ADAMW: dict[str, Any] = {"name": "adamw", "lr": 1e-3}
# Any number of steps: the comparison says how many are taken.
SHARED: dict[str, Any] = {"loss": "cross_entropy", "optimizer": ADAMW, "stop": {"steps": 10_000}}

WORKS: dict[str, dict[str, Any]] = {
    "cnn": {"model": "cifar_cnn", "data": "digits", "global_batch": 64, "stop": {"steps": 10_000, "loss_below": 0.5}},
    "resnet50": {
        "model": {"factory": f"{HERE}:resnet50"},
        "data": {**IMAGES, "shape": [3, 64, 64], "classes": 1000},
        "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9},
        "global_batch": 16,
    },
    "gpt": {
        "model": {"zoo": "gpt", "args": {"layers": 3, "hidden": 128, "heads": 4, "context": 64}},
        "data": TEXT,
        "global_batch": 32,
    },
    "bert": {
        "model": {"zoo": "bert", "args": {"layers": 2, "hidden": 128, "heads": 4, "context": 64}},
        "data": {**TEXT, "objective": "masked"},
        "global_batch": 32,
    },
    "simclr": {
        "model": {"zoo": "simclr", "args": {"dim": 64}},
        "data": "digits",
        "loss": {"name": "contrastive", "args": {"temperature": 0.2}},
        "global_batch": 64,
    },
    "graph": {
        "model": {"factory": f"{HERE}:graph_network"},
        "data": {"kind": "dataset", "factory": f"{HERE}:Graphs", "held_out": 0},
        "global_batch": 64,
    },
    "recommendation": {
        "model": {"factory": f"{HERE}:recommender"},
        "data": {"kind": "dataset", "factory": f"{HERE}:Clicks", "held_out": 0},
        "loss": "bce",
        "optimizer": {"name": "sgd", "lr": 0.5},
        "global_batch": 256,
    },
    "averaged": {
        "model": {"zoo": "mlp", "args": {"hidden": 64}},
        "data": "digits",
        "optimizer": {"name": "sgd", "lr": 0.1},
        "global_batch": 64,
    },
    "moe": {
        "model": {"zoo": "moe", "args": {"layers": 2, "hidden": 128, "heads": 4, "context": 64, "experts": 4}},
        "data": TEXT,
        "global_batch": 32,
    },
}


def works() -> dict[str, dict[str, Any]]:
    """Jobs by name, without those whose library is missing."""
    there = importlib.util.find_spec("torch_geometric") is not None
    return {name: SHARED | {"name": name} | job for name, job in WORKS.items() if name != "graph" or there}


def resnet50() -> nn.Module:
    """The zoo's ResNet-50, whose residual branches begin at zero (Goyal et al., 2017, arXiv:1706.02677).

    As it is drawn, one rounding moves the second loss by a percent, so losses of two systems could not be compared.
    """
    model = ModelSpec(zoo="resnet50").build()
    for name, module in model.named_modules():
        if name.endswith("layer.2.normalization"):
            nn.init.zeros_(module.get_parameter("weight"))
    return model


class Recommender(nn.Module):
    """An embedding for each of several fields, whose rows get sparse gradients, and a small MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, WIDTH, sparse=True) for _ in range(FIELDS))
        self.mlp = nn.Sequential(nn.Linear(FIELDS * WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, rows: Tensor) -> Tensor:
        """Logits (n, 1) of rows (n, FIELDS)."""
        found = [table(rows[:, field]) for field, table in enumerate(self.tables)]
        logits: Tensor = self.mlp(torch.cat(found, 1))
        return logits


def recommender() -> nn.Module:
    """Eight tables of 20,000 rows: 5.1 million parameters, of which a batch touches few."""
    return Recommender()


class Clicks(Dataset[tuple[Tensor, Tensor]]):
    """Invented clicks: rows of each field, drawn as Zipf's law has them, and whether it was clicked."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(1)
        drawn = torch.rand((8192, FIELDS), generator=made)
        self.rows = (ROWS**drawn).long().clamp(max=ROWS - 1)
        self.clicked = (self.rows.sum(1, keepdim=True) % 3 == 0).float()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index], self.clicked[index]


class GraphNetwork(nn.Module):
    """Three graph convolutions (Kipf and Welling, 2017, arXiv:1609.02907) and a mean over the nodes."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import DenseGCNConv

        widths = [FEATURES, 64, 64, 64]
        self.layers = nn.ModuleList(DenseGCNConv(a, b) for a, b in pairwise(widths))
        self.head = nn.Linear(64, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """Logits (n, CLASSES) of node features (n, NODES, FEATURES) and adjacencies (n, NODES, NODES)."""
        for layer in self.layers:
            nodes = layer(nodes, edges).relu()
        logits: Tensor = self.head(nodes.mean(1))
        return logits


def graph_network() -> nn.Module:
    """PyTorch Geometric's dense graph convolutions."""
    return GraphNetwork()


class Graphs(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Invented graphs whose class is how many edges they have."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(2)
        self.target = torch.randint(CLASSES, (2048,), generator=made)
        share = (self.target + 1).float() / (2 * CLASSES)
        upper = (torch.rand((2048, NODES, NODES), generator=made) < share[:, None, None]).float().triu(1)
        self.edges = upper + upper.transpose(1, 2)
        self.nodes = torch.randn((2048, NODES, FEATURES), generator=made)

    def __len__(self) -> int:
        return len(self.target)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.nodes[index], self.edges[index], self.target[index]
