"""A moving average of the weights, a schedule, evaluations, and resuming.

Both the model and its average are evaluated; a checkpoint holds all of it.

python ema.py checkpoints
torchrun --nproc-per-node 2 ema.py checkpoints
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset, random_split

import paceline


def main(folder: str) -> None:
    """Train on the digits for three epochs; with checkpoints in `folder`, go on where the last one was."""
    torch.manual_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target))
    train, held_out = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = CosineAnnealingLR(optimizer, T_max=3)

    engine = paceline.setup(
        model, optimizer, loss=F.cross_entropy, loader=DataLoader(train, batch_size=64, shuffle=True)
    )
    # after setup: from the weights that all ranks agree on
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    validation = DataLoader(held_out, batch_size=64)
    saved = engine.load(folder, scheduler=scheduler, ema=ema)

    def right(network: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        found: Tensor = network(batch[0]).argmax(1) == batch[1]
        return found

    for epoch in range(saved["epoch"] if saved else 0, 3):
        for batch in engine.loader:
            loss = engine.step(batch).loss
            ema.update_parameters(model)
        scheduler.step()
        ema.eval()
        scores = engine.evaluate(validation, lambda batch: {"model": right(model, batch), "ema": right(ema, batch)})
        engine.print(
            f"epoch {epoch + 1}  loss {loss:.5f}  accuracy {scores['model']:.4f}  of the average {scores['ema']:.4f}"
        )
        engine.save(folder, scheduler=scheduler, ema=ema, epoch=epoch + 1)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "checkpoints")
