"""Check of a job's optimizer and learning-rate schedule. It does not depend on the plan."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from paceline.errors import JobError
from paceline.job.optimizer import AdamWSpec, OptimizerSpec
from paceline.job.schedule import ScheduleSpec
from paceline.planning.model.model_info import ModelInfo, model_info

if TYPE_CHECKING:
    from paceline.job.job import Job


def check_optimizer(job: Job) -> None:
    """Check that the optimizer, its groups, the frozen parameters and the schedule fit the model.

    Raises:
        JobError: one of these does not fit the model; the error states what to change.
    """
    optimizer, schedule = job.optimizer, job.schedule
    if job.model.transformer is not None:  # a model given by dimensions has no parameter names
        optimizer = optimizer.model_copy(update={"groups": (), "no_decay": (), "adamw": AdamWSpec()})
    by_name = bool(job.model.freeze or optimizer.groups or optimizer.no_decay or optimizer.adamw.match)
    if optimizer.has_short_name and not optimizer.args and not by_name and not schedule.by_class:
        return
    _check(optimizer.model_dump_json(), schedule.model_dump_json(), model_info(job.model), job.stop.steps)


@cache
def _check(optimizer_json: str, schedule_json: str, info: ModelInfo, steps: int | None) -> None:
    import torch

    optimizer = OptimizerSpec.model_validate_json(optimizer_json)
    schedule = ScheduleSpec.model_validate_json(schedule_json)
    trained = [shape for shape in info.parameters if shape.trainable]
    if not trained:
        raise JobError(
            "model.all_frozen", "the model has no trainable parameters, because model.freeze matches all parameters"
        )
    for dims in dict.fromkeys(len(shape.sizes) for shape in trained):
        if why := optimizer.refusal(dims):
            first = next(shape for shape in trained if len(shape.sizes) == dims)
            raise JobError(
                "optimizer.shape_refused",
                "optimizer {optimizer} does not support {parameter} of shape {shape}: {reason}. Choose another "
                "optimizer (muon uses AdamW for parameters that are not matrices), or freeze such parameters.",
                optimizer=optimizer.name,
                parameter=first.name,
                shape=first.sizes,
                reason=why,
            )
    parameters = {shape.name: torch.nn.Parameter(torch.empty((1,) * len(shape.sizes))) for shape in trained}
    made = optimizer.build(parameters, names=info.names)
    if schedule.by_class:
        schedule.refuse_short_cycle(steps if schedule.period == "step" else None)
        # if the run is given in epochs, only its data determines the number of steps
        schedule.build(made, steps or 100)
