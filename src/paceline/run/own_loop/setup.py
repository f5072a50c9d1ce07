"""`paceline.setup`: build an engine from a model, optimizer, loss and loader."""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.comm import Group
from paceline.comm.backend import join, leave
from paceline.data.deal import deal
from paceline.data.loader import Loader
from paceline.engine.guard import Settings
from paceline.errors import DataError, JobError, PlanError
from paceline.job.job import Precision
from paceline.job.loss import Loss
from paceline.job.loss_items import ModelsOwn, hands_on_models_loss
from paceline.job.parameters import is_dense
from paceline.job.zoo.muon import Muon
from paceline.job.zoo.optimizers import Layerwise
from paceline.planning.arguments import AnyPlan, plan_or_auto
from paceline.planning.plan import DATA_AXES, Plan
from paceline.planning.sync_info import sync_info
from paceline.run.own_loop.engine import Engine, OnStep, check_at_exit, refuse_model_of_another_engine
from paceline.run.own_loop.optimizer_steps import refuse_own_passes
from paceline.run.process import tell_in_one_line
from paceline.split.mesh import Mesh
from paceline.torch_versions import untested

if TYPE_CHECKING:
    from paceline.split.apply import Split


_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
P = ParamSpec("P")
OptimizersGiven = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]


def _by_keyword(function: Callable[P, Engine]) -> Callable[P, Engine]:
    """Refuse `loss` and `loader` as positional arguments, which earlier versions allowed."""

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Engine:
        if len(args) > 2:
            raise JobError(
                "setup.not_by_keyword",
                "setup got {count} positional arguments. Only model and optimizer can be positional: write "
                "paceline.setup(model, optimizer, loss=loss, loader=loader).",
                count=len(args),
            )
        return function(*args, **kwargs)

    return checked


