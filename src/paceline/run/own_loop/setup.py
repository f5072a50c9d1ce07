"""`paceline.setup`: make an engine from the four things that every training script has."""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.comm import Group
from paceline.comm.backend import join, leave
from paceline.data.deal import deal
from paceline.data.loader import Loader
from paceline.engine.guard import Policy, Settings
from paceline.errors import DataError, JobError, PlanError
from paceline.job.job import Precision
from paceline.job.loss import Loss
from paceline.job.loss_items import ModelsOwn, hands_on_models_loss
from paceline.planning.arguments import AnyPlan, plan_or_auto
from paceline.planning.plan import DATA_AXES, Plan
from paceline.planning.sync_info import sync_info
from paceline.run.own_loop.engine import Engine, OnStep, refuse_model_of_another_engine
from paceline.run.own_loop.optimizer_steps import refuse_own_passes
from paceline.run.process import tell_in_one_line
from paceline.split.mesh import Mesh
from paceline.torch_versions import untested

if TYPE_CHECKING:
    from paceline.split.apply import Split


_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
OptimizersGiven = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]


def setup(
    model: Models,
    optimizer: OptimizersGiven,
    *,
    loss: Loss | Callable[[Any, Any], torch.Tensor] | None = None,
    loader: DataLoader[Any] | None = None,
    plan: AnyPlan = "auto",
    precision: str = "fp32",
    clip_norm: float | None = None,
    nonfinite: Policy = "stop",
    batch_norm: str = "local",
    buffers: str = "same",
    seed: int = 0,
    deadline_s: float = 300.0,
    on_step: Sequence[OnStep] = (),
) -> Engine:
    """Prepare your own training loop for any number of ranks.

    Without a launcher, the loop trains in this process; under torchrun, on all ranks. `plan="auto"` is one replica per
    rank and measures nothing, while `paceline.train` measures the plans that it chooses from.

    Args:
        model: any `nn.Module`, or several in a list or dict. Each is moved to this rank's device and stays the same
            object. If the plan divides a model (fsdp, tp, pp, cp, ep, remat), its parameters are replaced by this
            rank's parts; in a pipeline, `engine.model` is this rank's stages.
        optimizer: any optimizer, or several in a list or dict. Its parameters outside of the model (of a loss module, a
            learned temperature) are kept equal on all ranks, too. If the plan divides the model, the optimizer has to
            work element by element.
        loss: `loss(output, target)`, the mean over the samples of a batch, for `engine.step(batch)`. `paceline.Loss`
            describes losses that count other items than samples. None: the loop computes its own loss and calls
            `engine.backward(loss)` and `engine.update()`.
        loader: a `DataLoader` as one process would use it. Its `batch_size` is the *global* batch, which paceline
            divides among the replicas, so the same script does the same work on any number of them. The order of its
            sampler and its other arguments are kept, see docs/how-to/feed_data.md. None: every rank brings its own
            data, and the losses of all ranks count alike.
        plan: a `Plan`, its text, e.g. `"dp=2 precision=bf16 microbatches=4"`, or `"auto"`: one replica per rank.
        precision: `fp32`, `bf16` (autocast; weights stay fp32), `fp16` (autocast with a loss scale that adapts itself)
            or `fp64`.
        clip_norm: largest L2 norm of the gradient; None clips nothing.
        nonfinite: `stop` or `skip` an update whose loss or gradient is NaN or Inf. (`rewind` needs checkpoints: use
            `paceline.train`.)
        batch_norm: `local` statistics per replica, or `sync` over the global batch.
        buffers: other buffers that the forward pass writes: `same` on all ranks (any difference is an error before the
            update), or `local` to each rank.
        seed: seed of the order of the data and of the dropout masks.
        deadline_s: the longest that a rank may keep the others waiting, in seconds.
        on_step: functions that get the `StepResult` of every `step` and `update`, on every rank; see
            `paceline.tracker`.

    Returns:
        The engine of this rank.

    Raises:
        JobError: model, optimizer, loss or a setting cannot work; the message says what to do.
        DataError: the loader cannot be divided among the ranks.
        PlanError: the plan cannot run here.
        LaunchError: the other ranks do not answer.

    Example:
        >>> engine = paceline.setup(model, optimizer, loss=loss, loader=loader)
        >>> for batch in engine.loader:
        ...     engine.step(batch)
    """
    _check_loss(loss)
    loss = ModelsOwn() if hands_on_models_loss(loss) else loss
    module, optimizers = _one_module(model), _listed(optimizer, torch.optim.Optimizer, "optimizer")
    settings = Settings(clip_norm, nonfinite, batch_norm, precision, seed, buffers)
    _check_settings(settings)
    _check_plain(module)
    _check_optimizers(module, optimizers)
    chosen, group = _join(plan, deadline_s)
    _check_rule(chosen, optimizers)
    refuse_model_of_another_engine(module, group)
    for one in optimizers if chosen.fused else ():
        _fuse(one)
    mesh = Mesh.of(chosen, group)
    dealt = None if loader is None else deal(loader, mesh.group(*DATA_AXES), group, seed)
    extra = _outside(module, optimizers, loss)
    if not chosen.splits:
        _refuse_own_forward(chosen, loss)
        made = Engine(module, optimizers, cast(Loss, loss), dealt, chosen, group, settings, extra=extra)
    else:
        made = _divided(module, optimizers, cast(Loss, loss), dealt, chosen, group, mesh, settings, extra)
    made.models = model
    made.on_step += on_step
    return made


