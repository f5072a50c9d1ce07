"""Parity: a few steps of a job under a plan, against the same steps in one process and float64, parameter by parameter.

The one process writes down what it computed; every rank of the plan then holds its own pieces against it, so nothing is gathered, and
replicas that drifted apart show as well. Gradients are those that the optimizer was given.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.job.batch import Batch
from paceline.job.job import Job
from paceline.plan.plan import Plan
from paceline.split.layout import Layout
from paceline.split.parts import local
from paceline.train.engine import Engine
from paceline.train.loader import Loader
from paceline.train.loop import build_engine, built, seed_all

REFERENCE = "one process, float64"


VANISHING = 1e-3


@dataclass
class Piece:
    """How far a rank's piece of a tensor is from the reference's: the L2 norm of the difference, over that of the whole reference.

    Some gradients are zero but for rounding (a bias of attention's keys shifts all scores alike), and biases begin at zero, so nothing is
    measured by less than a thousandth of the norm of all gradients, or of all parameters.
    """

    gradient: float
    parameter: float


@dataclass
class Compared:
    """What one rank found.

    Attributes:
        losses: of every step; the same on all ranks.
        reference_losses: those of the one process.
        steps: per step, for every parameter that the rank holds a piece of.
        outputs: for every module that the rank runs, what it added up of its outputs in the first step: number, sum, sum of squares.
        report: what the plan divided, in words.
    """

    losses: list[float] = field(default_factory=list)
    reference_losses: list[float] = field(default_factory=list)
    steps: list[dict[str, Piece]] = field(default_factory=list)
    outputs: dict[str, list[float]] = field(default_factory=dict)
    report: list[str] = field(default_factory=list)


def run_reference(arguments: list[str]) -> None:
    """Take the steps in this process alone: `FOLDER STEPS PLAN`, where the plan is of one rank."""
    folder, steps, plan = Path(arguments[0]), int(arguments[1]), Plan.parse(arguments[2])
    engine = _engine(Job.load(folder / "job.yaml"), plan, Group())
    initial = {f"parameter/{name}": _copy(p) for name, p in engine.named_parameters().items()}
    save_file(initial, folder / "reference-0.safetensors")
    outputs = _Outputs(engine.model)
    losses = []
    for step, batch in enumerate(_steps(engine.loader, steps), 1):
        losses.append(engine.step(batch).loss)
        outputs.close()
        held = engine.named_parameters()
        tensors = {f"parameter/{name}": _copy(p) for name, p in held.items()}
        tensors |= {f"gradient/{name}": _copy(p.grad) for name, p in held.items() if p.grad is not None}
        save_file(tensors, folder / f"reference-{step}.safetensors")
    (folder / "reference.json").write_text(json.dumps({"losses": losses, "outputs": outputs.found}))
    engine.close()


def run_plan(arguments: list[str]) -> None:
    """Take the steps as a rank of the plan, and write what differs: `FOLDER STEPS PLAN OUT`."""
    folder, steps, plan = Path(arguments[0]), int(arguments[1]), Plan.parse(arguments[2])
    job = Job.load(folder / "job.yaml")
    with joined(deadline_s=job.deadline_s, transport=plan.transport) as group:
        engine = _engine(job, plan, group)
        found = Compared(reference_losses=json.loads((folder / "reference.json").read_text())["losses"])
        found.report = engine.split.report if engine.split is not None else []
        outputs = _Outputs(engine.model) if engine.split is None or engine.split.pipeline is None else None
        for step, batch in enumerate(_steps(engine.loader, steps), 1):
            found.losses.append(engine.step(batch).loss)
            if outputs is not None:
                outputs.close()
            found.steps.append(_compare(engine, load_file(folder / f"reference-{step}.safetensors")))
        found.outputs = outputs.found if outputs is not None else {}
        (Path(arguments[3]) / f"rank-{group.rank}.json").write_text(json.dumps(asdict(found)))
        engine.close()


def _engine(job: Job, plan: Plan, group: Group) -> Engine:
    if "PACELINE_STATUS" in os.environ:  # a process that a launcher started for this alone
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is to be saved
    seed_all(job.seed)
    model = built(job, plan)
    without_dropout(model if isinstance(model, nn.Module) else model.model)
    data = job.data.build(input_shape=job.model.input_shape(), seed=job.seed)
    return build_engine(job, plan, model, data, group)


def without_dropout(model: nn.Module) -> None:
    """Have no module drop anything: masks are drawn per rank, so they are not the same under two plans."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _compare(engine: Engine, reference: dict[str, Tensor]) -> dict[str, Piece]:
    parts, found = engine.parts, {}
    least, least_parameter = _whole_norm(reference, "gradient/") * VANISHING, _whole_norm(reference, "parameter/") * VANISHING
    for name, held in engine.named_parameters().items():
        layout = parts[name].layout if parts is not None else Layout.whole(held.shape)
        gradient = reference.get(f"gradient/{name}")
        found[name] = Piece(
            _distance(held.grad, gradient, layout, least), _distance(held, reference[f"parameter/{name}"], layout, least_parameter)
        )
    return found


def _whole_norm(reference: dict[str, Tensor], kind: str) -> float:
    tensors = [t for name, t in reference.items() if name.startswith(kind)]
    return math.hypot(*(norm.item() for norm in torch._foreach_norm(tensors)))


def _distance(own: Tensor | None, reference: Tensor | None, layout: Layout, least: float) -> float:
    """The relative L2 distance; infinite where only one of the two is there and is not zero."""
    if own is None or reference is None:
        there = own if own is not None else reference
        return 0.0 if there is None or not there.any() else math.inf
    norm = max(float(torch.linalg.vector_norm(reference)), least)
    difference = float(torch.linalg.vector_norm(local(own).detach().double().cpu() - layout.take(reference)))
    return difference / norm if norm else difference


class _Outputs:
    """Adds up what every module puts out. A mean does not depend on who computed which part, nor on how many computed the same."""

    def __init__(self, model: nn.Module) -> None:
        self.found: dict[str, list[float]] = {}
        self._hooks = [m.register_forward_hook(self._add(name)) for name, m in model.named_modules() if name]

    def _add(self, name: str) -> Any:
        def add(module: nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, (tuple, list)) and output else output
            if not isinstance(first, Tensor) or not first.is_floating_point():
                return
            wide = first.detach().double()
            sums = self.found.setdefault(name, [0.0, 0.0, 0.0])
            for i, value in enumerate((wide.numel(), wide.sum().item(), wide.square().sum().item())):
                sums[i] += value

        return add

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _steps(loader: Loader, steps: int) -> Iterator[Batch | None]:
    done = 0
    while True:
        for batch in loader:
            if done == steps:
                return
            yield batch
            done += 1


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().double().cpu().clone(memory_format=torch.contiguous_format)