@_by_keyword
def setup(
    model: Models,
    optimizer: OptimizersGiven,
    *,
    loss: Loss | Callable[[Any, Any], torch.Tensor] | None = None,
    loader: DataLoader[Any] | None = None,
    plan: AnyPlan = "auto",
    precision: Literal["fp32", "bf16", "fp16", "fp8", "fp64"] = "fp32",
    clip_norm: float | None = None,
    nonfinite: Literal["stop", "skip"] = "stop",
    batch_norm: Literal["local", "sync"] = "local",
    buffers: Literal["same", "local"] = "same",
    seed: int = 0,
    deadline_s: float = 300.0,
    on_step: Sequence[OnStep] = (),
) -> Engine:
    """Prepare your own training loop for any number of ranks.

    Without a launcher, the loop trains in this process. Under torchrun, it trains on all ranks. `plan="auto"` means one
    replica per rank; unlike `paceline.train`, `setup` measures no plans.

    Args:
        model: any `nn.Module`, or several in a list or dict. Each is moved to this rank's device, and remains the same
            object. If the plan divides the model (fsdp, tp, pp, cp, ep, remat), its parameters are replaced with this
            rank's parts. With a pipeline, `engine.model` is this rank's stages.
        optimizer: any optimizer, or several in a list or dict. Parameters outside of the model, such as those of a loss
            module, are kept equal on all ranks as well. If the plan divides the model, the optimizer must work
            elementwise.
        loss: `loss(output, target)`, the mean loss over the samples of a batch, for `engine.step(batch)`. Use
            `paceline.Loss` for a mean over other items, such as tokens. With None, the loop computes the loss itself,
            and calls `engine.backward(loss)` and `engine.update()`.
        loader: a `DataLoader` as in a script for one process. Its `batch_size` is the *global* batch size; each
            replica gets a share. The sampler's order and the other arguments stay in effect, see
            docs/how-to/feed_data.md. With None, every rank uses its own data, and all ranks' losses have equal weight.
        plan: a `Plan`, its text, such as `"dp=2 precision=bf16 microbatches=4"`, or `"auto"` for one replica per rank.
        precision: `fp32`, `bf16` (autocast; weights stay fp32), `fp16` (autocast with dynamic loss scaling), `fp8`
            (`bf16` with linear layers in float8) or `fp64`.
        clip_norm: maximum L2 norm of the gradient; None disables clipping.
        nonfinite: `stop` or `skip`: what to do if the loss or gradient is NaN or Inf. (`rewind` needs checkpoints, so
            only `paceline.train` supports it.)
        batch_norm: `local` for statistics per replica, or `sync` for statistics of the global batch.
        buffers: other buffers that the forward pass writes: `same` on all ranks (a difference raises an error before
            the update), or `local` to each rank.
        seed: seed of the sample order and of the dropout masks.
        deadline_s: maximum time in seconds that the other ranks wait for a rank.
        on_step: callbacks that get the `StepResult` of every `step` and `update`, on every rank; see
            `paceline.tracker`.

    Returns:
        The engine of this rank.

    Raises:
        JobError: the model, optimizer, loss or a setting is unsupported; the message has a remedy.
        DataError: the loader cannot be divided among the ranks.
        PlanError: the plan cannot run here.
        LaunchError: the other ranks do not respond.

    Example:
        >>> engine = paceline.setup(model, optimizer, loss=loss, loader=loader)
        >>> for batch in engine.loader:
        ...     engine.step(batch)
    """
    _check_loss(loss)
    loss = ModelsOwn() if hands_on_models_loss(loss) else loss
    module, optimizers = _one_module(model), _listed(optimizer, torch.optim.Optimizer, "optimizer")
    settings = Settings(clip_norm, nonfinite, batch_norm, precision, seed, buffers, run_ahead=True)
    _check_settings(settings)
    _check_plain(module)
    _check_optimizers(module, optimizers)
    chosen, group = _join(plan, deadline_s)
    _check_rule(chosen, optimizers)
    _check_loss_scale(chosen, settings)
    refuse_model_of_another_engine(module, group)
    for one in optimizers if chosen.fused else ():
        _fuse(one, module)
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
    atexit.unregister(check_at_exit)
    atexit.register(check_at_exit)  # registered last, so it runs before `leave`
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
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        raise PlanError(
            "setup.several_models",
            "plan {plan} divides one model, but setup was given {models}. Use dp={size}.",
            plan=plan,
            models=len(model),
            size=group.size,
        )
    trained = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
    if outside := [name for name, tensor in extra.items() if id(tensor) in trained]:
        raise PlanError(
            "setup.parameters_outside",
            "plan {plan} divides the model's parameters, but the optimizer also contains other parameters: "
            "{outside}. Make them parameters of the model, or use dp={size}.",
            plan=plan,
            outside=list(outside[:3]),
            size=group.size,
        )
    whole = [o for o in optimizers if isinstance(o, (torch.optim.Muon, torch.optim.Adafactor, Layerwise, Muon))]
    if whole and (axes := [axis for axis in ("fsdp", "tp", "ep") if getattr(plan, axis) > 1]):
        raise PlanError(
            "setup.needs_whole_parameters",
            "plan {plan} divides the model's parameters ({axes}), but {optimizer} needs whole parameters. Use an "
            "elementwise optimizer such as AdamW, use dp={size}, or train a job, in which optimizer: muon, lars and "
            "lamb run on divided parameters.",
            plan=plan,
            axes=axes,
            optimizer=type(whole[0]).__name__,
            size=group.size,
        )
    if dealt is None:
        raise DataError(
            "setup.loader_needed",
            "plan {plan} needs the batches to divide the model. Pass a loader to setup, or use dp={size}.",
            plan=plan,
            size=group.size,
        )
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    from paceline.engine.split_model import divide  # imported here, because the import is slow

    _broadcast_weights(model, group)
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
            raise JobError(
                "setup.wrong_type",
                "setup needs {wanted}, got {class_name}",
                wanted=known,
                class_name=type(one).__name__,
            )
    if not several:
        raise JobError("setup.nothing_given", "setup needs at least one {noun}", noun=noun)
    return several


