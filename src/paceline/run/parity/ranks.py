"""Ranks of a parity check: steps under a plan, compared with a single process.

The single process writes its tensors to files, and every rank compares its own shards with them. So no tensors are
gathered, and replicas that have drifted apart are detected. Gradients are compared in the form that the optimizer gets.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._compile import _disable_dynamo as _not_compiled  # imports the compiler only when called

from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.data.loader import Loader
from paceline.device import widened
from paceline.elastic.hosts.files import fetch
from paceline.engine.engine import RankEngine
from paceline.engine.model_loss import all_in_float64, in_float64, nothing_dropped, random_module, without_dropout
from paceline.job.batch import Batch
from paceline.job.job import Job
from paceline.job.partition import Partition
from paceline.job.samples import DataSets, files_of
from paceline.job.stop import Epochs
from paceline.job.streams import with_few
from paceline.planning.plan import Plan
from paceline.run.build import build_engine, built
from paceline.run.learning_rate import LearningRate
from paceline.run.parity import Compared, Reference, Steps
from paceline.split.layout import ShardLayout, local

# A tensor's difference is relative to its norm, but at least to this share of the norm of all gradients, all parameters
# or all written buffers. Some gradients are zero except for rounding (a bias of attention keys), and biases begin at
# zero.
VANISHING = 1e-3
_LOOKED_AT = 4  # number of samples in the test for random numbers in the model


def take_reference(steps: Steps) -> Reference:
    """Take the steps in this process alone, and write the tensors to `steps.folder`."""
    # whole logits, so that chunks of a loss are compared with them
    steps = replace(steps, job=steps.job.model_copy(update={"loss": steps.job.loss.with_whole_logits()}))
    with _comparable(steps.job, steps.plan):
        engine = _engine(steps, Group())
        drawn = random_module(engine.compute, engine.loader.example(_LOOKED_AT))
        initial, losses, inputs = _tensors(engine), [], []
        outputs = ModuleOutputs(engine.model)
        rates = _rates(steps, engine)
        for step, batch in enumerate(_steps(engine.loader, steps.count), 1):
            rates(step)
            losses.append(engine.step(batch).loss)
            inputs.append(engine.loader.digests())
            outputs.close()
            file = _file(steps, step)
            file.parent.mkdir(mode=0o700)
            save_file(_as_real(_tensors(engine)), file)
        now = _tensors(engine)
        buffers = [name for name in now if name.startswith("buffer/")]
        written = sorted({name.split("/", 2)[2] for name in buffers if not torch.equal(now[name], initial[name])})
        dataset, collate_draws = engine.loader.random_inputs()
        engine.close()
        return Reference(losses, outputs.found, written, drawn, inputs, dataset, collate_draws)


def compare(steps: Steps, reference: Reference) -> Compared:
    """Take the steps as a rank of the plan, and compare each with the reference."""
    job, plan = steps.job, steps.plan
    with joined(deadline_s=job.deadline_s, transport=plan.transport) as group, _comparable(job, plan):
        engine = _engine(steps, group)
        found = Compared()
        found.report = engine.split.report if engine.split is not None else []
        outputs = ModuleOutputs(engine.model) if engine.split is None or engine.split.pipeline is None else None
        rates = _rates(steps, engine)
        for step, batch in enumerate(_steps(engine.loader, steps.count), 1):
            rates(step)
            found.losses.append(engine.step(batch).loss)
            found.inputs.append(engine.loader.digests())
            if outputs is not None:
                outputs.close()
            tensors = _reference(steps, step)
            found.steps.append(_compare(engine, tensors, set(reference.written)))
        found.outputs = outputs.found if outputs is not None else {}
        engine.close()
        return found


@contextmanager
def _comparable(job: Job, plan: Plan) -> Iterator[None]:
    """Disable dropout within this context; for fp64, compute everything in float64."""
    with nothing_dropped(), all_in_float64() if plan.precision_for(job) == "fp64" else nullcontext():
        yield


def _engine(steps: Steps, group: Group) -> RankEngine:
    job, plan = steps.job, steps.plan
    model = built(job, plan)
    without_dropout(model if isinstance(model, nn.Module) else model.model)
    data = job.data.build(input_shape=job.model.input_shape(), seed=job.seed)
    # the check compares plans on the same samples, which it reads by index
    data = with_few(data, steps.count * job.global_batch)
    alone = job
    if group.size == 1 and job.partition.weights is not None:  # without weights, the single rank gets the same batches
        alone = job.model_copy(update={"partition": job.partition.model_copy(update={"weights": None})})
    engine = build_engine(alone, plan, model, data, group)
    if engine.precision == "fp64":
        engine.compute.step_loss = in_float64(engine.compute.step_loss)
    if engine.compute.loss_scale is not None:
        # a small loss scale, so that no step overflows: a skipped step has no update to compare
        engine.compute.loss_scale.value = 2.0**8
    if steps.perturbed:
        _perturb(engine)
    if group.size == 1 and steps.parts.data_ranks > 1:
        _Dealt(engine, job, data, steps.parts.data_ranks, together=steps.parts.together)
    return engine


def _rates(steps: Steps, engine: RankEngine) -> Callable[[int], object]:
    """Return a function that sets the learning rates of a step (1-based).

    Only scheduler classes are applied. With other schedules, the first rate stays, so all steps move the parameters by
    similar amounts.
    """
    if not steps.job.schedule.by_class:
        return lambda step: None
    epochs = Epochs(engine.loader.partition.steps_per_epoch)
    rates = LearningRate(steps.job.schedule, engine.optimizer, max(steps.count, 2), epochs)
    rates.start()
    return lambda step: rates.before(step - 1)


def _perturb(engine: RankEngine) -> None:
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in engine.named_parameters().values():
            held = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            if held.is_floating_point():
                signs = torch.randint(0, 2, held.shape, generator=random).to(held) * 2 - 1
                held.copy_(held.nextafter(signs * math.inf))


class _Dealt:
    """Emulation of several data-parallel ranks in one process, part by part.

    By default, each part is one rank's microbatch, computed with that rank's buffers. With `together`, the n-th
    microbatches of all ranks form one part.
    """

    def __init__(self, engine: RankEngine, job: Job, data: DataSets, ranks: int, *, together: bool) -> None:
        self.together = together
        self.engine, self.microbatches = engine, engine.plan.microbatches
        labels = getattr(data.train, "labels", None)
        spec: dict[str, Any] = {"samples": len(data.train), "global_batch": job.global_batch, "seed": job.seed}  # type: ignore[arg-type]
        spec |= {"replicas": ranks, "labels": labels, "drop_last": job.drop_last, "shards": files_of(data.train)}
        self.partitions = [Partition(job.partition, replica=rank, **spec) for rank in range(ranks)]
        self.buffers = [[b.clone() for b in engine.model.buffers()] for _ in range(ranks)]
        self.waiting: list[int] = []  # by coming part: its rank
        engine.compute.microbatches = self.parts  # type: ignore[attr-defined]
        if together:
            return
        # the engine weights each part as a microbatch
        engine.plan = replace(engine.plan, microbatches=self.microbatches * ranks)
        engine.model.register_forward_pre_hook(lambda *_: self._take())
        engine.model.register_forward_hook(lambda *_: self._keep())
        engine.dealt = self  # type: ignore[attr-defined]

    def parts(self, batch: Batch) -> list[Batch]:
        position, indices = self.engine.loader.position, self.engine.loader.indices
        assert position is not None
        of_ranks: list[list[list[int]]] = []  # by rank and microbatch: the rows of the batch
        for partition in self.partitions:
            own = torch.tensor(
                [indices.index(i) for i in next(partition.batches(position.epoch, position.step))], dtype=torch.int64
            )
            of_ranks.append([part.tolist() for part in own.tensor_split(self.microbatches) if len(part)])
        if self.together:
            parts = [
                [row for part in parts for row in part] for parts in itertools.zip_longest(*of_ranks, fillvalue=[])
            ]
        else:
            parts = [part for rank in of_ranks for part in rank]
            self.waiting += [rank for rank, own in enumerate(of_ranks) for _ in own]
        return [
            {k: v[rows] for k, v in batch.items()} if isinstance(batch, Mapping) else tuple(t[rows] for t in batch)
            for rows in parts
        ]

    def named_buffers(self, rank: int) -> dict[str, Tensor]:
        return dict(zip(dict(self.engine.model.named_buffers()), self.buffers[rank], strict=True))

    def _take(self) -> None:
        if not self.waiting:  # the call is a check of the model, not a training step
            return
        for buffer, own in zip(self.engine.model.buffers(), self.buffers[self.waiting[0]], strict=True):
            buffer.copy_(own)

    def _keep(self) -> None:
        if not self.waiting:
            return
        rank = self.waiting.pop(0)
        for buffer, own in zip(self.engine.model.buffers(), self.buffers[rank], strict=True):
            own.copy_(buffer)


def _buffers(engine: RankEngine) -> list[tuple[int, dict[str, Tensor]]]:
    """Return the buffers by data-parallel rank; one process may emulate several ranks."""
    dealt: _Dealt | None = getattr(engine, "dealt", None)
    if dealt is None:
        return [(engine.loader.partition.replica, engine.named_buffers())]
    return [(rank, dealt.named_buffers(rank)) for rank in range(len(dealt.buffers))]


def _reference(steps: Steps, step: int) -> dict[str, Tensor]:
    file = _file(steps, step)
    if not file.exists():  # the file is on host 0
        fetch(file.parent, steps.folder, steps.job.deadline_s)
    return _as_complex(load_file(file))


def _as_real(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert complex tensors to pairs of real numbers, named `complex/NAME`.

    safetensors does not support complex128.
    """
    return {
        f"complex/{n}" if t.is_complex() else n: torch.view_as_real(t) if t.is_complex() else t
        for n, t in tensors.items()
    }


