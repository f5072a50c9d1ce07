"""Ranks of a calibration: time passes by model segment, and steps under each split."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.cluster.cluster import Cluster
from paceline.comm import Group
from paceline.comm.checks import greatest
from paceline.comm.measure.calls import measure_collectives, repeats_within
from paceline.device import is_accelerator
from paceline.engine.calls import prepared, sparse_tables
from paceline.engine.engine import RankEngine
from paceline.engine.meter import BUBBLE, COMPUTE, DATA, OPTIMIZER
from paceline.errors import PacelineError, PlanError
from paceline.job.batch import Batch, place, target_of
from paceline.job.job import CheckpointSpec, EvaluateSpec, Job
from paceline.job.loss_items import call, loss_before_training
from paceline.job.parameters import names_of
from paceline.job.samples import DataSets
from paceline.job.stop import StopSpec
from paceline.planning.calibrate import Axis, CalibrationPoint, Collective, Measurements, PassTiming, transport_note
from paceline.planning.model.forward_pass import find_blocks, submodules
from paceline.planning.plan import Plan
from paceline.planning.sync_info import TRANSPORTS
from paceline.run.build import build_engine, built, loader_of, seed_all
from paceline.run.loop import Loop
from paceline.run.record.recorder import kernel_bytes
from paceline.run.record.run import Run
from paceline.split.mesh import Mesh
from paceline.wire.status import StatusBoard

# if a pass takes longer than this many seconds, one round of passes is enough
_LONG_S = 0.15
# seconds, and limits of the number of passes, per microbatch size, after one warm-up pass
_PASS_S, _PASSES = 0.15, (3, 30)
# seconds, and limits of the number of steps, per setting of an engine, after two warm-up steps
_STEP_S, _STEPS = 0.25, (3, 30)
_UPDATES = 3
# numbers of microbatches in measured steps, with pp and without
_PIPELINED = (2, 4)
_ACCUMULATED = (1, 2)


class RankCalibration:
    """One rank of a calibration.

    If several ranks measure, they begin at the same time. While one rank measures alone, the others wait.

    Args:
        here: cluster of this machine, for the measured runs' records.
        folder: folder for the measured runs' records; all ranks use rank 0's folder.
        cores: number of physical cores of the machine.
    """

    def __init__(
        self,
        job: Job,
        here: Cluster,
        group: Group,
        folder: Path,
        cores: int,
        precisions: Sequence[str],
        axes: Sequence[Axis],
    ) -> None:
        self.job, self.here, self.group, self.cores = job, here, group, cores
        self.folder = Path(group.gather_json(str(folder))[0])
        self.precisions, self.axes = precisions, axes
        self.board, self.notes = StatusBoard.of_this_rank(), list[str]()
        self.threads = max(1, cores // group.size)
        self.segments: tuple[str, ...] = ("",)

    def run(self, transports: Sequence[str]) -> Measurements:
        """Measure passes, steps, updates, and collectives over the given transports."""
        seed_all(self.job.seed)
        torch.set_num_threads(self.threads)
        self.data = self.job.data.build(input_shape=self.job.model.input_shape(), seed=self.job.seed)
        baseline = self._memory()
        # Measure steps first, while the process uses no more memory than a run.
        points = [
            point
            for axis in self.axes
            for precision in self._precisions(axis)
            for point in self._points(axis, precision)
        ]
        timings, optimizer_s, parameters = self._timings()
        return Measurements(
            parameters=parameters,
            segments=self.segments,
            timings=tuple(timings),
            points=tuple(points),
            collectives=tuple(self._collectives(transports) if self.group.size > 1 else ()),
            optimizer_s=optimizer_s,
            baseline_bytes=baseline,
            notes=tuple(self.notes),
        )

    def _collectives(self, transports: Sequence[str]) -> list[Collective]:
        """Measure collectives; if a package's transport fails, record the failure."""
        found: list[Collective] = []
        for transport in transports:
            error, measured = None, list[Collective]()
            try:
                measured = measure_collectives(self.group, [transport])
            except Exception as failure:
                if transport in TRANSPORTS.built_in:
                    raise
                error = f"{type(failure).__name__}: {failure}"
            # if one rank fails, no rank uses its measurements
            errors = [one for one in self.group.gather_json(error) if one]
            found += [] if errors else measured
            self.notes += [transport_note(transport, one) for one in errors[:1]]
        return found

    def _precisions(self, axis: Axis) -> Sequence[str]:
        """Return the precisions to measure: only the job's own if the axis divides the model."""
        return self.precisions if axis in ("none", "dp") else self.precisions[:1]

    # Passes of the undivided model

    def _timings(self) -> tuple[list[PassTiming], dict[str, float], int]:
        model, optimizer = self.job.model.build(), self.job.optimizer
        by_rows = optimizer.name == "sgd" and not (optimizer.momentum or optimizer.weight_decay)
        rows = list(sparse_tables(model).values()) if by_rows and not is_accelerator(self.group.device) else []
        model = prepared(model, self.job.batch_norm, "fp32", Group(), rows)
        passes = _Passes(self.job, model, self.data)
        sizes = sorted({max(1, round(self.job.global_batch / parts)) for parts in (8, 4, 2, 1)})
        found: list[PassTiming] = []
        together = [1, self.group.size] if self.group.size > 1 else [1]
        for precision in self.precisions:
            remats = ("none", "block", "selective") if passes.blocks and precision == self.precisions[0] else ("none",)
            for ranks in together:
                for remat in remats:
                    asked = sizes if remat == "none" else sizes[1:3] or sizes
                    once = [self._timing(passes, ranks, precision, remat, samples) for samples in asked]
                    found += [self._better(passes, timing) for timing in once]
        self.segments = passes.timer.names
        optimizer_s = self._updates(model)
        return found, optimizer_s, sum(p.numel() for p in model.parameters())

    def _timing(self, passes: _Passes, ranks: int, precision: str, remat: str, samples: int) -> PassTiming:
        """Return the median times of a pass while `ranks` ranks compute and others wait."""
        takes_part = self.group.rank < ranks
        threads = self.cores if ranks == 1 else self.threads
        torch.set_num_threads(threads)
        _trim()
        _forget_peak()
        held = self._memory()
        with passes.under(precision, remat):
            first_s = passes.take(samples) if takes_part else 0.0
            count = repeats_within(self._greatest(passes.take(samples) if takes_part else first_s), _PASS_S, _PASSES)
            passes.timer.clear()
            for _ in range(count if takes_part else 0):
                passes.take(samples)
            self._greatest(0.0)
        forward_s, backward_s = passes.timer.medians() if takes_part else ((), ())
        peak = _peak_bytes() - held
        torch.set_num_threads(self.threads)
        return PassTiming(
            ranks,
            threads,
            precision,
            remat,
            samples,
            self._mean(forward_s, ranks),
            self._mean(backward_s, ranks),
            max(0, peak),
        )

    def _better(self, passes: _Passes, once: PassTiming) -> PassTiming:
        """Measure short passes again, and return the better of two rounds.

        Other work on the machine disturbs short passes. For long passes, one round is enough.
        """
        if self._greatest(sum(once.forward_s) + sum(once.backward_s)) > _LONG_S:
            return once
        return _better(once, self._timing(passes, once.ranks, once.precision, once.remat, once.samples))

    def _updates(self, model: nn.Module) -> dict[str, float]:
        """Return the seconds of an optimizer step on the whole model.

        The step is fused; it is also measured plain if runs do not fuse by default.
        """
        found = {}
        default = Plan().fuses(self.job, accelerators=is_accelerator(self.group.device))
        for fused in (True,) if default else (False, True):
            try:
                optimizer = self.job.optimizer.build(dict(model.named_parameters()), names=names_of(model), fused=fused)
            # some optimizers have no fused step
            except (PacelineError, RuntimeError):
                continue
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            times_s = []
            for _ in range(_UPDATES + 1):
                self.group.barrier()
                started = time.perf_counter()
                optimizer.step()
                times_s.append(time.perf_counter() - started)
            found["fused" if fused else "plain"] = self._greatest(statistics.median(times_s[1:]))
            model.zero_grad(set_to_none=True)
        return found

    # Steps of the engine

    def _points(self, axis: Axis, precision: str) -> list[CalibrationPoint]:
        """Return calibration points with two numbers of microbatches, on half of a global batch.

        Half of a batch is enough, because predictions extrapolate to other sizes.
        """
        if axis == "none":
            group = Group(deadline_s=self.group.deadline_s)
            found = self._measured_steps(axis, precision, group) if self.group.rank == 0 else []
            self._greatest(0.0)
            return found
        return self._measured_steps(axis, precision, self.group)

    def _measured_steps(self, axis: Axis, precision: str, group: Group) -> list[CalibrationPoint]:
        counts = _PIPELINED if axis == "pp" else _ACCUMULATED
        chosen: dict[str, Any] = {"precision": precision} | ({} if axis == "none" else {axis: group.size})
        plan = Plan(**chosen, microbatches=counts[0])
        unit = plan.data_ranks * counts[1]
        job = _quiet(self.job, max(1, self.job.global_batch // 2 // unit) * unit)
        torch.set_num_threads(self.cores if axis == "none" else self.threads)
        _trim()
        try:
            engine = build_engine(job, plan, built(job, plan), self.data, group)
        # all ranks raise this error, because it depends only on shapes
        except PlanError as error:
            self.notes.append(f"{axis}={group.size}: {error}")
            return []
        try:
            with self._loop(job, plan, engine, group) as loop:
                once, again = ([self._measured_step(axis, loop, group, count) for count in counts] for _ in range(2))
                return [min(pair, key=lambda point: point.step_s) for pair in zip(once, again, strict=True)]
        finally:
            engine.close()
            del engine
            gc.collect()
            torch.set_num_threads(self.threads)

    @contextmanager
    def _loop(self, job: Job, plan: Plan, engine: RankEngine, group: Group) -> Iterator[Loop]:
        path = self.folder / str(plan).replace(" ", "-")
        if group.rank == 0:
            Run.create(path, job, self.here, plan)
        group.barrier()
        loop = Loop(Run(path), engine, self.data, group)
        loop.events.progress = None
        try:
            yield loop
        finally:
            engine.loader.close()
            loop.checkpoints.writer.close()
            loop.close()

    def _measured_step(self, axis: Axis, loop: Loop, group: Group, microbatches: int) -> CalibrationPoint:
        engine = loop.engine
        engine.plan = replace(engine.plan, microbatches=microbatches)
        if engine.split is not None:
            engine.split.plan = engine.plan
        _trim()
        _forget_peak()
        steps_of = _steps(loop)
        engine.meter.restart()
        for _ in range(2):
            step_s = sum(next(steps_of))
        count = repeats_within(greatest(group, step_s), _STEP_S, _STEPS)
        steps = [next(steps_of) for _ in range(count)]
        steps_of.close()
        of_all = [statistics.median(values) for values in zip(*steps, strict=True)]
        # factor that makes the parts sum to the median step time
        scale = statistics.median(sum(parts) for parts in steps) / sum(of_all)
        parts = _mean(group, [scale * part for part in of_all])
        named = (DATA, COMPUTE, BUBBLE, OPTIMIZER)
        share = engine.loader.partition.shares(0)[0]
        return CalibrationPoint(
            axis,
            group.size,
            engine.precision,
            max(1, share // microbatches),
            microbatches,
            data_s=parts[DATA],
            compute_s=parts[COMPUTE],
            bubble_s=parts[BUBBLE],
            comm_s=sum(part for i, part in enumerate(parts) if i not in named),
            optimizer_s=parts[OPTIMIZER],
            peak_bytes=-int(greatest(group, -_peak_bytes())),
        )

    # Communication

    def _greatest(self, value: float) -> float:
        self.board.mark("sync", 0)
        return greatest(self.group, value)

    def _mean(self, values: tuple[float, ...], ranks: int) -> tuple[float, ...]:
        size = int(greatest(self.group, len(values)))
        own = torch.tensor(values or [0.0] * size, dtype=torch.float64) / ranks
        self.group.all_reduce(own)
        return tuple(own.tolist())

    def _memory(self) -> int:
        gc.collect()
        _trim()
        return int(psutil.Process().memory_info().rss)


class _Passes:
    """Runner of a model's forward and backward passes on the job's data."""

    def __init__(self, job: Job, model: nn.Module, data: DataSets) -> None:
        self.model, self.loss = model, job.loss.build()
        self.loader = loader_of(job, Mesh.of(Plan(), Group()), data)
        names = find_blocks(model)
        self.blocks, self.timer = submodules(model, names), SegmentTimer(model, names)
        self.context: Callable[[], Any] = nullcontext
        self.wide: torch.dtype | None = None
        self._batches: dict[int, Batch] = {}

    @contextmanager
    def under(self, precision: str, remat: str) -> Iterator[None]:
        """Within this context, use a precision, and recompute blocks according to `remat`."""
        undo: Callable[[], object] = lambda: None  # noqa: E731 - an Undo, as `rematerialise` returns
        if remat != "none":
            from paceline.split.remat import rematerialise

            undo = rematerialise(self.blocks, remat)  # type: ignore[arg-type]
        if precision in ("bf16", "fp16"):
            narrow = torch.bfloat16 if precision == "bf16" else torch.float16
            self.context = lambda: torch.autocast("cpu", narrow)
        if precision == "fp64":
            self.model.double()
            self.wide = torch.float64
        try:
            yield
        finally:
            undo()
            self.context = nullcontext
            if precision == "fp64":
                self.model.float()
                self.wide = None
            self.model.zero_grad(set_to_none=True)

    def take(self, samples: int) -> float:
        if samples not in self._batches:
            self._batches[samples] = self.loader.example(samples)
        batch = place(self._batches[samples], torch.device("cpu"), dtype=self.wide, channels_last=False)
        for parameter in self.model.parameters():
            parameter.grad = None
        with self.timer.around():
            with self.context():
                output = call(self.model, batch, loss=self.loss)
                loss = loss_before_training(self.loss, output, target_of(batch))
            self.timer.turn()
            loss.backward()
        return self.timer.seconds


def _steps(loop: Loop) -> Generator[list[float], None, None]:
    while True:
        for batch in loop.engine.loader:
            for info in loop.advance(batch):
                assert info.result.timing is not None, "on CPUs the times of a step are known at its end"
                loop.after_step(info)
                yield info.result.timing.parts_s


def _better(one: PassTiming, other: PassTiming) -> PassTiming:
    """Return the timing with the shorter time, and the larger of both memory peaks.

    Other work on the machine can only increase times.
    """
    return replace(min(one, other, key=lambda timing: timing.seconds), peak_bytes=max(one.peak_bytes, other.peak_bytes))


def _quiet(job: Job, global_batch: int) -> Job:
    ends = {
        "stop": StopSpec(steps=10**9),
        "evaluate": EvaluateSpec(every_epochs=10**6),
        "checkpoint": CheckpointSpec(every_seconds=1e9),
    }
    return job.model_copy(update={**ends, "global_batch": global_batch})


def _mean(group: Group, values: list[float]) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    group.all_reduce(tensor, "mean")
    return list(tensor.tolist())


def _peak_bytes() -> int:
    return kernel_bytes("status", {"VmHWM": "peak"}).get("peak", 0)


def _forget_peak() -> None:
    """Reset the kernel's peak memory counter; see clear_refs in proc(5)."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _trim() -> None:
    """Return free heap memory to the operating system, if the C library supports it.

    Otherwise memory of earlier measurements would hide later peaks.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# name of the segment after the last block, which no module can have
END = "/end"


class SegmentTimer:
    """Timer that divides a pass into segments at the calls of the named modules.

    There is one segment before the first module, one per module, and one after the last. In the backward pass, a
    segment ends when the gradient of its module's first input is complete. If no input of a module needs a gradient,
    its time counts for the previous segment.

    Attributes:
        names: names of the segments in call order, known after a pass.
        seconds: duration of the newest forward and backward pass.
    """

    def __init__(self, model: nn.Module, modules: Sequence[str]) -> None:
        self.model, self.modules = model, list(modules)
        self.names: tuple[str, ...] = ("",)
        self.seconds = 0.0
        self._forward: list[list[float]] = []
        self._backward: list[list[float]] = []

    def clear(self) -> None:
        """Discard all measured passes."""
        self._forward, self._backward = [], []

    def medians(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return each segment's median seconds, forward and backward.

        The values are scaled so that their sum is the median pass.
        """
        wholes = [sum(f) + sum(b) for f, b in zip(self._forward, self._backward, strict=True)]
        scale = statistics.median(wholes)
        forward, backward = (
            [statistics.median(values) for values in zip(*passes, strict=True)]
            for passes in (self._forward, self._backward)
        )
        factor = scale / (sum(forward) + sum(backward))
        return tuple(factor * s for s in forward), tuple(factor * s for s in backward)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Time one forward and backward pass within this context."""
        self._entered: dict[str, float] = {}
        self._complete: dict[str, float] = {}
        handles = [
            self.model.get_submodule(n).register_forward_pre_hook(partial(self._enter, n), with_kwargs=True)
            for n in self.modules
        ]
        handles += [self.model.get_submodule(name).register_forward_hook(self._leave) for name in self.modules]
        self._started = time.perf_counter()
        try:
            yield
            self._ended(time.perf_counter())
        finally:
            for handle in handles:
                handle.remove()

    def turn(self) -> None:
        """Mark the end of the forward pass."""
        self._turned = time.perf_counter()

    def _enter(self, name: str, module: nn.Module, args: Any, keywords: Any) -> None:
        if name not in self._entered:
            self._entered[name] = time.perf_counter()
            self._watch(name, (args, keywords))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        # the last of the modules to return sets the start of the last segment
        self._entered[END] = time.perf_counter()
        self._watch(END, output)

    def _watch(self, name: str, values: Any) -> None:
        given = next((t for t in tree_leaves(values) if isinstance(t, Tensor) and t.requires_grad), None)
        if given is not None:
            given.register_hook(partial(self._done, name, given.data_ptr()))
            self._last = given.data_ptr()

    def _done(self, name: str, which: int, gradient: Tensor) -> None:
        if name != END or which == self._last:
            self._complete[name] = time.perf_counter()

    def _ended(self, now: float) -> None:
        order = sorted(self._entered, key=lambda name: self._entered[name])
        self.names = ("", *order)
        starts = [self._started, *(self._entered[name] for name in order), self._turned]
        self._forward.append([later - earlier for earlier, later in pairwise(starts)])
        ends = [now, *(self._complete.get(name, 0.0) for name in order), self._turned]
        # if a time is missing or out of order, count it for the previous segment
        for i in range(1, len(ends) - 1):
            ends[i] = min(ends[i], ends[i - 1]) if ends[i] else ends[i - 1]
        self._backward.append([max(0.0, before - after) for before, after in pairwise(ends)])
        self.seconds = now - self._started
