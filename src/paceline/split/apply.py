"""A model under a plan: every split that the plan asks for, put together on one mesh, and filled with this rank's weights only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.bucket import Bucket
from paceline.errors import PlanError
from paceline.job.batch import Batch
from paceline.plans.plan import Plan
from paceline.split.context.division import Context, divide_context
from paceline.split.deferred_init.allocate import allocate
from paceline.split.deferred_init.initialise import Recorded
from paceline.split.expert import divide_experts
from paceline.split.fsdp import FullySharded, shard_fully
from paceline.split.mesh import REPLICA, Mesh
from paceline.split.parameter_hooks import hooked_parameters, refuse_kept_parameters, refuse_lost_hooks
from paceline.split.parts import Part, Parts, local, tied_names, whole_parts
from paceline.split.pieces import inseparable, refuse_writes, watched
from paceline.split.pipeline.pipeline import Pipeline, fitting_microbatches
from paceline.split.remat import compile_blocks, rematerialise
from paceline.split.tensor.division import TensorReport, shard_tensors
from paceline.trace.blocks import find_blocks, submodules

Call = Callable[[nn.Module, Batch], Any]


class Split:
    """One rank's part of a model. Made from a model without memory (`Recorded`); only this rank's part is ever allocated.

    Attributes:
        mesh: where this rank stands.
        example: a microbatch as the model takes it.
        parts: what it holds of every parameter that it has.
        aliases: the further names of tied parameters (`tied_names`).
        modules: the modules that it computes: the model, or its pipeline stages.
        parameters: what the optimizer steps on, by their names in the undivided model: plain tensors, of FSDP2's shards too.
        report: what was divided how, in words, one line each.
    """

    def __init__(self, recorded: Recorded, plan: Plan, mesh: Mesh, example: Batch, call: Call, *, precision: str) -> None:
        self.plan, self.mesh, self.example = plan, mesh, example
        self.report: list[str] = [recorded.note] if recorded.note else []
        self.context: Context | None = None
        self.tensors: TensorReport | None = None
        self.pipeline: Pipeline | None = None
        self.fully: FullySharded | None = None
        self._undo: list[Callable[[], object]] = []
        model = recorded.model
        self.parts: Parts = whole_parts(model)
        self.aliases = tied_names(model)
        self.parameter_count = sum(p.numel() for p in model.parameters())
        refuse_kept_parameters(model)
        hooked, parts = hooked_parameters(model), dict(self.parts)
        self._divide(model, example, call)
        self.modules: list[nn.Module] = [model] if self.pipeline is None else self.pipeline.stages
        self._wrap(model, precision)
        refuse_lost_hooks(hooked, parts, plan, self.pipeline.shared if self.pipeline is not None else ())
        self._divided: dict[str, nn.Parameter] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self._sums: list[tuple[Any, Bucket]] = []

    # Making it

    def allocate(self, recorded: Recorded) -> None:
        """Take memory for this rank's part, and its weights from `recorded`. Before, there are only shapes, and nothing can be computed."""
        together = nn.ModuleList(self.modules)  # two stages may share a tied weight
        allocate(together, self.mesh.world.device, offload=self.fully is not None and self.fully.offload)
        self._divided = self._named(recorded.model)
        self._fill(recorded, recorded.model)
        self.parameters = {name: _held(p) for name, p in self._divided.items()}
        self._sums = self._summed_together()

    def _divide(self, model: nn.Module, example: Batch, call: Call) -> None:
        plan, mesh = self.plan, self.mesh
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
            self._together = self._gathered_together(model, example, call)

    def _gathered_together(self, model: nn.Module, example: Batch, call: Call) -> set[str]:
        """The blocks that fsdp cannot gather on their own."""
        if self.pipeline is None:
            trace, observed = watched(model, example, call, self.mesh.world.device)
        elif self.pipeline.trace is not None:
            trace, observed = self.pipeline.trace, self.pipeline.trace.observed
        else:
            return set()
        refuse_writes(observed)
        found = inseparable(find_blocks(model), trace, observed)
        self.report += [f"fsdp: {name} is gathered together with the rest of the model: {reason}" for name, reason in found.items()]
        return set(found)

    def _refuse_beside_whole_tokens(self, context: Context) -> None:
        """Where ranks have all tokens, other splits and the compiler would have to know which modules compute a part of them."""
        plan = self.plan
        others = [key for key in ("tp", "pp") if getattr(plan, key) > 1] + ["compile"] * (plan.compile != "off")
        if context.whole and others:
            instead = " ".join(f"{key}={'off' if key == 'compile' else 1}" for key in others)
            raise PlanError(
                "\n".join([f"plan {plan}: cp of this model does not go with {', '.join(others)}: {instead}, or cp=1", *context.lines])
            )

    def _wrap(self, model: nn.Module, precision: str) -> None:
        plan = self.plan
        blocks = submodules(model, find_blocks(model)) if self.pipeline is None else self.pipeline.blocks()
        if plan.remat != "none":
            if not blocks and self.pipeline is None:
                raise PlanError(f"plan {plan}: the model has no repeated blocks whose activations could be computed again: remat=none.")
            self._undo.append(rematerialise(blocks, plan.remat))
        if plan.compile != "off":
            self._undo.append(compile_blocks(blocks or self.modules, plan.compile))
        if plan.fsdp > 1:
            names = {name for module in self.modules for name, m in module.named_modules() if m in blocks} - self._together
            self.fully = shard_fully(
                self.modules,
                [block for module in self.modules for name, block in module.named_modules() if name in names and block in blocks],
                self._named(model),
                self.parts,
                self.mesh.devices("fsdp"),
                zero=plan.zero,
                precision=precision,
                offload=plan.offload,
                pipelined=self.pipeline is not None,
            )
            self.report += self.fully.notes

    def _named(self, model: nn.Module) -> dict[str, nn.Parameter]:
        return dict(model.named_parameters()) if self.pipeline is None else self.pipeline.named_parameters()

    def _fill(self, recorded: Recorded, model: nn.Module) -> None:
        """Take this rank's part of every tensor of the undivided model, one after the other."""
        buffers = self.named_buffers()

        @torch.no_grad()
        def take(name: str, full: Tensor) -> None:
            if name in self._divided:
                local(self._divided[name]).copy_(self.parts[name].layout.take(full))
            elif name in buffers:
                buffers[name].copy_(full)

        recorded.replay(take, {*self._divided, *buffers})

    # Training

    @property
    def model(self) -> nn.Module:
        """What this rank computes, as one module."""
        return self.modules[0] if self.pipeline is None else nn.ModuleList(self.modules)

    def named_buffers(self) -> dict[str, Tensor]:
        """This rank's buffers by their names in the undivided model."""
        return dict(self.modules[0].named_buffers()) if self.pipeline is None else self.pipeline.named_buffers()

    def microbatches(self, shares: Sequence[int]) -> int:
        """How many microbatches every rank cuts its share of a global batch into, where data-parallel rank i has `shares[i]` samples.

        All ranks that meet in a collective of the forward pass need the same number, and a pipeline needs equal ones.
        """
        some = [share for share in shares if share] or [1]
        if self.pipeline is not None:
            return fitting_microbatches(some, self.plan.microbatches)
        return min(self.plan.microbatches, *some)

    @property
    def counts(self) -> bool:
        """Whether what this rank computed of the loss counts: of ranks that compute the same, one does."""
        if self.context is not None and self.context.whole and self.mesh.place["cp"] > 0:
            return False
        return self.mesh.place["tp"] == 0 and (self.pipeline is None or self.pipeline.has_last_stage)

    @property
    def all_must_compute(self) -> bool:
        """Whether a rank without samples has to run its forward and backward passes all the same, since others wait for it there."""
        return self.mesh.size("fsdp", "ep") > 1

    def begin_microbatch(self, *, last: bool) -> None:
        """Called before every forward pass that trains, where there is no pipeline."""
        if self.fully is not None:
            self.fully.microbatch(last)

    def after_backward(self) -> None:
        """Make the gradients of this rank's parameters those of the replica's whole share of the batch."""
        if self.pipeline is not None:
            self.pipeline.after_backward()
        if self.fully is not None:
            self.fully.after_backward()
        for name, held in self.parameters.items():
            divided = self._divided[name]
            if divided is not held:
                held.grad = None if divided.grad is None else local(divided.grad)
                divided.grad = None  # the bucket of the replicas takes the other one's place
        for group, bucket in self._sums:
            bucket.sum_over(group)

    def gradient_square(self) -> Tensor:
        """(1,): this rank's addend of the squared L2 norm of the whole gradient: its pieces, those that several ranks hold by their share.

        The addends of all ranks sum to the square of the norm. The replicas agree on gradients, so each counts for its share, too.
        """
        square = torch.zeros(1, dtype=torch.float64, device=self.mesh.world.device)
        present = [(p.grad, self._holders(self.parts[name])) for name, p in self.parameters.items() if p.grad is not None]
        if present:
            norms = torch.stack([n.double() for n in torch._foreach_norm([g for g, _ in present])])
            holders = torch.tensor([n for _, n in present], dtype=torch.float64, device=norms.device)
            square[0] = (norms.square() / holders).sum() / self.plan.dp
        return square

    def close(self) -> None:
        """Let go of the model's hooks and shared memory. The model stays divided."""
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
        """For each axis along which gradients are addends, its group and a bucket of those parameters for every dtype."""
        found = []
        for axis in ("cp", "ep", "tp", "fsdp"):
            by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
            for name, p in self.parameters.items():
                if p.requires_grad and axis in self.parts[name].summed:
                    by_dtype.setdefault(p.dtype, []).append(p)
            group = self.mesh.group(axis)
            found += [(group, Bucket.of(together, group)) for together in by_dtype.values()]
        return found

    def _holders(self, part: Part) -> int:
        """How many ranks of the replica hold the same piece."""
        return part.stages * math.prod(self.mesh.sizes[axis] for axis in REPLICA if axis != "pp" and axis not in part.sharded)


def _held(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself, or a plain one that shares the memory of its shard."""
    own = local(parameter)
    return parameter if own is parameter else nn.Parameter(own.detach(), requires_grad=parameter.requires_grad)