def _check_loss(loss: Any) -> None:
    if isinstance(loss, DataLoader):
        raise JobError(
            "setup.loader_as_loss",
            "a DataLoader was passed to setup as the loss. Use paceline.setup(model, optimizer, loss=loss, "
            "loader=loader), or paceline.setup(model, optimizer, loader=loader) if your loop computes the loss "
            "itself.",
        )
    if loss is not None and not callable(loss):
        raise JobError(
            "setup.loss_invalid",
            "a {class_name} was passed to setup as the loss. The loss must be a function loss(output, target) or "
            "an nn.Module, for example torch.nn.CrossEntropyLoss().",
            class_name=type(loss).__name__,
        )


def _check_settings(settings: Settings) -> None:
    if settings.nonfinite not in ("stop", "skip"):
        raise JobError(
            "setup.nonfinite_invalid",
            "nonfinite={nonfinite!r}: your own loop supports only stop and skip. To rewind, use paceline.train, "
            "which has checkpoints.",
            nonfinite=settings.nonfinite,
        )
    known = get_args(Precision)
    if settings.precision not in known:
        raise JobError(
            "setup.precision_invalid",
            "precision must be one of {choices}, not {precision!r}",
            precision=settings.precision,
            choices=list(known),
        )
    if settings.batch_norm not in ("local", "sync"):
        raise JobError(
            "setup.batch_norm_invalid",
            "batch_norm={batch_norm!r} is neither local (statistics of a replica) nor sync (of the global batch)",
            batch_norm=settings.batch_norm,
        )
    if settings.clip_norm is not None and settings.clip_norm <= 0:
        raise JobError(
            "setup.clip_norm_invalid",
            "clip_norm={clip_norm:g}: the largest norm of the gradient must be more than 0. Leave it out to "
            "disable clipping.",
            clip_norm=settings.clip_norm,
        )
    if settings.buffers not in ("same", "local"):
        raise JobError(
            "setup.buffers_invalid",
            "buffers={buffers!r} is neither same (on all ranks) nor local (each replica keeps its own)",
            buffers=settings.buffers,
        )


def _outside(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], loss: Any) -> dict[str, Tensor]:
    """Return tensors of the loss and optimizers outside of the model.

    The keys are the tensors' names in checkpoints.
    """
    known: set[Tensor] = {*model.parameters(), *model.buffers()}
    found: dict[str, Tensor] = {}
    if isinstance(loss, nn.Module):
        found |= {f"loss.{name}": t for name, t in loss.state_dict(keep_vars=True).items() if t not in known}
    known |= set(found.values())
    held = dict.fromkeys(p for o in optimizers for g in o.param_groups for p in g["params"])
    found |= {f"optimizer.{i}": p for i, p in enumerate(p for p in held if p not in known)}
    return found


def _refuse_own_forward(plan: Plan, loss: Any) -> None:
    if loss is None and plan.microbatches > 1:
        raise PlanError(
            "setup.microbatches",
            "microbatches={microbatches} divides only the batches of engine.step. In your own loop, call "
            "engine.backward(loss, sync=False) for all parts of a batch except the last.",
            microbatches=plan.microbatches,
        )


def _check_ranks(plan: Plan, group: Group) -> None:
    if plan.num_workers:
        raise PlanError(
            "setup.num_workers",
            "plan {plan} sets num_workers, but in your own loop the DataLoader starts its processes. Write "
            "DataLoader(…, num_workers={num_workers}), and num_workers=0 in the plan",
            plan=plan,
            num_workers=plan.num_workers,
        )
    if plan.ranks != group.size:
        how = f"torchrun --nproc-per-node {plan.ranks}" if plan.ranks > 1 else "plain python"
        raise PlanError(
            "setup.ranks_differ",
            "plan {plan} needs {ranks} ranks, but {started} were started. Start it with {how}, or use dp={started}.",
            plan=plan,
            ranks=plan.ranks,
            started=group.size,
            how=how,
        )