def _join(plan: AnyPlan, deadline_s: float) -> tuple[Plan, Group]:
    asked = plan_or_auto(plan)
    group = join(deadline_s=deadline_s, transport="auto" if asked is None else asked.transport)
    atexit.register(leave, group)
    if group.size > 1:
        tell_in_one_line(group.rank)
    chosen = Plan(dp=group.size) if asked is None else asked
    _check_ranks(chosen, group)
    if group.rank == 0 and (newer := untested()):
        warnings.warn(newer, stacklevel=3)
    return chosen, group


def _divided(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    loss: Loss | None,
    dealt: Loader | None,
    plan: Plan,
    group: Group,
    mesh: Mesh,
    settings: Settings,
    extra: dict[str, Tensor],
) -> Engine:
    if loss is None:
        refuse_own_passes(plan)
    if settings.precision == "fp16":
        raise PlanError(
            f"precision=fp16 needs whole parameters, and plan {plan} divides them; use precision=bf16, or "
            f"dp={group.size}"
        )
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        raise PlanError(f"plan {plan} divides one model, and setup was given {len(model)}; use dp={group.size}")
    trained = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
    if outside := [name for name, tensor in extra.items() if id(tensor) in trained]:
        raise PlanError(
            f"plan {plan} divides the model's parameters, and the optimizer holds others: {', '.join(outside[:3])}. "
            f"Make them parameters of the model, or use dp={group.size}"
        )
    if dealt is None:
        raise DataError(
            f"plan {plan} divides the model by the batches that it gets: give setup a loader, or use dp={group.size}"
        )
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    from paceline.engine.split_model import divide  # heavy

    _agree_on_weights(model, group)
    split = divide(model, plan, mesh, dealt, cast(Loss, loss), settings)
    for optimizer in optimizers:
        _hand_over(optimizer, names, split)
    return Engine(split.model, optimizers, loss, dealt, plan, group, settings, split)


def _one_module(models: Models) -> nn.Module:
    if isinstance(models, Mapping):
        _listed(models, nn.Module, "model")
        return nn.ModuleDict(dict(models))
    if isinstance(models, nn.Module):
        return models
    return nn.ModuleList(_listed(models, nn.Module, "model"))


def _listed(given: Any, kind: type[Any], noun: str) -> list[Any]:
    several = (
        list(given.values())
        if isinstance(given, Mapping)
        else list(given)
        if isinstance(given, (list, tuple))
        else [given]
    )
    for one in several:
        if not isinstance(one, kind):
            known = "an nn.Module as model" if kind is nn.Module else "a torch.optim.Optimizer as optimizer"
            raise JobError(f"setup needs {known}, got {type(one).__name__}")
    if not several:
        raise JobError(f"setup needs at least one {noun}")
    return several


def _check_loss(loss: Any) -> None:
    if isinstance(loss, DataLoader):
        raise JobError(
            "setup got a DataLoader as its loss. Write paceline.setup(model, optimizer, loss=loss, loader=loader); or "
            "paceline.setup(model, optimizer, loader=loader) if your loop computes the loss itself"
        )
    if loss is not None and not callable(loss):
        raise JobError(
            f"setup got a {type(loss).__name__} as loss; it needs a function loss(output, target) or an nn.Module, for "
            "example torch.nn.CrossEntropyLoss()"
        )


def _check_settings(settings: Settings) -> None:
    if settings.nonfinite not in ("stop", "skip"):
        raise JobError(
            f"nonfinite={settings.nonfinite!r}: a loop of one's own can stop or skip; rewind needs checkpoints, see "
            "paceline.train"
        )
    known = (*get_args(Precision), "fp16")
    if settings.precision not in known:
        raise JobError(f"precision={settings.precision!r}: there are {', '.join(known)}")
    if settings.batch_norm not in ("local", "sync"):
        raise JobError(
            f"batch_norm={settings.batch_norm!r}: there are local (statistics of a replica) and sync (of the global "
            "batch)"
        )
    if settings.clip_norm is not None and settings.clip_norm <= 0:
        raise JobError(
            f"clip_norm={settings.clip_norm:g}: the largest norm of the gradient is more than 0; leave it out to clip "
            "nothing"
        )
    if settings.buffers not in ("same", "local"):
        raise JobError(
            f"buffers={settings.buffers!r}: there are same (on all ranks) and local (each replica keeps its own)"
        )


