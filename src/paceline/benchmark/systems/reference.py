"""Losses of one process, with which those of every system are compared."""

from __future__ import annotations

import torch

from paceline.benchmark.systems.work import Work
from paceline.job.batch import rows


def train(work: Work) -> None:
    """Train in one process, each batch in parts where replicas normalise alone."""
    model = work.model()
    optimizer = work.optimizer(model.parameters())
    schedule = work.schedule(optimizer)
    for batch in work.batches():
        optimizer.zero_grad()
        parts = work.parts(batch)
        losses = [work.loss(model, part) * (rows(part) / rows(batch)) for part in parts]
        for loss in losses:
            loss.backward()
        work.clip(model)
        optimizer.step()
        schedule.step()
        work.took(torch.stack(losses).sum())
