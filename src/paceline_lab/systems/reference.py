"""Losses of one process, with which those of every system are compared."""

from __future__ import annotations

import torch

from paceline.job.batch import rows
from paceline_lab.systems.work import Work


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