def _outside(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], loss: Any) -> dict[str, Tensor]:
    """Parameters and buffers trained outside of the model, by a name for checkpoints."""
    known: set[Tensor] = {*model.parameters(), *model.buffers()}
    found: dict[str, Tensor] = {}
    if isinstance(loss, nn.Module):
        found |= {f"loss.{name}": t for name, t in loss.state_dict(keep_vars=True).items() if t not in known}
    known |= set(found.values())
    held = dict.fromkeys(p for o in optimizers for g in o.param_groups for p in g["params"])
    found |= {f"optimizer.{i}": p for i, p in enumerate(p for p in held if p not in known)}
    return found


def _refuse_own_forward(plan: Plan, loss: Any) -> None:
    if loss is None and plan.compile != "off":
        raise PlanError(
            f"compile={plan.compile} compiles what engine.step computes; in a loop of your own call model.compile()"
        )
    if loss is None and plan.microbatches > 1:
        raise PlanError(
            f"microbatches={plan.microbatches} divide the batches of engine.step; in a loop of your own call "
            "engine.backward(loss, sync=False) for all parts of a batch but the last"
        )


def _check_ranks(plan: Plan, group: Group) -> None:
    if plan.num_workers:
        raise PlanError(
            f"plan {plan} has loader processes, which are your loader's here: "
            f"DataLoader(…, num_workers={plan.num_workers}), and num_workers=0 in the plan"
        )
    if plan.ranks != group.size:
        how = f"torchrun --nproc-per-node {plan.ranks}" if plan.ranks > 1 else "plain python"
        raise PlanError(
            f"plan {plan} needs {plan.ranks} ranks, but {group.size} were started. Start it with {how}, or use "
            f"dp={group.size}."
        )


def _check_rule(plan: Plan, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    if len(optimizers) > 1 and not sync_info(plan.sync).several_optimizers:
        raise PlanError(f"sync={plan.sync}: this rule trains one optimizer; with several use sync=allreduce")


def _check_optimizers(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    own = set(model.parameters())
    held = [dict.fromkeys(p for g in o.param_groups for p in g["params"]) for o in optimizers]
    if not any(p in own for parameters in held for p in parameters):
        raise JobError(
            "the optimizer holds none of the model's parameters; make it from model.parameters() of the "
            "model given here"
        )
    if len({p for parameters in held for p in parameters}) < sum(map(len, held)):
        raise JobError(
            "a parameter is held by two of the optimizers, so it is not known which one's update it waits for; "
            "give it to one"
        )


def _check_plain(model: nn.Module) -> None:
    """Refuse a model that another library has wrapped for distributed training.

    Its gradients would be summed twice, or its shards taken for whole parameters.
    """
    for name, module in model.named_modules():
        kind = type(module)
        if any(base.__name__ in _WRAPPERS and base.__module__.startswith("torch.") for base in kind.__mro__):
            where = f"the model's {name}" if name else "the model"
            raise JobError(
                f"{where} is wrapped by {kind.__name__}, and paceline distributes the work itself: give setup the "
                "plain model (and choose fsdp=… in the plan)"
            )


def _agree_on_weights(model: nn.Module, group: Group) -> None:
    """Broadcast the first rank's weights.

    Parts of models that were drawn from different seeds would make no whole.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        # an accelerator's collectives take its own memory only, and the model may still be in the host's
        agreed = tensor.detach().to(group.device)
        group.broadcast(agreed)
        if agreed.device != tensor.device:
            tensor.detach().copy_(agreed)


def _hand_over(optimizer: torch.optim.Optimizer, names: dict[Tensor, str], divided: Split) -> None:
    """Make the optimizer step on this rank's parts, with their part of its state."""
    state = dict(optimizer.state)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        held = [(p, names[p]) for p in group["params"] if names[p] in divided.parameters]
        group["params"] = [divided.parameters[name] for _, name in held]
        for whole, name in held:
            layout = divided.parts[name].layout
            if whole in state:
                optimizer.state[divided.parameters[name]] = {
                    key: layout.take(value).clone()
                    if isinstance(value, Tensor) and tuple(value.shape) == layout.full
                    else value
                    for key, value in state[whole].items()
                }


def _fuse(optimizer: torch.optim.Optimizer) -> None:
    if "fused" not in optimizer.defaults:
        raise PlanError(f"fused=on: {type(optimizer).__name__} has no fused step in torch; leave fused out")
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