def _as_complex(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        n.removeprefix("complex/"): torch.view_as_complex(t) if n.startswith("complex/") else t
        for n, t in tensors.items()
    }


def _file(steps: Steps, step: int) -> Path:
    return steps.folder / f"reference-{step}" / "tensors"


def _tensors(engine: RankEngine) -> dict[str, Tensor]:
    """Return parameters, gradients and persistent buffers (`buffer/RANK/NAME`) by name."""
    held, kept = engine.named_parameters(), engine.model.state_dict(keep_vars=True).keys()
    found = {f"parameter/{name}": _copy(p) for name, p in held.items()}
    for copy in engine.copies:
        found |= {f"{copy.key}/{name}": _copy(stored) for name, stored in copy.named(held).items()}
    found |= {f"gradient/{name}": _copy(p.grad) for name, p in held.items() if p.grad is not None}
    return found | {
        f"buffer/{rank}/{name}": _copy(b)
        for rank, buffers in _buffers(engine)
        for name, b in buffers.items()
        if name in kept
    }


def _compare(engine: RankEngine, reference: dict[str, Tensor], written: set[str]) -> dict[str, dict[str, float]]:
    parts = engine.parts
    found: dict[str, dict[str, float]] = {}
    least, least_parameter = (
        _whole_norm(reference, "gradient/") * VANISHING,
        _whole_norm(reference, "parameter/") * VANISHING,
    )
    copies = {copy.key: copy.named(engine.named_parameters()) for copy in engine.copies}
    for name, held in engine.named_parameters().items():
        layout = parts[name].layout if parts is not None else ShardLayout.whole(held.shape)
        gradient = _distance(held.grad, reference.get(f"gradient/{name}"), layout, least)
        parameter = _distance(held, reference[f"parameter/{name}"], layout, least_parameter)
        for key, stored in copies.items():
            other = _distance(stored.get(name), reference.get(f"{key}/{name}"), layout, least_parameter)
            parameter = max(parameter, other)
        found[name] = {"gradient": gradient, "parameter": parameter}
    ranks = len({name.split("/")[1] for name in reference if name.startswith("buffer/")})
    for rank, buffers in _buffers(engine):
        prefix = f"buffer/{rank if rank < ranks else 0}/"
        least = (
            _whole_norm({n: t for n, t in reference.items() if n.removeprefix(prefix) in written}, prefix) * VANISHING
        )
        for name, buffer in buffers.items():
            expected = reference.get(prefix + name)
            # in a divided model, buffers may have other shapes; only its parameters are compared
            if expected is not None and expected.shape == buffer.shape:
                distance = _buffer_distance(buffer, expected, least if name in written else 0.0)
                entry = found.setdefault(name, {})
                entry["buffer"] = max(distance, entry.get("buffer", 0.0))
    return found


