"""Application of all splits of a plan to a model, over one mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.group import Bucket
from paceline.device import uploaded, widest_float
from paceline.errors import BatchError, PlanError
from paceline.job.batch import Batch
from paceline.planning.limits import (
    fitting_microbatches,
    no_blocks_to_offload,
    no_blocks_to_recompute,
    scales_of_shards,
)
from paceline.planning.model.forward_pass import find_blocks, submodules
from paceline.planning.plan import REPLICA, V_SCHEDULES, Plan
from paceline.split.activation_offload import offload_activations
from paceline.split.context_parallel import Context, divide_context
from paceline.split.deferred_init import DeferredModel, allocate
from paceline.split.expert import divide_experts, refuse_other_readers
from paceline.split.fsdp import FullySharded, inseparable_blocks, refuse_writes, watched
from paceline.split.layout import (
    Part,
    Parts,
    hooked_parameters,
    local,
    refuse_kept_parameters,
    refuse_lost_hooks,
    tied_names,
    whole_parts,
)
from paceline.split.mesh import Mesh
from paceline.split.pipeline import Pipeline
from paceline.split.quantized import fill_from, formats_of, quantize
from paceline.split.remat import compile_blocks, rematerialise
from paceline.split.tensor_parallel import TensorReport, shard_tensors

Call = Callable[[nn.Module, Batch], Any]


class Split:
    """One rank's part of a model.

    A split starts from a model without memory (`DeferredModel`) and allocates only this rank's part.

    Args:
        inseparable: `inseparable` of an earlier split of the same model; None searches the blocks of this model.

    Attributes:
        mesh: all ranks as a grid, with this rank's coordinate.
        example: a microbatch in the model's input format.
        refused: error to raise if a batch fails; None unless even the undivided model fails for the example.
        parts: a `Part` for each parameter of this rank.
        quantized: the formats of the quantized weights of the undivided model, by name.
        aliases: the additional names of tied parameters (`tied_names`).
        modules: the modules that this rank computes, which are the model or this rank's pipeline stages.
        parameters: the parameters for the optimizer, by name in the undivided model. All are plain tensors, including
            the shards of FSDP2.
        divided: the parameters of the modules, which are DTensors if FSDP2 shards them.
        head: the output head, if its loss may be computed in chunks; set by the engine.
        inseparable: blocks that FSDP2 gathers together with the remainder of the model, with reasons.
        report: lines of text that describe each division.
        remarks: those that belong into the run's record, set by the engine.
    """

    def __init__(
        self,
        deferred: DeferredModel,
        plan: Plan,
        mesh: Mesh,
        example: Batch,
        call: Call,
        *,
        precision: str,
        inseparable: Mapping[str, str] | None = None,
    ) -> None:
        self.plan, self.mesh, self.example = plan, mesh, example
        self.report: list[str] = [deferred.note] if deferred.note else []
        self.context: Context | None = None
        self.tensors: TensorReport | None = None
        self.pipeline: Pipeline | None = None
        self.fully: FullySharded | None = None
        self.refused: BatchError | None = None
        self.head: Any = None
        self.remarks: list[str] = []
        self._undo: list[Callable[[], object]] = []
        model = deferred.model
        self.parts: Parts = whole_parts(model)
        self.aliases = tied_names(model)
        self.parameter_count = sum(p.numel() for p in model.parameters())
        refuse_kept_parameters(model)
        hooked, parts = hooked_parameters(model), dict(self.parts)
        self.quantized = formats_of(model)
        self.inseparable: dict[str, str] = {}
        self._divide(model, example, call, inseparable)
        self.modules: list[nn.Module] = [model] if self.pipeline is None else self.pipeline.stages
        quantize(self.modules, self.quantized, self.parts, plan)
        if precision == "fp8":
            self._multiply_in_float8()
        self._wrap(model, precision)
        refuse_lost_hooks(hooked, parts, plan, self.pipeline.shared if self.pipeline is not None else ())
        self.divided: dict[str, nn.Parameter] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self._sums: list[tuple[Any, Bucket]] = []

    # Creation

    def allocate(self, deferred: DeferredModel, *, loaded: Collection[str] = ()) -> None:
        """Allocate this rank's part and fill it with weights from `deferred`.

        Before this call the modules have shapes only and cannot compute anything.

        Args:
            loaded: names of parameters that a checkpoint will provide. They are not filled.
        """
        # a single module, because two stages may share a tied weight
        together = nn.ModuleList(self.modules)
        allocate(together, self.mesh.world.device, offload=self.fully is not None and self.fully.offload)
        self.divided = self._named(deferred.model)
        self._fill(deferred, {*self.divided}.difference(loaded))
        self.parameters = {name: _held(p) for name, p in self.divided.items()}
        self._sums = self._summed_together()

    def _divide(self, model: nn.Module, example: Batch, call: Call, inseparable: Mapping[str, str] | None) -> None:
        plan, mesh = self.plan, self.mesh
        if plan.ep > 1:
            refuse_other_readers(model, plan, example, call)
        if plan.cp > 1:
            self.context = divide_context(model, self.parts, mesh.group("cp"), example, call)
            self._refuse_beside_whole_tokens(self.context)
            self.report += self.context.lines
            example = self.context.shard(example)
        if plan.ep > 1:
            self.report += divide_experts(model, self.parts, mesh.group("ep")).lines
        if plan.tp > 1:
            self.tensors = shard_tensors(model, self.parts, mesh.group("tp"), example, call, sequence=plan.sequence)
            self.report += str(self.tensors).splitlines()
        if plan.pp > 1:
            self.pipeline = Pipeline(model, self.parts, plan, mesh.group("pp"), example, call, device=mesh.world.device)
            self.report += self.pipeline.lines
        if plan.fsdp > 1:
            found = self._gathered_together(model, example, call) if inseparable is None else inseparable
            self.inseparable.update(found)
            gathered = "is gathered together with the remainder of the model"
            self.report += [f"fsdp: {name} {gathered}: {reason}" for name, reason in found.items()]

    def _gathered_together(self, model: nn.Module, example: Batch, call: Call) -> dict[str, str]:
        if self.pipeline is None:
            trace, observed = watched(model, example, call, self.mesh.world.device)
        elif self.pipeline.trace is not None:
            trace, observed = self.pipeline.trace, self.pipeline.trace.observed
        else:
            return {}
        refuse_writes(observed)
        return inseparable_blocks(find_blocks(model), trace, observed)

    def _refuse_beside_whole_tokens(self, context: Context) -> None:
        """Raise an error if a split of the plan does not support replicated tokens."""
        plan = self.plan
        others = [key for key in ("tp", "pp") if getattr(plan, key) > 1] + ["compile"] * (plan.compile != "off")
        if context.whole and others:
            instead = " ".join(f"{key}={'off' if key == 'compile' else 1}" for key in others)
            raise PlanError(
                "plan.cp_beside_whole_tokens",
                "plan {plan}: cp of this model cannot be combined with {others}. Use {instead}, or cp=1\n{reasons}",
                plan=plan,
                others=others,
                instead=instead,
                reasons="\n".join(context.lines),
            )

    def _multiply_in_float8(self) -> None:
        if self.plan.tp > 1:
            raise PlanError.of_problems([scales_of_shards(self.plan.tp).about(self.plan)])
        if self.pipeline is not None and self.pipeline.by_export:
            raise PlanError(
                "plan.float8_layers_replaced",
                "plan {plan}: precision=fp8 finds no linear layers, because this plan traces the model and replaces "
                "its layers by a graph. Use pp=1, or precision=bf16.",
                plan=self.plan,
            )
        from paceline.split import float8  # imports torchao

        float8.convert(self.modules, self.mesh.world.device)

    def _wrap(self, model: nn.Module, precision: str) -> None:
        plan = self.plan
        blocks = submodules(model, find_blocks(model)) if self.pipeline is None else self.pipeline.blocks()
        if plan.remat != "none":
            if not blocks and self.pipeline is None:
                raise PlanError.of_problems([no_blocks_to_recompute(plan.remat).about(plan)])
            self._undo.append(rematerialise(blocks, plan.remat))
        if plan.offload_activations:
            if not blocks and self.pipeline is None:
                raise PlanError.of_problems([no_blocks_to_offload().about(plan)])
            self._undo.append(offload_activations(blocks, self.mesh.world.device))
        if plan.compile != "off":
            self._undo.append(compile_blocks(blocks or self.modules, plan.compile, self.mesh.world.device))
        if plan.fsdp > 1:
            named = [(name, m) for module in self.modules for name, m in module.named_modules() if m in blocks]
            self.fully = FullySharded(
                self.modules,
                [block for name, block in named if name not in self.inseparable],
                self._named(model),
                self.parts,
                self.mesh.devices("fsdp"),
                zero=plan.zero,
                precision=precision,
                offload=plan.offload,
                pipelined=self.pipeline is not None,
                deferred=plan.schedule in V_SCHEDULES,
            )
            self.report += self.fully.notes

    def _named(self, model: nn.Module) -> dict[str, nn.Parameter]:
        return dict(model.named_parameters()) if self.pipeline is None else self.pipeline.named_parameters()

    def _fill(self, deferred: DeferredModel, parameters: set[str]) -> None:
        buffers = self.named_buffers()

        @torch.no_grad()
        def take(name: str, full: Tensor) -> None:
            if name in self.divided:
                fill_from(full, name, self.divided[name], self.quantized, self.parts[name].layout)
            elif name in buffers:
                buffers[name].copy_(full)

        deferred.replay(take, {*parameters, *buffers})

    # Use during training

    @property
    def model(self) -> nn.Module:
        """This rank's modules as one module."""
        return self.modules[0] if self.pipeline is None else nn.ModuleList(self.modules)

    def named_buffers(self) -> dict[str, Tensor]:
        """Map names in the undivided model to this rank's buffers."""
        return dict(self.modules[0].named_buffers()) if self.pipeline is None else self.pipeline.named_buffers()

    def microbatches(self, shares: Sequence[int]) -> int:
        """Return the number of microbatches if data-parallel rank i has `shares[i]` samples.

        The number is the same on all ranks, because they may share collectives in the forward pass. A pipeline also
        needs microbatches of equal size.
        """
        some = [share for share in shares if share] or [1]
        if self.pipeline is not None:
            return fitting_microbatches(some, self.plan.microbatches)
        return min(self.plan.microbatches, *some)

    @property
    def owns_loss(self) -> bool:
        """True if this rank's loss is part of the total.

        If several ranks compute the same loss, only one of these ranks owns it.
        """
        if self.context is not None and self.context.whole and self.mesh.place["cp"] > 0:
            return False
        return self.mesh.place["tp"] == 0 and (self.pipeline is None or self.pipeline.has_last_stage)

    @property
    def all_must_compute(self) -> bool:
        """True if a rank without samples must run the passes, too.

        Other ranks would otherwise wait for this rank in a collective.
        """
        return self.mesh.size("fsdp", "ep") > 1

    def begin_microbatch(self, *, last: bool) -> None:
        """Prepare the forward pass of a microbatch.

        Call this before each microbatch if the model has no pipeline.
        """
        if self.fully is not None:
            self.fully.microbatch(last)

    def after_backward(self) -> None:
        """Reduce the gradients over the ranks of the replica, after its last backward pass."""
        # before the pipeline, because this removes the gradients of parameters that only other stages used
        if self.fully is not None:
            self.fully.after_backward()
        if self.pipeline is not None:
            self.pipeline.after_backward()
        for name, held in self.parameters.items():
            divided = self.divided[name]
            if divided is not held:
                # moves the gradient to the plain parameter, where the reduction over replicas replaces it
                held.grad = None if divided.grad is None else local(divided.grad)
                divided.grad = None
        for group, bucket in self._sums:
            bucket.sum_over(group)

    def gradient_square(self) -> Tensor:
        """Return this rank's contribution to the squared L2 norm of the gradient, shape (1,).

        The contributions of all ranks sum to the squared norm. The contribution of a shard is therefore divided by the
        number of ranks that hold this shard. All contributions are divided by `dp`, because all replicas have the same
        gradients.
        """
        square = torch.zeros(1, dtype=(wide := widest_float(self.mesh.world.device)), device=self.mesh.world.device)
        present = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        if present:
            norms = torch.stack(torch._foreach_norm(list(present.values()))).to(wide)
            holders = uploaded([self._holders(self.parts[name]) for name in present], wide, norms.device)
            square[0] = (norms.square() / holders).sum() / self.plan.dp
        return square

    def on_close(self, undo: Callable[[], object]) -> None:
        """Call `undo` when the split is closed."""
        self._undo.append(undo)

    def close(self) -> None:
        """Release the model's hooks and shared memory. The model stays divided."""
        for group, bucket in self._sums:
            group.release(bucket.flat)
        if self.fully is not None:
            self.fully.close()
        for undo in reversed(self._undo):
            undo()
        if self.pipeline is not None:
            self.pipeline.close()
        if self.context is not None:
            self.context.close()

    def _summed_together(self) -> list[tuple[Any, Bucket]]:
        """Collect the gradients that are partial sums in buckets, one per axis and dtype."""
        found = []
        for axis in ("cp", "ep", "tp", "fsdp"):
            by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
            for name, p in self.parameters.items():
                if p.requires_grad and axis in self.parts[name].summed:
                    by_dtype.setdefault(p.dtype, []).append(p)
            group = self.mesh.group(axis)
            found += [(group, Bucket.of(together, group)) for together in by_dtype.values()]
        return found

    def _holders(self, part: Part) -> float:
        same = [axis for axis in REPLICA if axis != "pp" and axis not in part.sharded]
        return float(part.stages * math.prod(self.mesh.sizes[axis] for axis in same))


def _held(parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter, or a plain parameter that shares the memory of its shard."""
    own = local(parameter)
    return parameter if own is parameter else nn.Parameter(own.detach(), requires_grad=parameter.requires_grad)
