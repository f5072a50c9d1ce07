"""Preflight of the loss: a trial of computing it in parts of a batch.

It takes a few samples, in one process, before a rank is started.
"""

from __future__ import annotations

import torch

from paceline.comm import Group
from paceline.engine.engine import Engine, Settings
from paceline.engine.model_loss import SAMPLES
from paceline.errors import PlanError
from paceline.job.batch import target_of
from paceline.job.data import DataSets
from paceline.job.job import Job
from paceline.planner.check.plan_context import loss_is_tried
from paceline.plans.plan import Plan
from paceline.split.mesh import Mesh
from paceline.trace.model_info import model_info
from paceline.training.build import loader_of

_SMALL = 50_000_000  # parameters; of a larger model, the ranks try the loss before their first step


def reasons_of_loss(job: Job, plan: Plan, data: DataSets) -> list[str]:
    """Reasons why the plan would train another loss; empty if none is found.

    The loss is computed by the undivided model in one process, from its first weights. Empty also where only
    the ranks can tell.
    """
    if not loss_is_tried(job, plan) or sum(shape.numel for shape in model_info(job.model).parameters) > _SMALL:
        return []
    try:
        with torch.random.fork_rng(devices=[]):
            _try(job, plan, data)
    except PlanError as error:
        return str(error).splitlines()
    except Exception:  # noqa: BLE001 - whatever the user's model or loss raises: the ranks tell it with its place
        return []
    return []


def _try(job: Job, plan: Plan, data: DataSets) -> None:
    torch.manual_seed(job.seed)
    alone, group, model = Plan(precision=plan.precision), Group(), job.model.build()
    loader, settings = loader_of(job, Mesh.of(alone, group), data), Settings(precision=job.precision, seed=job.seed)
    engine = Engine(model, job.optimizer.build(model.parameters()), job.loss.build(), loader, alone, group, settings)
    try:
        engine.plan = plan  # whose parts the loss is held against
        engine.compute.weighing.prepare()
        batch = engine.compute.place(loader.example(SAMPLES))
        if not engine.compute.weighing.by_model:
            with torch.no_grad(), engine.compute.autocast():
                output = engine.compute.call(batch)
            engine.compute.weighing.hold(output, target_of(batch))
    finally:
        engine.close()
