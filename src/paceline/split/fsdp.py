"""FSDP2 (`fully_shard`): each rank keeps a slice of every parameter, gradient and optimizer state.

`zero` selects the stage of ZeRO (Rajbhandari et al., 2020, arXiv:1910.02054). At all stages, every rank keeps 1 / ranks
of the parameters and of the other state between steps. The stages differ in the memory within a step and in the number
of bytes sent:

====  ==================================  =================================  ============================
zero  parameters                          gradients                          sent per step
====  ==================================  =================================  ============================
3     gathered for each block's forward   reduce-scattered in every          2 all-gathers and 1
      and again for its backward pass     microbatch                         reduce-scatter for each
      (those outside of blocks stay                                          microbatch
      between the two)
2     gathered once a step                reduce-scattered in every          1 all-gather, and a
                                          microbatch                         reduce-scatter for each
                                                                             microbatch
1     gathered once a step                whole until the last microbatch    1 of each
====  ==================================  =================================  ============================

In a pipeline, parameters stay gathered during the step. With zero=3, each microbatch would gather a stage twice, and
zero-bubble schedules would need a third gather. Gradients are reduced once per step, as with zero=1, except that zero=2
reduce-scatters those of every microbatch. Schedules that compute gradients of weights later (`V_SCHEDULES`) reduce once
per step in any case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.comm.positions import in_layer
from paceline.device import uploaded
from paceline.errors import PlanError
from paceline.job.batch import Batch
from paceline.job.job import base_precision
from paceline.split.forward_trace import ForwardTrace, ModuleCall, Node, Observed, is_in, reachable
from paceline.split.layout import Parts, replace_tensors
from paceline.split.record_forward import Call, trace_forward


class FullySharded:
    """FSDP2 for the modules of a rank, with the settings that change during a step.

    The modules are sharded in place: parameters become DTensors, and `parts` records the slices. Each block is gathered
    and reduced as one unit. The remainder of a stage is another unit. All reductions are sums.

    Three kinds of parameters are special. A block that shares a parameter with a module outside of the block is
    gathered with the remainder. Scalar parameters cannot be sliced, so every rank keeps them, and `parts` marks their
    gradients as partial sums along fsdp. A parameter that no rank uses in a step has no gradient afterwards, as in a
    single process. A *block*, however, must run on all ranks or on none, because all ranks participate in its
    collectives.

    With `precision="bf16"`, parameters are gathered in bfloat16, which halves the gathered bytes, and inputs are cast
    to bfloat16. Gradients are summed in float32, and shards are stored in float32. The output of a stage is cast back
    to float32 for the loss. In contrast to autocast, norms, softmax and residual sums also run in bfloat16. Batch norms
    do not support bfloat16 weights, so a model with batch norms uses autocast instead.

    Args:
        stages: the model or the rank's pipeline stages, on the meta device or real.
        blocks: modules within the stages that do not overlap (`find_blocks`).
        named: all parameters of the stages, by their keys in `parts`.
        devices: the one-dimensional mesh along fsdp.
        zero: 1, 2 or 3 (see the module's table).
        offload: whether shards, gradients and optimizer state are in host memory, from which parameters are gathered.
            If the rank computes on the CPU, this only adds a note.
        pipelined: True if PyTorch's pipeline schedules run the stages.
        deferred: True if their schedule computes the gradients of weights after the other gradients.

    Attributes:
        casts: True if FSDP2 casts parameters and inputs to bfloat16; if False, `bf16` requires autocast.
        offload: True if the shards are in host memory and the rank computes on another device (see `allocate`).
        notes: notes for the user.

    Raises:
        PlanError: the trainable parameters of a block differ in dtype.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        blocks: Sequence[nn.Module],
        named: Mapping[str, nn.Parameter],
        parts: Parts,
        devices: DeviceMesh,
        *,
        zero: int,
        precision: str,
        offload: bool,
        pipelined: bool,
        deferred: bool = False,
    ) -> None:
        bf16 = base_precision(precision) == "bf16"
        self.casts = bf16 and not any(isinstance(m, _BatchNorm) for stage in stages for m in stage.modules())
        self.offload = offload and devices.device_type != "cpu"
        self._zero, self._pipelined, self._devices = zero, pipelined, devices
        scalars = {parameter for parameter in named.values() if parameter.dim() == 0}
        _note_slices(named, parts, devices, scalars)
        for parameter in named.values():
            # FSDP2 requires contiguous parameters
            parameter.data = parameter.data.contiguous()
        # FSDP2 assigns to the `data` of buffers, which torch does not allow between the CPU and some devices
        here = devices.device_type
        replace_tensors(nn.ModuleList(stages), None, lambda b: b if b.is_meta or b.device.type == here else b.to(here))
        options: dict[str, Any] = {
            "mesh": devices,
            "ignored_params": scalars,
            "offload_policy": CPUOffloadPolicy() if self.offload else OffloadPolicy(),
        }
        narrow = (torch.bfloat16, torch.float32, torch.float32) if self.casts else ()
        again = zero == 3 and not pipelined
        pieces = _own_pieces(stages, blocks)
        _refuse_mixed_types(stages, pieces, {parameter: name for name, parameter in named.items()})
        for block in pieces:
            policy = MixedPrecisionPolicy(*narrow[:2])
            fully_shard(block, reshard_after_forward=again, mp_policy=policy, **options)
        for stage in stages:
            policy = MixedPrecisionPolicy(*narrow)
            fully_shard(stage, reshard_after_forward=None if again else False, mp_policy=policy, **options)
            _sum_only(stage)
            if here != "cpu":
                _name_collectives(stage)
        self._stages = [stage for stage in stages if isinstance(stage, FSDPModule)]
        self._handles = [stage.register_forward_hook(_forget_gathered) for stage in stages]
        scatters = pipelined and zero == 2 and not deferred
        self._used = _Used(stages, scatters=scatters)
        whole = f"; {len(scalars)} without dimensions stay whole" if scalars else ""
        self.notes = [
            f"fsdp: {len(set(named.values())) - len(scalars)} parameters in {devices.size()} shards along dimension 0, "
            f"gathered as {len(pieces) + len(stages)} units{whole}"
        ]
        if offload and not self.offload:
            self.notes.append(
                "offload: this rank computes on the CPU, so parameters and optimizer state lie in host memory as they "
                "are"
            )
        if bf16 and not self.casts:
            self.notes.append(
                f"precision={precision}: the model has batch norms, which need float32 weights; fsdp gathers float32 "
                "and autocast casts"
            )
        if pipelined and zero != 1:
            whole = "parameters gathered" if scatters else "parameters gathered, and gradients whole,"
            self.notes.append(f"zero={zero}: a pipeline keeps {whole} within a step; between steps they are slices")

    def microbatch(self, last: bool) -> None:
        """Set whether this microbatch reduces gradients and reshards parameters.

        Call this before each microbatch if the model has no pipeline.

        `last` is True for the last microbatch of a step.
        """
        if self._pipelined or self._zero == 3:
            return
        for stage in self._stages:
            stage.set_reshard_after_backward(last)
            if self._zero == 1:
                stage.set_requires_gradient_sync(last)

    def after_backward(self) -> None:
        """Remove the gradients of parameters that no rank used in the step.

        FSDP2 leaves zeros as gradients of such parameters, but a single process has no gradient for them.
        """
        self._used.drop_unused(self._devices)

    def whole_gradients(self) -> list[Tensor]:
        """Return the gradients of gathered parameters that are not reduced yet."""
        held = [one for group in self._used.groups for one in group.fsdp_params if hasattr(one, "_unsharded_param")]
        gradients = [one.unsharded_accumulated_grad for one in held] + [one._unsharded_param.grad for one in held]
        return [gradient for gradient in gradients if gradient is not None]

    def close(self) -> None:
        """Free gathered parameters, even after a failed step.

        The modules stay sharded.
        """
        for handle in self._handles:
            handle.remove()
        self._used.close()
        for stage in self._stages:
            # the first forward pass sets this attribute; before that, no parameter is gathered
            if stage._get_fsdp_state()._is_root:
                stage.reset_iter_state()


