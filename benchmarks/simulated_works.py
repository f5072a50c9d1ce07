"""What the cases of simulated.py train: models that the zoo has not, their data, and jobs by the name of their work."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from model_families import TOKENS as FAMILY_TOKENS
from model_families import VOCAB as FAMILY_VOCAB
from model_families import family_job

VOCAB, TOKENS, CLASSES = 32, 8, 5


class Convolutions(nn.Module):
    """Two convolutions, with a batch norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.head = nn.Conv2d(4, 8, 3, stride=2), nn.Linear(8 * 9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores (n, CLASSES) of images (n, 1, 8, 8)."""
        x = torch.relu(self.norm(self.first(x)))
        y: Tensor = self.head(torch.relu(self.second(x)).flatten(1))
        return y


class Recurrent(nn.Module):
    """An LSTM over tokens; class scores (n, t, VOCAB) of the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.lstm = nn.Embedding(VOCAB, 8), nn.LSTM(8, 12, batch_first=True)
        self.head = nn.Linear(12, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of tokens (n, t)."""
        y: Tensor = self.head(self.lstm(self.tokens(tokens))[0])
        return y


class SparseBag(nn.Module):
    """A mean of token vectors whose gradients are sparse; class scores (n, CLASSES)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, 8, sparse=True), nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Class scores of tokens (n, t)."""
        y: Tensor = self.head(self.tokens(tokens).mean(dim=1))
        return y


class Branches(nn.Module):
    """Two layers, of which a batch uses one: the other gets no gradient, and ranks differ in which."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of points (n, 6)."""
        y: Tensor = self.head(torch.tanh((self.left if float(x.sum()) > 0 else self.right)(x)))
        return y


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Random points (6 numbers); those in `nan_at` are not finite."""

    def __init__(self, samples: int = 44, nan_at: tuple[int, ...] = ()) -> None:
        self.inputs = torch.randn(samples, 6, generator=torch.Generator().manual_seed(3))
        self.labels = self.inputs[:, :CLASSES].argmax(dim=1)
        self.inputs[list(nan_at)] = float("nan")

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.labels[index]


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """Random token sequences, each of a class."""

    def __init__(self, samples: int = 44) -> None:
        draw = torch.Generator().manual_seed(4)
        self.tokens = torch.randint(VOCAB, (samples, TOKENS), generator=draw)
        self.labels = torch.randint(CLASSES, (samples,), generator=draw)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index], self.labels[index]


def perceptron() -> nn.Module:
    """Class scores of points, with a batch norm, whose buffers every forward pass writes."""
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, CLASSES))


def forgetful() -> nn.Module:
    """Class scores of points, with dropout."""
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, CLASSES))


def family(name: str, **configuration: Any) -> nn.Module:
    """A small transformer of a family of `model_families.py`; `configuration` overrides entries of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return family_job(name, Path(folder)).model.model_copy(update={"args": configuration}).build()


def _job(model: Any, data: dict[str, Any], optimizer: dict[str, Any], loss: str = "cross_entropy") -> dict[str, Any]:
    spec = model if isinstance(model, dict) else {"factory": f"{_HERE}:{model.__name__}"}
    return {"model": spec, "data": {"held_out": 0, **data}, "loss": loss, "optimizer": optimizer}


def _family(data: dict[str, Any], loss: str = "cross_entropy", **args: Any) -> dict[str, Any]:
    return _job({"factory": f"{_HERE}:family", "args": args}, data, _ADAM, loss)


def _random(**shape: Any) -> dict[str, Any]:
    return {"kind": "synthetic", "samples": 44, **shape}


_HERE = Path(__file__).resolve()
_GPT = {"vocab": VOCAB, "context": TOKENS, "layers": 4, "hidden": 16, "heads": 4}
_TEXT = _random(shape=[TOKENS], vocab=VOCAB)
_POINTS = {"kind": "dataset", "factory": f"{_HERE}:Points"}
# a large eps: where gradients vanish, Adam magnifies rounding
_ADAM = {"name": "adamw", "lr": 3e-3, "eps": 1e-3, "weight_decay": 0.1}
_SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
JOBS: dict[str, dict[str, Any]] = {
    "gpt": _job({"zoo": "gpt", "args": _GPT}, _TEXT, _ADAM),
    "moe": _job({"zoo": "moe", "args": {**_GPT, "experts": 4, "top_k": 2}}, _TEXT, _ADAM),
    "bert": _family(
        _random(shape=[FAMILY_TOKENS], vocab=FAMILY_VOCAB),
        name="bert",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ),
    "vit": _family(_random(shape=[3, 16, 16], classes=10), name="vit"),
    "t5": _family({"kind": "dataset", "factory": "model_families:Pairs"}, "model", name="t5", dropout_rate=0.0),
    "cnn": _job(Convolutions, _random(shape=[1, 8, 8], classes=CLASSES), _SGD),
    "lstm": _job(Recurrent, _TEXT, _ADAM),
    "sparse": _job(SparseBag, {"kind": "dataset", "factory": f"{_HERE}:Sentences"}, {"name": "sgd", "lr": 0.1}),
    "branches": _job(Branches, _POINTS, _SGD),
    "dropout": _job(forgetful, _POINTS, _SGD),
    "mlp": _job(perceptron, _POINTS, _SGD),
}
