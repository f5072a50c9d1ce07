"""Pipeline parallelism: the layers of a model form stages on several ranks.

The schedules are those of `torch.distributed.pipelining`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import ScheduleLoopedBFS

from paceline.comm.group import Group, Pending
from paceline.device import Clock, uploaded
from paceline.errors import PlanError
from paceline.job.batch import Batch, rows, split
from paceline.planning.limits import microbatches_fit, sharded_twice
from paceline.planning.plan import V_SCHEDULES, Plan, stages_per_rank
from paceline.split.cut_model import CutModel, NewestByShape
from paceline.split.layout import Parts, first_names, local
from paceline.split.record_forward import Call
from paceline.split.stages import StageBounds, identity

# maps (output, microbatch, index of the microbatch) to the scaled loss from which the backward pass starts
Loss = Callable[[Any, Batch, int], Tensor]


class Pipeline:
    """This rank's stages of a model, and the schedule that runs them.

    Every stage runs the model's own forward pass on the same batch, with placeholders for the modules of other stages.
    The model's own code therefore computes masks and positions, and modules and parameters keep the names of the
    undivided model. A trace of one forward pass (`ForwardTrace`) finds the tensors that stages send to each other.
    Stages may send any number of tensors, such as the position bias of T5, if modules return these tensors.

    Zero bubble (Qi et al., 2024, arXiv:2401.10241) and DualPipe (Liu et al., 2024, arXiv:2412.19437) are V schedules,
    in which each rank has two stages, and rank 0 has the first and the last stage.

    Attributes:
        stages: this rank's stages. Their number is 1, or 2 for a V schedule, or the plan's `virtual` for an interleaved
            schedule.
        by_export: True if `torch.export` traced the model.
        lines: lines of text about the cuts, for the report.
        shared: for each parameter that several ranks hold, the list of these ranks.
        trace: trace of the example; None if `torch.export` traced the model.

    Args:
        model: the undivided model on the meta device, which is not changed. A stage is a copy of the model's structure
            with only the parameters of the stage.
        parts: the rank's part of each parameter. The constructor removes the parameters of other stages, and marks
            parameters that are on several stages.
        example: one microbatch.
        call: function that runs the model on a batch.

    Raises:
        PlanError: the model cannot be cut into these stages. The message names the possible cuts.
    """

    def __init__(
        self, model: nn.Module, parts: Parts, plan: Plan, pp: Group, example: Batch, call: Call, *, device: torch.device
    ) -> None:
        self._pp, self._device, self._schedule_name, self._example = pp, device, plan.schedule, example
        self._count = pp.size * stages_per_rank(plan.schedule, plan.virtual)
        self.stages: list[nn.Module] = []
        self._names = first_names(model.named_parameters)
        self._schedules = NewestByShape[Any](device)
        self._sending: list[Pending] = []
        self._timer = PipelineTimer(device)
        self._autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._begin: Callable[[int], object] = lambda number: None
        self._cut = CutModel(model, plan, self._count, example, call, device)
        self.by_export = self._cut.by_export
        self._own = [i for i in range(self._count) if self._rank_of(i) == pp.rank]
        stage_bounds = self._bounds_of(example)
        owners = self._owners(stage_bounds)
        self._refuse_shards_of_shared(owners, plan)
        self.trace = stage_bounds[0].trace
        self._stages = {
            i: self._cut.stage(i, stage_bounds, self._bounds_of, {n for n, stages in owners.items() if i in stages})
            for i in self._own
        }
        splits_backward = plan.schedule in V_SCHEDULES
        self._deferred = (
            {i: DeferredWeights(stage.module) for i, stage in self._stages.items()} if splits_backward else {}
        )
        self.stages = [stage.module for stage in self._stages.values()]
        self.shared = self._note(parts, owners)
        self.lines = [*self._cut.lines, *self._described(stage_bounds)]

    # This rank's modules and tensors

    def blocks(self) -> list[nn.Module]:
        """List this rank's repeated blocks in order.

        If `torch.export` traced the model, the list is empty, because a graph does not call modules.
        """
        if self.by_export:
            return []
        found = (stage.get_submodule(name) for stage in self.stages for name in self._cut.blocks)
        return [block for block in found if any(True for _ in block.parameters())]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Map names in the undivided model to this rank's parameters.

        For a tied parameter, the name is its first name.
        """
        return {
            self._names[name]: p for stage in self.stages for name, p in stage.named_parameters(remove_duplicate=False)
        }

    def named_buffers(self) -> dict[str, Tensor]:
        """Map names in the undivided model to this rank's buffers.

        Buffers outside of all stages, such as rotary frequencies, are on every rank.
        """
        return {name: b for stage in self.stages for name, b in stage.named_buffers()}

    @property
    def cut(self) -> str:
        """Modules that begin the second and later stages, in the form of `Plan.cut`."""
        return ",".join(self._cut.names)

    @property
    def stage_ranks(self) -> list[int]:
        """For each stage, the rank of the pipeline that computes it."""
        return [self._rank_of(stage) for stage in range(self._count)]

    def segments(self) -> tuple[list[str], list[float]]:
        """Return the modules that could begin a stage, and the segments' durations in seconds."""
        return self._cut.segments(self._example)

    @property
    def has_last_stage(self) -> bool:
        """True if this rank computes the loss."""
        return self._count - 1 in self._own

    # Forward and backward passes

    def forward_backward(
        self,
        batch: Batch,
        microbatches: int,
        loss: Loss,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        begin: Callable[[int], object] = lambda number: None,
    ) -> None:
        """Run the forward and backward passes of one step, and accumulate gradients in `.grad`.

        Args:
            batch: this replica's share of the global batch, which is identical on all ranks of the pipeline.
            microbatches: number of microbatches, which must divide the number of samples (see `fitting_microbatches`).
            loss: the loss function, which only the last stage calls.
            autocast: context of every forward pass; backward passes run outside of this context.
            begin: function to call with the number of a microbatch before each of its passes. A backward pass may
                compute the forward pass again.

        Raises:
            PlanError: the number of samples is not a multiple of `microbatches`.
        """
        if rows(batch) % microbatches:
            raise PlanError(
                "plan.microbatches_uneven",
                "a pipeline needs equal microbatches, but {rows} samples are not a multiple of {microbatches}",
                rows=rows(batch),
                microbatches=microbatches,
            )
        self._settle()
        batch = dict(batch) if isinstance(batch, Mapping) else tuple(batch)
        divided = list(split(batch, microbatches))
        self._autocast, self._begin = autocast, begin
        with autocast():
            schedule = self._schedule(divided[0], microbatches)
        waiting = iter(enumerate(divided))

        def finish(output: Any) -> Tensor:
            number, microbatch = next(waiting)
            return loss(output, microbatch, number)

        for stage in self._stages.values():
            stage.finish = finish
        with self._timer.step():
            try:
                schedule.step(batch=batch, target=torch.zeros(microbatches), return_outputs=False)
            except RuntimeError as error:
                if error.__cause__ is not None and "failed to run forward" in str(error):
                    # the message of torch shows only shapes, but the error of the model or the loss names the problem
                    raise error.__cause__ from None
                raise

    def forward(self, batch: Batch) -> Any | None:
        """Compute the model's output without gradients.

        Only the rank with the last stage returns the output.

        Other ranks return None.

        Ranks need not synchronize between successive calls.
        """
        self._settle()
        batch = dict(batch) if isinstance(batch, Mapping) else tuple(batch)
        stage_bounds = self._bounds_of(batch)
        carried: tuple[Tensor, ...] = ()
        output = None
        with torch.no_grad():
            for i in self._own:
                if i and self._rank_of(i - 1) != self._pp.rank:
                    carried = tuple(shape.on(self._device).detach() for shape in stage_bounds[i].received)
                    self._pp.exchange([], [(self._rank_of(i - 1), t) for t in carried])
                self._stages[i].finish = identity
                output = self._stages[i].module(*carried, batch=batch)
                if i == self._count - 1:
                    return output
                carried = output if isinstance(output, tuple) else (output,)
                if self._rank_of(i + 1) != self._pp.rank:
                    self._sending.append(self._pp.start_exchange([(self._rank_of(i + 1), t) for t in carried], []))
        return output if self._count - 1 in self._own else None

    def after_backward(self) -> None:
        """Sum the gradients of parameters that several ranks hold.

        The sums are bit-equal on all of these ranks.

        A parameter that no stage used has no gradient, as in a single process.
        """
        if not self.shared:
            return
        own = self.named_parameters()
        with_gradient = [float(name in own and own[name].grad is not None) for name in self.shared]
        used = uploaded(with_gradient, torch.float32, self._device)
        self._pp.all_reduce(used)
        for (name, holders), count in zip(self.shared.items(), used.tolist(), strict=True):
            if count and self._pp.rank in holders:
                self._sum(own[name], holders)

    @property
    def bubble_s(self) -> float:
        """Time that this rank waited for its neighbours in the last step, in seconds.

        On an accelerator, the caller waits for the end of the step.
        """
        return self._timer.waited_s()

    def close(self) -> None:
        """Wait for outstanding sends, and release schedules and buffers."""
        self._settle()
        self._schedules.clear()
        self._cut.forget()

    # Stages

    def _owners(self, stage_bounds: Sequence[StageBounds]) -> dict[str, set[int]]:
        """Map each parameter to the stages that use it.

        An unused parameter belongs to the stage that calls its module.
        """
        owners: dict[str, set[int]] = {name: set() for name, _ in self._cut.model.named_parameters()}
        for i, bounds in enumerate(stage_bounds):
            for name in bounds.parameters():
                owners[self._names[name]].add(i)
        for name, stages in owners.items():
            if not stages:
                stages.add(next((i for i, bounds in enumerate(stage_bounds) if bounds.calls_module_of(name)), 0))
        return owners

    def _refuse_shards_of_shared(self, owners: dict[str, set[int]], plan: Plan) -> None:
        for name, stages in owners.items():
            if plan.fsdp > 1 and len({self._rank_of(i) for i in stages}) < len(stages):
                raise PlanError.of_problems([sharded_twice(name, plan.schedule).about(plan)])

    def _note(self, parts: Parts, owners: dict[str, set[int]]) -> dict[str, list[int]]:
        shared = {}
        for name, stages in owners.items():
            if len(ranks := sorted({self._rank_of(i) for i in stages})) > 1:
                shared[name] = ranks
            if self._pp.rank not in ranks:
                parts.pop(name, None)
            elif name in parts:
                parts[name].stages, parts[name].writes = len(ranks), self._pp.rank == ranks[0]
        return shared

    def _described(self, stage_bounds: Sequence[StageBounds]) -> list[str]:
        shapes = [" + ".join(str(list(shape.size)) for shape in bounds.received) for bounds in stage_bounds[1:]]
        crossing = "; ".join(f"{name} (takes over {s})" for name, s in zip(self._cut.names, shapes, strict=True))
        how = " traced by torch.export (blocks cannot be recomputed or compiled one by one)," if self.by_export else ""
        tied = [
            f"{name} is on ranks {', '.join(map(str, ranks))}, its gradients are summed"
            for name, ranks in self.shared.items()
        ]
        return [
            (
                f"pp: {self._count} stages on {self._pp.size} ranks,{how} schedule {self._schedule_name}; cut "
                f"before {crossing}"
            ),
            *tied,
        ]

    def _rank_of(self, stage: int) -> int:
        size = self._pp.size
        return 2 * size - 1 - stage if self._schedule_name in V_SCHEDULES and stage >= size else stage % size

    def _bounds_of(self, batch: Batch) -> Sequence[StageBounds]:
        training = self.stages[0].training if self.stages else self._cut.model.training
        return self._cut.bounds(batch, training=training)

    def _schedule(self, microbatch: Batch, microbatches: int) -> Any:
        """Return torch's schedule for microbatches of this shape, because its buffers have fixed shapes."""

        def made() -> Any:
            stage_bounds = self._bounds_of(microbatch)
            stages = [self._timed(i, stage_bounds[i]) for i in self._own]
            kind = _schedule_class(self._schedule_name, self._pp.size, microbatches)
            what = stages[0] if kind in (ScheduleGPipe, Schedule1F1B) else stages
            return kind(what, microbatches, loss_fn=lambda loss, _: loss, scale_grads=False)

        return self._schedules.of(microbatch, microbatches, made)

    def _timed(self, i: int, bounds: StageBounds) -> TimedStage:
        loss = torch.empty((), device="meta", requires_grad=True)
        sent = (loss,) if i == self._count - 1 else tuple(s.on("meta") for s in bounds.sent)
        received = tuple(s.on("meta") for s in bounds.received)
        made = self._stages[i].module, i, self._count, self._device, received, sent
        stage = TimedStage(*made, group=self._pp.backend, dw_builder=self._deferred.get(i))
        stage.timer, stage.autocast = self._timer, lambda: self._autocast()
        stage.begin = lambda number: self._begin(number)
        return stage

    def _settle(self) -> None:
        for sent in self._sending:
            sent.wait()
        self._sending.clear()

    def _sum(self, parameter: nn.Parameter, holders: Sequence[int]) -> None:
        """Sum a shared gradient over its ranks in rank order.

        Every rank sends its own gradient to all other ranks that hold the parameter.
        """
        own = torch.zeros_like(local(parameter)) if parameter.grad is None else local(parameter.grad)
        own_gradient = own.contiguous()
        received = {r: torch.empty_like(own_gradient) for r in holders if r != self._pp.rank}
        self._pp.exchange([(r, own_gradient) for r in received], list(received.items()))
        received[self._pp.rank] = own_gradient.clone()
        first, second, *others = [received[r] for r in holders]
        total = torch.stack([first, second, *others]).sum(0) if others else first + second
        if parameter.grad is None:
            # a copy of the parameter, because the gradient of a DTensor must be a DTensor
            parameter.grad = parameter.detach().clone()
        local(parameter.grad).copy_(total)