def _buffer_distance(own: Tensor, reference: Tensor, least: float) -> float:
    held = _copy(own)
    if torch.equal(held, reference):
        return 0.0
    finite = reference.isfinite()
    if not torch.equal(held.isfinite(), finite) or not torch.equal(held[~finite], reference[~finite]):
        return math.inf
    return _distance(held[finite], reference[finite], ShardLayout.whole(held[finite].shape), least)


def _whole_norm(reference: dict[str, Tensor], kind: str) -> float:
    tensors = [t for name, t in reference.items() if name.startswith(kind)]
    return math.hypot(*(norm.item() for norm in torch._foreach_norm(tensors))) if tensors else 0.0


def _distance(own: Tensor | None, reference: Tensor | None, layout: ShardLayout, least: float) -> float:
    """Return the relative L2 distance; infinite if one nonzero tensor is missing."""
    if own is None or reference is None:
        there = own if own is not None else reference
        return 0.0 if there is None or not _copy(local(there)).any() else math.inf
    norm = max(float(torch.linalg.vector_norm(reference)), least)
    difference = float(torch.linalg.vector_norm(_copy(local(own)) - layout.take(reference)))
    return difference / norm if norm else difference


class ModuleOutputs:
    """Sums over the outputs of every module.

    Means are compared, because a mean does not depend on which rank computed which part, or on how many ranks computed
    the same part.
    """

    def __init__(self, model: nn.Module) -> None:
        self.found: dict[str, list[float]] = {}
        self._hooks = [m.register_forward_hook(self._add(name)) for name, m in model.named_modules() if name]

    def _add(self, name: str) -> Any:
        @_not_compiled
        def add(module: nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, (tuple, list)) and output else output
            if not isinstance(first, Tensor) or not (first.is_floating_point() or first.is_complex()):
                return
            numbers = torch.view_as_real(first.detach().resolve_conj()) if first.is_complex() else first.detach()
            wide = widened(numbers)
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
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    dense = dense.detach()
    if dense.is_complex():
        return dense.cpu().resolve_conj().to(torch.complex128, memory_format=torch.contiguous_format, copy=True)
    return dense.cpu().double().clone(memory_format=torch.contiguous_format)