def _note_slices(
    named: Mapping[str, nn.Parameter], parts: Parts, devices: DeviceMesh, scalars: set[nn.Parameter]
) -> None:
    """Record this rank's slice of each parameter.

    FSDP2 slices dim 0 like `torch.chunk`: all slices have the same size, rounded up, except for a smaller slice and
    empty slices at the end.
    """
    rank, size = devices.get_local_rank(), devices.size()
    for name, parameter in named.items():
        part = parts[name]
        if parameter in scalars:
            part.summed.add("fsdp")
            continue
        rows = parameter.shape[0]
        each = -(-rows // size)
        part.layout = part.layout.narrow(0, min(rank * each, rows), min((rank + 1) * each, rows))
        part.sharded.add("fsdp")


def _own_pieces(stages: Sequence[nn.Module], blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks that share no parameter with modules outside of the block.

    In FSDP2, only one unit can gather a given parameter.
    """
    holding: dict[nn.Parameter, set[nn.Module]] = {}
    for module in (module for stage in stages for module in stage.modules()):
        for parameter in module._parameters.values():
            if parameter is not None:
                holding.setdefault(parameter, set()).add(module)
    own = []
    for block in blocks:
        # a module may also be in another block
        inside = set(block.modules())
        holders = {module for p in block.parameters() for module in holding[p]}
        if block not in stages and holders <= inside and holders.isdisjoint(reachable(stages, without=[block])):
            own.append(block)
    return own


def _refuse_mixed_types(
    stages: Sequence[nn.Module], pieces: Sequence[nn.Module], names: Mapping[nn.Parameter, str]
) -> None:
    """Raise an error if the trainable parameters of a unit differ in dtype.

    FSDP2 reduces a unit in one collective, and would only fail in the first step.
    """
    within = {parameter for piece in pieces for parameter in piece.parameters()}
    remainders = [[p for p in stage.parameters() if p not in within] for stage in stages]
    for piece in (*(list(piece.parameters()) for piece in pieces), *remainders):
        first: dict[torch.dtype, str] = {}
        for parameter in piece:
            if parameter.requires_grad and parameter.dim():
                first.setdefault(parameter.dtype, names[parameter])
        if len(first) > 1:
            found = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in first.items())
            raise PlanError(
                "plan.mixed_types",
                "fsdp reduces the gradients of a block in one collective, so the trainable parameters of a block "
                "must have the same type: {types}. Convert the whole model to one type (model.float()), or freeze "
                "the parameters of the other type.",
                types=found,
            )


def _sum_only(stage: nn.Module) -> None:
    """Use `ReduceOp.SUM` for all reductions, because losses are scaled in advance."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    assert isinstance(stage, FSDPModule)
    # Some ranks may not use a parameter, such as an expert. Without this setting, the ranks' collectives would differ
    # in size.
    stage.set_reduce_scatter_unused_params(True)


def _name_collectives(stage: nn.Module) -> None:
    """Show each unit's name in the stacks of its collectives.

    Errors about hung ranks name the unit. The unit of the stage itself is named after its first layer.
    """
    units = {name: module for name, module in stage.named_modules() if isinstance(module, FSDPModule)}
    layers = [name.rpartition(".")[0] for name, _ in stage.named_parameters()]
    outside = (layer for layer in layers if not any(f"{layer}.".startswith(f"{unit}.") for unit in units if unit))
    first = next(outside, "")
    for name, module in units.items():
        for comm, install in (
            (DefaultAllGather, module.set_custom_all_gather),
            (DefaultReduceScatter, module.set_custom_reduce_scatter),
        ):
            install(type(comm.__name__, (comm,), {"__call__": in_layer(comm.__call__, name or first)})())


def _forget_gathered(stage: nn.Module, inputs: Any, output: Any) -> None:
    """Reshard after a forward pass without gradients, so the next step gathers current weights."""
    if not torch.is_grad_enabled():
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class _Used:
    """Flags of the parameters that received a gradient in this step on any rank.

    FSDP2 sets the gradients of all other parameters to zero, and an optimizer would apply these zeros. The flags are
    read from FSDP2's parameter groups, as in PyTorch's own `PipelineStage`, because gathered parameters have no public
    name and zero-bubble schedules set gradients without running hooks.

    Args:
        scatters: True to reduce-scatter the gradients of each microbatch of a pipeline, although torch's stages ask for
            that only at the end of a step.
    """

    def __init__(self, stages: Sequence[nn.Module], *, scatters: bool) -> None:
        self.flags: dict[Any, bool] = {}
        self._scatters = scatters
        modules = [module for stage in stages for module in stage.modules() if isinstance(module, FSDPModule)]
        self.groups: list[Any] = [g for module in modules for g in module._get_fsdp_state()._fsdp_param_groups]
        for group in self.groups:
            self.flags |= {one: False for one in group.fsdp_params if one.sharded_param.requires_grad}
            group.post_backward = self._noting(group)

    def _noting(self, group: Any) -> Any:
        reduce = group.post_backward

        def note_and_reduce(*unused: Any) -> None:
            for one in group.fsdp_params:
                if one in self.flags and not self.flags[one] and hasattr(one, "_unsharded_param"):
                    self.flags[one] = (
                        one._unsharded_param.grad is not None or one.unsharded_accumulated_grad is not None
                    )
            if self._scatters:
                # only the call at the end of a step reshards, and then nothing is left to reduce
                group.reduce_grads = not group.reshard_after_backward
            reduce(*unused)

        return note_and_reduce

    def drop_unused(self, devices: DeviceMesh) -> None:
        flags = uploaded([float(f) for f in self.flags.values()], torch.float32, torch.device(devices.device_type))
        dist.all_reduce(flags, group=devices.get_group())
        for one, used in zip(self.flags, flags.tolist(), strict=True):
            if not used:
                one.sharded_param.grad = None
            self.flags[one] = False

    def close(self) -> None:
        for group in self.groups:
            del group.post_backward


def watched(model: nn.Module, example: Batch, call: Call, device: torch.device) -> tuple[ForwardTrace | None, Observed]:
    """Trace a forward pass without values; return the trace and the observations.

    The trace is None if the model cannot be traced without its weights.
    """
    observed = Observed()
    names = {name for name, _ in model.named_modules()}
    try:
        return trace_forward(model, example, call, device, whole=names, observed=observed), observed
    except Exception:  # noqa: BLE001 - any error of the model's code on shapes; a real fault raises again in training
        return None, observed


def refuse_writes(observed: Observed) -> None:
    """Raise an error if the forward pass changes parameters, because fsdp would lose the change.

    Raises:
        PlanError: the forward pass changes a parameter.
    """
    for name, operation in observed.written.items():
        how = "an nn.Embedding with max_norm" if operation.startswith("aten.embedding_renorm_") else operation
        raise PlanError(
            "plan.parameter_changed_in_forward",
            "fsdp: the model's forward pass changes its parameter {name} ({how}), but fsdp gathers the parameter for "
            "one pass and then discards it. Change the parameter after the optimizer's step instead, or use fsdp=1.",
            name=name,
            how=how,
        )


def inseparable_blocks(blocks: Sequence[str], trace: ForwardTrace | None, observed: Observed) -> dict[str, str]:
    """Map blocks that must be gathered with the remainder of the model to reasons."""
    if observed.differentiates:
        return dict.fromkeys(blocks, "the forward pass runs autograd itself")
    if observed.transformed:
        return dict.fromkeys(blocks, "it is called within a transform of torch.func")
    found: dict[str, str] = {}
    for block in blocks:
        if any(is_in(name, block) for name in observed.substituted):
            found[block] = "it is called with other tensors in place of its parameters"
        elif block in observed.direct:
            found[block] = "its forward is called past its hooks"
    if trace is not None:
        for v in trace.module_calls:
            if v.name in blocks and any(start < v.enter < stop for start, stop in observed.functions):
                found.setdefault(
                    v.name, "it is called within a torch.autograd.Function, whose backward pass is its own"
                )
        for block, reason in (*_in_operations(blocks, trace), *_changed_views(blocks, trace)):
            found.setdefault(block, reason)
    return found


def _in_operations(blocks: Sequence[str], trace: ForwardTrace) -> Iterator[tuple[str, str]]:
    owner = {storage: b for storage, name in trace.parameters.items() for b in blocks if is_in(name, b)}
    # time of the first write to each storage
    made: dict[int, int] = {}
    for step in trace.steps:
        for node in step.makes:
            made.setdefault(node[0], step.time)
        around = {module_call.name: module_call for module_call in _around(trace, step.module_call)}
        for node in step.reads:
            if (block := owner.get(node[0])) is not None and block not in around:
                yield block, f"{trace.parameters[node[0]]} is used outside of it"
        for storage in step.changes:
            for block in blocks:
                if block in around and storage in made and made[storage] < around[block].enter:
                    yield block, "it changes its input in place"


def _changed_views(blocks: Sequence[str], trace: ForwardTrace) -> Iterator[tuple[str, str]]:
    """Yield blocks that return a view that later code changes in place, with a reason.

    For such a block, autograd runs the backward pass of the view's base tensor and skips FSDP2's hook on the view.
    """
    first: dict[int, Node] = {}
    for step in trace.steps:
        for node in step.makes:
            first.setdefault(node[0], node)
    for module_call in trace.module_calls:
        if module_call.name in blocks:
            views = {node[0] for node in module_call.nodes if node is not None and first.get(node[0]) != node}
            if any(step.time > module_call.leave and views.intersection(step.changes) for step in trace.steps):
                yield module_call.name, "it returns a view that is changed in place outside of the block"


def _around(trace: ForwardTrace, module_call: int) -> Iterator[ModuleCall]:
    while module_call >= 0:
        yield trace.module_calls[module_call]
        module_call = trace.module_calls[module_call].parent