def _schedule_class(name: str, ranks: int, microbatches: int) -> Any:
    """Select torch's schedule class.

    If the schedule requires more microbatches, the result is another schedule with the same stages.
    """
    fits = microbatches_fit(name, ranks, microbatches)
    if name == "interleaved":
        return ScheduleInterleaved1F1B if fits else ScheduleLoopedBFS
    if name in V_SCHEDULES:
        return ScheduleDualPipeV if name == "dualpipe" and fits else ScheduleZBVZeroBubble
    return Schedule1F1B if name == "1f1b" and fits else ScheduleGPipe


class PipelineTimer:
    """Timer of one rank's stages.

    On an accelerator, the timer uses events in the compute stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._whole: tuple[Any, Any] | None = None
        self._computing: list[tuple[Any, Any]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the time of a whole step."""
        self._computing = []
        start = self._clock.now()
        yield
        self._whole = start, self._clock.now()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Measure the time that one stage computes on one microbatch."""
        start = self._clock.now()
        yield
        self._computing.append((start, self._clock.now()))

    def waited_s(self) -> float:
        """Return the seconds of the last step outside of `computing`; 0 before the first step."""
        if self._whole is None:
            return 0.0
        self._clock.reach(self._whole[1])
        return max(0.0, self._clock.seconds(*self._whole) - sum(self._clock.seconds(*pair) for pair in self._computing))


class TimedStage(PipelineStage):
    """torch's pipeline stage with a timer, and with buffers only for microbatches in flight.

    Forward passes run within `autocast`. torch's stage has buffers for what each microbatch of a step receives. Here,
    the buffers of a microbatch exist from the time at which it is received to the end of its backward pass. Schedules
    that compute gradients of weights later keep all buffers.
    """

    timer: PipelineTimer
    autocast: Callable[[], AbstractContextManager[Any]]
    begin: Callable[[int], object]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.timer.computing(), self.autocast():
            self.begin(fwd_chunk_id)
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self.timer.computing():
            self.begin(bwd_chunk_id)
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._free(self.args_recv_info[bwd_chunk_id], self.grad_recv_info[bwd_chunk_id])

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _setup_forward_recv_info(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_forward_recv_info(*args, **kwargs)
        self._free(*self.args_recv_info.values())

    def _setup_backward_recv_info(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_backward_recv_info(*args, **kwargs)
        self._free(*self.grad_recv_info.values())

    def _allocate(self, received: Sequence[Any]) -> None:
        for info in received:
            if info.buffer is not None and info.buffer.is_meta:
                info.buffer = torch.empty_like(info.buffer, device=self.device)

    def _free(self, *received: Sequence[Any]) -> None:
        if self.dw_builder is not None:
            return
        for info in (info for infos in received for info in infos):
            if info.buffer is not None:
                info.buffer = torch.empty_like(info.buffer, device="meta", requires_grad=False)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self.timer.computing():
            super().backward_weight_one_chunk(*args, **kwargs)

    def perform_reduce_grad(self, *args: Any, **kwargs: Any) -> None:
        with self.timer.computing():
            super().perform_reduce_grad(*args, **kwargs)


class DeferredWeights:
    """The weight gradients of a stage's linear layers, which are computed only on request.

    The backward pass computes all other gradients. torch's own split of the backward pass (`stage_backward_input`)
    finds the weights in the autograd graph. If several layers read a tensor that is computed from weights (such as T5's
    position bias), torch's split raises an error or adds gradients twice (torch 2.13). This class therefore uses
    `dw_builder`, torch's interface for a custom split.
    """

    def __init__(self, stage: nn.Module) -> None:
        self._pending: list[Callable[[], None]] = []
        for module in stage.modules():
            if (
                isinstance(module, nn.Linear)
                and type(module).forward is nn.Linear.forward
                and "forward" not in module.__dict__
            ):
                module.__dict__["forward"] = partial(_linear, module, self._pending)

    def __call__(self) -> Callable[[], None]:
        """Return a function that computes the gradients that were deferred since the last call."""
        taken = list(self._pending)
        self._pending.clear()

        def compute() -> None:
            for one in taken:
                one()

        return compute


def _linear(module: nn.Linear, pending: list[Callable[[], None]], x: Tensor) -> Tensor:
    # accessed only once, because each access computes a parametrised weight again
    weight = module.weight
    # The gradient of a computed weight is not deferred. A weight with hooks is not deferred either, because its hooks
    # would get None.
    if not (torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf) or weight._backward_hooks:
        return F.linear(x, weight, module.bias)
    y: Tensor = _Linear.apply(x, weight, module.bias, pending)
    return y


class _Linear(torch.autograd.Function):
    """Linear layer whose backward pass defers the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, pending: list[Callable[[], None]]) -> Tensor:
        y = F.linear(x, weight, bias)
        # with autocast, y may have a narrower type than x
        ctx.save_for_backward(x.to(y.dtype))
        ctx.weight, ctx.pending, ctx.dtypes = weight, pending, (x.dtype, None if bias is None else bias.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        dy, (x,), weight = gradients[0], ctx.saved_tensors, ctx.weight
        of_x, of_bias = ctx.dtypes
        ctx.pending.append(partial(_add_gradient, weight, dy, x))
        dx = (dy @ weight.to(dy.dtype)).to(of_x) if ctx.needs_input_grad[0] else None
        db = dy.reshape(-1, dy.shape[-1]).sum(0).to(of_bias) if ctx.needs_input_grad[2] else None
        return dx, None, db, None


def _add_gradient(weight: Tensor, dy: Tensor, x: Tensor) -> None:
    with torch.no_grad():
        dw = (dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])).to(weight.dtype)
    # runs the parameter's hooks, like any backward pass
    torch.autograd.backward(weight, dw)
