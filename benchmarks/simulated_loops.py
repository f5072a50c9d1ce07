"""Loops of a user's own for simulated.py: each a function of the plan that returns its engine and what it measured."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import paceline
from paceline.run.own_loop.engine import Engine
from simulated_cases import STEPS
from simulated_works import CLASSES, Points

Trained = tuple[Engine, list[float]]


def _network(outputs: int = CLASSES, inputs: int = 6) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def _loader(batch: int = 8) -> DataLoader[Any]:
    return DataLoader(Points(), batch_size=batch, shuffle=True)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def steps_of_the_engine(plan: str) -> Trained:
    """`engine.step` and `engine.evaluate`."""
    model = _network()
    engine = paceline.setup(
        model, _sgd(model), loss=nn.functional.cross_entropy, loader=_loader(), plan=plan, clip_norm=0.1
    )
    losses = [engine.step(batch).loss for _, batch in zip(range(STEPS), _endless(engine), strict=False)]
    engine.loader.close()
    return engine, losses


def fp16_with_a_loss_scale(plan: str) -> Trained:
    """Half precision, whose first loss scale overflows, so that updates are left out and it shrinks."""
    model = _network()
    engine = paceline.setup(
        model,
        _sgd(model),
        loss=lambda output, target: 2**6 * F.cross_entropy(output, target),
        loader=_loader(),
        plan=plan,
        precision="fp16",
    )
    results = [engine.step(batch) for _, batch in zip(range(2 * STEPS), _endless(engine), strict=False)]
    engine.loader.close()
    return engine, [value for r in results for value in (r.loss, float(r.problem is not None))]


def own_backward(plan: str) -> Trained:
    """The loop's own loss, backward pass, accumulation over two batches and clipping."""
    model = _network()
    optimizer = _sgd(model)
    engine = paceline.setup(model, optimizer, loader=_loader(4), plan=plan)
    losses: list[float] = []
    for number, batch in zip(range(2 * STEPS), _endless(engine), strict=False):
        inputs, labels = (part.to(engine.device, non_blocking=True) for part in batch)
        loss = F.cross_entropy(model(inputs), labels) / 2
        mean = engine.backward(loss, sync=number % 2 == 1)
        losses.append(float(mean))
        if number % 2 == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    engine.loader.close()
    return engine, losses


def two_optimizers(plan: str) -> Trained:
    """A generator and a discriminator, each with its own backward pass and step."""
    models = {"g": _network(6), "d": _network(1)}
    of = {name: torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3) for name, model in models.items()}
    engine = paceline.setup(models, of, loader=_loader(), plan=plan)
    losses: list[float] = []
    for _, batch in zip(range(STEPS), _endless(engine), strict=False):
        real = batch[0].to(engine.device)
        made: Tensor = models["g"](real.flip(1))
        discriminated = F.softplus(-models["d"](real)).mean() + F.softplus(models["d"](made.detach())).mean()
        losses.append(float(engine.backward(discriminated, of["d"])))
        of["d"].step()
        of["d"].zero_grad()
        losses.append(float(engine.backward(F.softplus(-models["d"](made)).mean(), of["g"])))
        of["g"].step()
        of["g"].zero_grad()
    engine.loader.close()
    return engine, losses


def saved_and_loaded(plan: str) -> Trained:
    """Half of the steps and a checkpoint; a new model, optimizer and engine take the second half from there."""
    engine, losses = _half(plan, None)
    with tempfile.TemporaryDirectory() as own:
        folder = Path(engine.group.gather_json(own)[0])
        engine.save(folder)
        engine.close()
        engine, more = _half(plan, folder)
        engine.group.gather_json(None)  # nobody reads any more
    return engine, losses + more


def _half(plan: str, folder: Path | None) -> Trained:
    model = _network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    engine = paceline.setup(model, optimizer, loss=nn.functional.cross_entropy, loader=_loader(), plan=plan)
    if folder is not None:
        engine.load(folder)
    losses = [engine.step(batch).loss for _, batch in zip(range(STEPS // 2), _endless(engine), strict=False)]
    engine.loader.close()
    return engine, losses


def _endless(engine: Engine) -> Any:
    while True:
        yield from engine.loader