def _check_rule(plan: Plan, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    if len(optimizers) > 1 and not sync_info(plan.sync).several_optimizers:
        raise PlanError(
            "setup.several_optimizers",
            "sync={sync} supports one optimizer. With several optimizers, use sync=allreduce.",
            sync=plan.sync,
        )


def _check_loss_scale(plan: Plan, settings: Settings) -> None:
    """Refuse fp16 if the plan divides parameters or makes gradients inexact."""
    if (plan.precision or settings.precision) != "fp16":
        return
    if plan.splits:
        raise PlanError(
            "setup.fp16_divided",
            "precision=fp16 needs whole parameters, but plan {plan} divides them. Use precision=bf16, or dp={size}.",
            plan=plan,
            size=plan.ranks,
        )
    for key, value, exact in (
        ("sync", plan.sync, sync_info(plan.sync).exact),
        ("compress", plan.compress, plan.compress == "none"),
    ):
        if not exact:
            raise PlanError(
                "setup.fp16_inexact",
                "precision=fp16 scales the loss, but {key}={value} stores errors of scaled gradients. Use "
                "precision=bf16, or leave out {key}.",
                key=key,
                value=value,
            )


def _check_optimizers(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    own = set(model.parameters())
    held = [dict.fromkeys(p for g in o.param_groups for p in g["params"]) for o in optimizers]
    if not any(p in own for parameters in held for p in parameters):
        raise JobError(
            "setup.optimizer_of_other_model",
            "the optimizer contains none of the model's parameters. Create it from model.parameters() of the model "
            "that setup is given.",
        )
    if len({p for parameters in held for p in parameters}) < sum(map(len, held)):
        raise JobError(
            "setup.parameter_of_two_optimizers",
            "two of the optimizers contain the same parameter, so it is not clear which of them updates it. Give "
            "it to only one optimizer.",
        )


def _check_plain(model: nn.Module) -> None:
    """Refuse a model that another library has wrapped for distributed training.

    Its gradients would be summed twice, or paceline would treat its shards as whole parameters.
    """
    for name, module in model.named_modules():
        kind = type(module)
        if any(base.__name__ in _WRAPPERS and base.__module__.startswith("torch.") for base in kind.__mro__):
            where = f"the model's {name}" if name else "the model"
            raise JobError(
                "setup.wrapped",
                "{where} is wrapped in {class_name}, but paceline distributes the work itself. Pass the plain "
                "model to setup (and choose fsdp=… in the plan).",
                where=where,
                class_name=kind.__name__,
            )


def _broadcast_weights(model: nn.Module, group: Group) -> None:
    """Broadcast the first rank's weights and buffers.

    Otherwise ranks with different seeds would hold parts of different models.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        # the model may still be on the host, but an accelerator's collectives need device memory
        common = tensor.detach().to(group.device)
        group.broadcast(common)
        if common.device != tensor.device:
            tensor.detach().copy_(common)


def _hand_over(optimizer: torch.optim.Optimizer, names: dict[Tensor, str], divided: Split) -> None:
    """Replace the optimizer's parameters and states with this rank's parts."""
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


def _fuse(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    if "fused" not in optimizer.defaults:
        raise PlanError(
            "setup.not_fused",
            "fused=on: torch has no fused step for {class_name}. Leave fused out.",
            class_name=type(optimizer).__name__,
        )
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and not is_dense(parameter):
                raise PlanError(
                    "setup.fused_with_gaps",
                    "fused=on: torch's fused step would update {parameter} of shape {shape} wrongly, because its "
                    "memory has gaps or overlaps. Create it with nn.Parameter(tensor.contiguous()), or leave fused "
                    "out.",
                    parameter=names.get(parameter, "a parameter"),
                    shape=list(parameter.shape),
                )
        group["fused"], group["foreach"] = True, False
