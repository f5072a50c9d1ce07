"""Schedules by class. A rate that differs from torch's trains another model, and a resumed one would never show it."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from paceline.errors import JobError
from paceline.job.optimizer import OptimizerSpec
from paceline.job.schedule import ScheduleSpec
from paceline.job.stop import Epochs
from paceline.run.learning_rate import LearningRate
from refusals import raises

STEPS, EPOCH = 24, 4
OPTIMIZER = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "groups": [{"match": "bias", "lr": 0.02}]}


def halving(step: int) -> float:
    return 0.5 ** (step // 7)


HALVING = f"{__name__}:halving"
TORCHS: dict[str, tuple[dict[str, Any], Any]] = {
    "LambdaLR": ({"lr_lambda": HALVING}, lambda o: lr_scheduler.LambdaLR(o, halving)),
    "MultiplicativeLR": ({"lr_lambda": HALVING}, lambda o: lr_scheduler.MultiplicativeLR(o, halving)),
    "StepLR": ({"step_size": 5}, lambda o: lr_scheduler.StepLR(o, 5)),
    "MultiStepLR": ({"milestones": [3, 9], "gamma": 0.3}, lambda o: lr_scheduler.MultiStepLR(o, [3, 9], 0.3)),
    "ConstantLR": ({"factor": 0.5}, lambda o: lr_scheduler.ConstantLR(o, 0.5)),
    "LinearLR": ({"total_iters": 10}, lambda o: lr_scheduler.LinearLR(o, total_iters=10)),
    "ExponentialLR": ({"gamma": 0.9}, lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
    "PolynomialLR": ({"total_iters": 20, "power": 2.0}, lambda o: lr_scheduler.PolynomialLR(o, 20, 2.0)),
    "CosineAnnealingLR": ({"T_max": 20}, lambda o: lr_scheduler.CosineAnnealingLR(o, 20)),
    "CosineAnnealingWarmRestarts": ({"T_0": 7}, lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 7)),
    "CyclicLR": (
        {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 5},
        lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=5),
    ),
    "OneCycleLR": ({"max_lr": [0.2, 0.1]}, lambda o: lr_scheduler.OneCycleLR(o, [0.2, 0.1], total_steps=STEPS)),
    "SequentialLR": (
        {
            "schedulers": [
                {"name": "LinearLR", "args": {"total_iters": 5}},
                {"name": "CosineAnnealingLR", "args": {"T_max": 19}},
            ],
            "milestones": [5],
        },
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, total_iters=5), lr_scheduler.CosineAnnealingLR(o, 19)], [5]
        ),
    ),
    "ChainedScheduler": (
        {"schedulers": [{"name": "ConstantLR", "args": {}}, {"name": "ExponentialLR", "args": {"gamma": 0.9}}]},
        lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
        ),
    ),
}


def model() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(3, 2)


def job_optimizer(of: nn.Linear) -> torch.optim.Optimizer:
    return OptimizerSpec.model_validate(OPTIMIZER).build(dict(of.named_parameters()))


def torch_optimizer(of: nn.Linear) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": [of.weight]}, {"params": [of.bias], "lr": 0.02}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def rates(spec: dict[str, Any], optimizer: torch.optim.Optimizer) -> LearningRate:
    return LearningRate(ScheduleSpec.model_validate(spec), optimizer, STEPS, Epochs(EPOCH))


def settings(optimizer: torch.optim.Optimizer) -> list[tuple[float, float]]:
    return [(group["lr"], group["momentum"]) for group in optimizer.param_groups]


def followed(found: LearningRate, first: int = 0) -> list[list[tuple[float, float]]]:
    values = []
    for step in range(first, STEPS):
        found.before(step)
        values.append(settings(found.optimizer))
    return values


def test_every_class_of_torch_is_tried_here() -> None:
    classes = {
        name
        for name, found in vars(lr_scheduler).items()
        if isinstance(found, type) and issubclass(found, lr_scheduler.LRScheduler) and not name.endswith("LRScheduler")
    }
    assert classes - {"ReduceLROnPlateau"} == TORCHS.keys()


@pytest.mark.parametrize("every", ["step", "epoch"])
@pytest.mark.parametrize("name", TORCHS)
def test_each_class_sets_the_rates_and_the_momentum_of_a_plain_torch_loop(name: str, every: str) -> None:
    args, make = TORCHS[name]
    if name == "OneCycleLR" and every == "epoch":
        args = args | {"total_steps": STEPS}
    plain = torch_optimizer(model())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler, expected = make(plain), []
        for step in range(STEPS):
            expected.append(settings(plain))
            if every == "step" or (step + 1) % EPOCH == 0:
                scheduler.step()
    found = rates({"name": name, "args": args, "every": every}, job_optimizer(model()))
    found.start()
    assert followed(found) == expected


@pytest.mark.parametrize("name", TORCHS)
def test_a_schedule_restored_from_json_goes_on_as_the_undisturbed_one(name: str) -> None:
    spec = {"name": name, "args": TORCHS[name][0]}
    undisturbed = rates(spec, job_optimizer(model()))
    undisturbed.start()
    expected = followed(undisturbed)
    before = rates(spec, job_optimizer(model()))
    before.start()
    for step in range(11):
        before.before(step)
    saved = json.loads(json.dumps(before.state_dict(), allow_nan=False))
    # in a new process, and in the memory of one that goes on
    for optimizer in (job_optimizer(model()), before.optimizer):
        after = rates(spec, optimizer)
        after.load_state_dict(saved)
        assert followed(after, 11) == expected[11:]


def test_reduce_on_plateau_follows_each_evaluation_once_and_its_state_returns() -> None:
    losses = [1.0, 0.9, 0.95, 0.93, 0.92, 0.91, 0.5, 0.6, 0.6, 0.6]
    plain = torch_optimizer(model())
    scheduler, expected = lr_scheduler.ReduceLROnPlateau(plain, patience=1, factor=0.5), []
    for loss in losses:
        scheduler.step(loss)
        expected.append(settings(plain))
    spec = {"name": "ReduceLROnPlateau", "args": {"patience": 1, "factor": 0.5}}
    found = rates(spec, job_optimizer(model()))
    found.start()
    values = []
    for step, loss in enumerate(losses):
        saved = json.loads(json.dumps(found.state_dict(), allow_nan=False))
        found = rates(spec, job_optimizer(model()))
        found.load_state_dict(saved)
        for _ in range(2):  # an evaluation that is repeated after a fault
            found.after_evaluation(step, {"loss": loss})
        found.before(step)
        values.append(settings(found.optimizer))
    assert values == expected


def test_a_state_of_another_schedule_is_left_behind() -> None:
    other = rates({"name": "StepLR", "args": {"step_size": 2}}, job_optimizer(model()))
    found = rates({"name": "ExponentialLR", "args": {"gamma": 0.5}}, job_optimizer(model()))
    found.load_state_dict(other.state_dict())
    assert found.before(2) == pytest.approx(0.1 * 0.25)


@pytest.mark.parametrize("name", ["constant", "cosine"])
def test_paceline_s_own_schedules_scale_the_rate_of_every_group(name: str) -> None:
    spec = ScheduleSpec.model_validate({"name": name, "warmup_steps": 3})
    found = rates({"name": name, "warmup_steps": 3}, job_optimizer(model()))
    found.start()
    for step in (0, 2, 9, 23):
        found.before(step)
        factor = spec.factor_at(step, STEPS)
        assert [lr for lr, _ in settings(found.optimizer)] == pytest.approx([0.1 * factor, 0.02 * factor])


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "StepLR", "args": {}},
        {"name": "StepLR", "args": {"step_sizes": 3}},
        {"name": "OneCycleLR", "args": {"max_lr": [0.1, 0.1, 0.1]}},
        {"name": "LambdaLR", "args": {"lr_lambda": f"{__name__}:missing"}},
    ],
)
def test_arguments_that_do_not_fit_are_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(JobError):
        rates(spec, job_optimizer(model()))


def test_a_cycle_without_an_end_is_refused() -> None:
    spec = ScheduleSpec.model_validate({"name": "OneCycleLR", "args": {"max_lr": 0.1}})
    with raises(JobError, "schedule.cycle_end_unknown"):
        LearningRate(spec, job_optimizer(model()), None, Epochs(EPOCH))


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"name": "StepLRs"}, "schedule.unknown"),
        ({"name": "StepLR", "warmup_steps": 3}, "optimizer.argument_unknown"),
        ({"name": "cosine", "args": {"T_max": 3}}, "optimizer.argument_unknown"),
        ({"name": "StepLR", "args": {"step_size": 1}, "metric": "loss"}, "schedule.no_metric"),
        ({"name": "ReduceLROnPlateau", "every": "step"}, "schedule.every_with_metric"),
    ],
)
def test_keys_that_contradict_the_kind_of_schedule_are_refused(values: dict[str, Any], code: str) -> None:
    with raises(ValueError, code):
        ScheduleSpec.model_validate(values)


def test_a_cycle_shorter_than_the_run_is_refused() -> None:
    spec = {"name": "OneCycleLR", "args": {"max_lr": 0.1, "total_steps": STEPS - 1}}
    with raises(JobError, "schedule.cycle_too_short", length=STEPS - 1, total=STEPS):
        rates(spec, job_optimizer(model()))


@pytest.mark.parametrize("inner", [{"name": "linear"}, {"name": "ExponentialLR", "every": "epoch"}])
def test_an_inner_schedule_with_keys_that_would_be_ignored_is_refused(inner: dict[str, Any]) -> None:
    with raises(ValueError, "schedule.inner", entry=inner):
        ScheduleSpec(name="ChainedScheduler", args={"schedulers": [inner]})


def test_the_stop_rule_belongs_to_the_work_only_if_the_cycle_ends_with_the_run() -> None:
    cycle: dict[str, Any] = {"name": "OneCycleLR", "args": {"max_lr": 0.1}}
    assert ScheduleSpec(**cycle).ends_with_run
    assert ScheduleSpec(name="ChainedScheduler", args={"schedulers": [cycle]}).ends_with_run
    assert not ScheduleSpec(name="OneCycleLR", args={"max_lr": 0.1, "total_steps": 9}).ends_with_run
    assert not ScheduleSpec(name="cosine").ends_with_run
