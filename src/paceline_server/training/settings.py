"""Settings of a run's servers, which the first worker makes of job and model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import nn

from paceline.engine.calls import sparse_tables
from paceline.job.job import Job
from paceline.planning.plan import Plan
from paceline.planning.sync_info import SyncSpec
from paceline_server.parameters.settings import GroupSettings, ServerSettings, TensorSpec
from paceline_server.training.whole import Whole

# of a schedule, in global batches; servers count pushes
_COUNTED = ("warmup_steps", "decay_steps")


def settings_of(job: Job, plan: Plan, tensors: tuple[TensorSpec, ...], total_steps: int | None) -> ServerSettings:
    """Settings of the servers of a run, which own these tensors.

    A push is the mean gradient of a piece, which counts for its share of the global batch: its learning rate is the
    job's divided by the pieces. With a period it is a change of the parameters, and the optimizer the outer one.
    """
    pieces, spec = plan.dp, SyncSpec.parse(plan.sync)
    staleness = float(spec.arguments["staleness"])
    if spec.period > 1:
        group = GroupSettings(tensors=tensors, optimizer=_outer(pieces, spec.arguments))
    else:
        group = _of_gradients(job, pieces, tensors, total_steps)
    return ServerSettings(
        groups=(group,),
        fingerprint=_fingerprint(tensors, group),
        staleness=staleness,
        pieces=pieces,
        compress=plan.compress,
    )


def _outer(pieces: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The outer optimizer, taken on every push instead of once a round.

    Over the pushes of a round the momentum decays as in one outer step, and a steady change moves the parameters as
    far.
    """
    decay = arguments["momentum"] ** (1 / pieces)
    rate = arguments["lr"] / pieces * (1 - decay) / (1 - arguments["momentum"])
    return {"name": "sgd", "lr": rate, "momentum": decay, "nesterov": decay > 0}


def _of_gradients(job: Job, pieces: int, tensors: tuple[TensorSpec, ...], total_steps: int | None) -> GroupSettings:
    """The job's optimizer and schedule, for pushes of gradients."""
    optimizer = job.optimizer.model_dump(exclude_defaults=True) | {"lr": job.optimizer.lr / pieces}
    schedule = job.schedule.model_dump(exclude_defaults=True)
    schedule |= {key: schedule[key] * pieces for key in _COUNTED if schedule.get(key)}
    if "milestones" in schedule:
        schedule["milestones"] = [milestone * pieces for milestone in schedule["milestones"]]
    steps = None if total_steps is None else total_steps * pieces
    return GroupSettings(optimizer=optimizer, schedule=schedule, total_steps=steps, tensors=tensors)


def tensors_of(model: nn.Module, whole: Whole, period: int) -> tuple[TensorSpec, ...]:
    """The tensors that servers own of a worker's model. Where it is divided, or with a period, tables are dense.

    Raises:
        ServerRefused: a parameter is of a kind that servers do not hold.
    """
    sparse = set[str]() if whole.divides or period > 1 else set(sparse_tables(model))
    return tuple(
        TensorSpec(name, shape, str(whole.dtypes[name]).removeprefix("torch."), sparse=name in sparse)
        for name, shape in whole.shapes.items()
    )


def written(settings: ServerSettings) -> bytes:
    """Settings as JSON."""
    return json.dumps(asdict(settings)).encode()


def read(text: bytes) -> ServerSettings:
    """Settings that `written` told."""
    told: dict[str, Any] = json.loads(text)
    groups = tuple(
        GroupSettings(**group | {"tensors": tuple(TensorSpec(**_whole(t)) for t in group["tensors"])})
        for group in told["groups"]
    )
    return ServerSettings(**told | {"groups": groups})


def _whole(tensor: dict[str, Any]) -> dict[str, Any]:
    return tensor | {"shape": tuple(tensor["shape"])}


def _fingerprint(tensors: tuple[TensorSpec, ...], group: GroupSettings) -> str:
    told = json.dumps([[asdict(tensor) for tensor in tensors], group.optimizer])
    return hashlib.sha256(told.encode()).hexdigest()
