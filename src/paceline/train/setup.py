"""`paceline.setup`: make an engine from the four things that every training script has."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.comm import Group
from paceline.comm.backend import join, leave
from paceline.errors import JobError, PlanError
from paceline.job.loss import Loss
from paceline.plan.plan import Plan, Precision
from paceline.split.mesh import READERS, Mesh
from paceline.train.deal import deal
from paceline.train.engine import Engine, Settings
from paceline.train.nonfinite import Policy

if TYPE_CHECKING:
    from paceline.split.apply import Split


def setup(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss | Callable[[Any, Any], torch.Tensor],
    loader: DataLoader[Any],
    *,
    plan: Plan | str = "auto",
    precision: str = "fp32",
    clip_norm: float | None = None,
    nonfinite: Policy = "stop",
    batch_norm: str = "local",
    seed: int = 0,
    deadline_s: float = 300.0,
) -> Engine:
    """Prepare a training loop of one's own for any number of ranks; alone it trains in this process, under torchrun on all ranks.

    Args:
        model: any `nn.Module`. It is moved to this rank's device and stays the same object; where the plan divides it (fsdp, tp, pp, cp,
            ep, remat), its parameters are replaced by this rank's parts, and in a pipeline `engine.model` is this rank's stages.
        optimizer: any optimizer over its parameters that works element by element, where the plan divides them.
        loss: `loss(output, target)`, the mean over the samples of a batch. `paceline.job.loss.Loss` tells how to weigh other items.
        loader: a `DataLoader` as one process would use it. Its `batch_size` is the *global* batch: paceline deals every batch to the
            replicas, so the same script does the same work on any number of them. `shuffle=False` keeps the order.
        plan: `"auto"` (one replica per rank; nothing is measured), a `Plan`, or its text, e.g. `"dp=2 precision=bf16 microbatches=4"`.
        precision: `fp32`, `bf16` (autocast; weights stay fp32) or `fp64`.
        clip_norm: largest L2 norm of the gradient.
        nonfinite: `stop` or `skip` an update whose loss or gradient is NaN or Inf. (`rewind` needs checkpoints: use `paceline.train`.)
        batch_norm: `local` statistics per replica, or `sync` over the global batch.
        seed: of the order of the data and the dropout masks.
        deadline_s: the longest that a rank may keep the others waiting, in seconds.

    Raises:
        JobError, DataError, PlanError: an argument that cannot work, with what to do.
        LaunchError: the other ranks cannot be met.
    """
    if not isinstance(model, nn.Module):
        raise JobError(f"setup needs an nn.Module as model, got {type(model).__name__}")
    if nonfinite not in ("stop", "skip"):
        raise JobError(f"nonfinite={nonfinite!r}: a loop of one's own can stop or skip; rewind needs checkpoints, see paceline.train")
    if precision not in get_args(Precision):
        raise JobError(f"precision={precision!r}: there are {', '.join(get_args(Precision))}")
    if batch_norm not in ("local", "sync"):
        raise JobError(f"batch_norm={batch_norm!r}: there are local (statistics of a replica) and sync (of the global batch)")
    if clip_norm is not None and clip_norm <= 0:
        raise JobError(f"clip_norm={clip_norm:g}: the largest norm of the gradient is more than 0; leave it out to clip nothing")
    _check_optimizer(model, optimizer)
    asked = Plan.parse(plan) if isinstance(plan, str) and plan != "auto" else plan
    group = join(deadline_s=deadline_s, transport=asked.transport if isinstance(asked, Plan) else "auto")
    atexit.register(leave, group)
    chosen = asked if isinstance(asked, Plan) else Plan(dp=group.size)
    _check_ranks(chosen, group)
    if chosen.fused:
        _fuse(optimizer)
    settings = Settings(clip_norm, nonfinite, batch_norm, precision, seed)
    mesh = Mesh.of(chosen, group)
    dealt = deal(loader, mesh.group(*READERS), group, seed)
    if not chosen.splits:
        return Engine(model, optimizer, cast(Loss, loss), dealt, chosen, group, settings)
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    from paceline.train.divided import divide  # heavy

    _agree_on_weights(model, group)
    split = divide(model, chosen, mesh, dealt, cast(Loss, loss), settings)
    _hand_over(optimizer, names, split)
    return Engine(split.model, optimizer, cast(Loss, loss), dealt, chosen, group, settings, split)


def _check_ranks(plan: Plan, group: Group) -> None:
    if plan.ranks != group.size:
        how = f"torchrun --nproc-per-node {plan.ranks}" if plan.ranks > 1 else "plain python"
        raise PlanError(
            f"plan {plan} needs {plan.ranks} ranks, but {group.size} were started. Start it with {how}, or use dp={group.size}."
        )


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    own = set(model.parameters())
    held = [p for g in optimizer.param_groups for p in g["params"]]
    if not any(p in own for p in held):
        raise JobError("the optimizer holds none of the model's parameters; make it from model.parameters() of the model given here")


def _agree_on_weights(model: nn.Module, group: Group) -> None:
    """Give every rank the weights of the first: parts of models that were drawn from different seeds would make no whole."""
    for tensor in (*model.parameters(), *model.buffers()):
        group.broadcast(tensor.detach())


def _hand_over(optimizer: torch.optim.Optimizer, names: dict[Tensor, str], divided: Split) -> None:
    """Have the optimizer step on this rank's parts, with what it remembers of them."""
    state = dict(optimizer.state)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        if any(p not in names for p in group["params"]):
            raise JobError("the optimizer holds parameters that are not the model's; a plan that divides the model cannot divide those")
        held = [(p, names[p]) for p in group["params"] if names[p] in divided.parameters]
        group["params"] = [divided.parameters[name] for _, name in held]
        for whole, name in held:
            layout = divided.parts[name].layout
            if whole in state:
                optimizer.state[divided.parameters[name]] = {
                    key: layout.take(value).clone() if isinstance(value, Tensor) and tuple(value.shape) == layout.full else value
                    for key, value in state[whole].items()
                }


def _fuse(optimizer: torch.optim.Optimizer) -> None:
    if "fused" not in optimizer.defaults:
        raise PlanError(f"fused=on: {type(optimizer).__name__} has no fused step in torch; leave fused out")
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
