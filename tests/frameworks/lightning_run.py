"""A script of Lightning with two ranks: `lightning_run.py FOLDER STRATEGY EPOCHS [CHECKPOINT]`; prints JSON by rank.

STRATEGY is a name, or the arguments of PacelineStrategy as JSON. With `items` in them, labels are ignored unevenly.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch.nn import functional as F

from paceline.frameworks.lightning import PacelineStrategy

folder, strategy, epochs, *checkpoint = sys.argv[1:]
arguments: dict[str, Any] = json.loads(strategy) if strategy.startswith("{") else {}
uneven = bool(arguments.pop("items", None))
if uneven:
    arguments["items"] = lambda batch: (batch[1] != -100).sum()
warnings.filterwarnings("ignore")


class Net(pl.LightningModule):
    """A small network on random points."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
        self.losses: list[float] = []
        self.at_validation: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """Loss of a batch."""
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        """Loss of a validation batch."""
        self.at_validation.append(fingerprint(self))
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), 0.1)


def fingerprint(model: torch.nn.Module) -> float:
    """Sum of the parameters."""
    return sum(float(p.detach().double().sum()) for p in model.parameters())


pl.seed_everything(0, verbose=False)
inputs = torch.randn(2048, 64)
labels = (inputs @ torch.randn(64, 10)).argmax(1)
if uneven:
    labels[torch.arange(2048) % 64 % 13 < torch.arange(2048) % 2 * 9] = -100
data = torch.utils.data.TensorDataset(inputs, labels)
trainer = pl.Trainer(
    strategy=PacelineStrategy(**arguments) if arguments else strategy,
    accelerator="cpu",
    devices=2,
    accumulate_grad_batches=3 if uneven else 1,
    gradient_clip_val=0.3 if uneven else None,
    max_epochs=int(epochs),
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=folder,
)
torch.manual_seed(1)
model = Net()
loaders = [torch.utils.data.DataLoader(data, size, shuffle=False) for size in (32, 512)]
trainer.fit(model, *loaders, ckpt_path=checkpoint[0] if checkpoint else None)
saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
found = {
    "rank": trainer.global_rank,
    "backend": torch.distributed.get_backend(),
    "losses": model.losses,
    "val": float(trainer.callback_metrics["val"]),
    "end": fingerprint(model),
    "at_validation": model.at_validation[-1],
    "saved": sum(float(value.double().sum()) for value in saved["state_dict"].values()),
    "kept": {key: saved["paceline"][key] for key in ("step",)} if "paceline" in saved else {},
    "path": trainer.checkpoint_callback.best_model_path,
}
with open(f"{folder}/rank{trainer.global_rank}.json", "w") as file:
    json.dump(found, file)
