"""The loop of a run: epochs, evaluations, checkpoints, the stop rule, and a clean end on signals."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.data.loader import Loader, held_out_batches, most_batches, padded
from paceline.engine.engine import Engine, Settings, StepResult
from paceline.engine.meter import CHECKPOINT
from paceline.errors import CheckpointError, ClusterError, DataError, NonFiniteError, tell_of_failure
from paceline.job.batch import Batch
from paceline.job.data import DataSets
from paceline.job.job import Job
from paceline.job.loss import build_metrics
from paceline.job.partition import Partition
from paceline.job.stop import StopRule
from paceline.job.zoo.models.moe import add_counts
from paceline.plans.plan import Plan
from paceline.rank_environment import is_our_rank
from paceline.split.layout import Layout
from paceline.split.memory import predicted_bytes
from paceline.split.mesh import Mesh
from paceline.split.parts import Part
from paceline.training.checkpoint.convert import Source, fitted, load_weights, weights_from
from paceline.training.checkpoint.reader import Loaded, load_latest
from paceline.training.checkpoint.writer import Checkpointer
from paceline.training.record.progress import PlainProgress
from paceline.training.record.recorder import Recorder
from paceline.training.record.run import Lines, Run
from paceline.training.record.slow_ranks import SlowRanks
from paceline.training.saving import Saving
from paceline.training.state import restore, snapshot

if TYPE_CHECKING:
    from paceline.split.deferred_init.initialise import DeferredModel

MAX_REWINDS = 3  # in a row, without a new checkpoint between them


def run_rank(arguments: list[str]) -> None:
    """Train the run in the directory `arguments[0]` as the rank that the environment names."""
    run = Run(arguments[0])
    with joined(deadline_s=run.job.deadline_s, transport=run.plan.transport) as group:
        train_in(run, group)


def train_in(run: Run, group: Group) -> None:
    """Train a run as one rank of `group`. Every rank of the group calls this."""
    job = run.job
    if run.cluster.kind != group.device.type:
        raise ClusterError(
            f"{run.cluster.describe()}, but this torch ({torch.__version__}) trains on {group.device.type}. "
            "Install a build of torch for the GPUs, or set CUDA_VISIBLE_DEVICES= to train on the CPU."
        )
    seed_all(job.seed)
    model = built(job, run.plan)
    data = job.data.build(input_shape=job.model.input_shape(), seed=job.seed)
    engine = build_engine(job, run.plan, model, data, group)
    seed_all(job.seed * 1_000_003 + 1 + engine.data_group.rank)  # from here on every data-parallel rank draws numbers of its own
    Loop(run, engine, data, group).run()
    engine.close()


def built(job: Job, plan: Plan) -> nn.Module | DeferredModel:
    """The job's model; where the plan divides it, without memory for its weights."""
    if not plan.splits:
        return job.model.build()
    from paceline.split.deferred_init.initialise import record

    return record(job.model.build)


def build_engine(job: Job, plan: Plan, model: nn.Module | DeferredModel, data: DataSets, group: Group) -> Engine:
    """The engine of this rank for a job: its part of the model, its optimizer, loss and share of the data.

    Raises:
        PlanError: the plan cannot divide this model so, or has another number of ranks.
    """
    mesh = Mesh.of(plan, group)
    loader = loader_of(job, mesh, data)
    loss = job.loss.build()
    settings = Settings(job.clip_norm, job.nonfinite, job.batch_norm, job.precision, job.seed, job.buffers)
    source = _published(job, model)
    if plan.splits:
        from paceline.engine.split_model import divide

        split = divide(model, plan, mesh, loader, loss, settings)
        if source is not None:
            load_weights({**split.parameters, **_kept(split.named_buffers(), source)}, split.parts, source)
        optimizer = job.optimizer.build(split.parameters.values(), fused=plan.fused)
        return Engine(split.model, optimizer, loss, loader, plan, group, settings, split)
    assert isinstance(model, nn.Module), "only a plan that divides a model takes one without memory"
    if source is not None:
        load_weights({**dict(model.named_parameters()), **_kept(dict(model.named_buffers()), source)}, None, source)
    return Engine(model, job.optimizer.build(model.parameters(), fused=plan.fused), loss, loader, plan, group, settings)


def _published(job: Job, model: nn.Module | DeferredModel) -> Source | None:
    """The weights that the job starts from, if it names any; held to fit the model."""
    if job.model.weights is None:
        return None
    return fitted(weights_from(job.model.weights), model if isinstance(model, nn.Module) else model.model)


def _kept(buffers: dict[str, Tensor], source: Source) -> dict[str, Tensor]:
    names = set(source)
    return {name: buffer for name, buffer in buffers.items() if name in names}


def loader_of(job: Job, mesh: Mesh, data: DataSets) -> Loader:
    """This data-parallel rank's share of the data."""
    hosts = mesh.data_rank_hosts
    host_samples = _host_samples(job, data, mesh.world)
    partition = Partition(
        job.partition,
        samples=len(data.train) if host_samples is None else sum(host_samples),  # type: ignore[arg-type]
        global_batch=job.global_batch,
        seed=job.seed,
        replica=mesh.data_rank,
        replicas=mesh.data_ranks,
        hosts=hosts,
        host_samples=host_samples,
        labels=getattr(data.train, "labels", None),
        drop_last=job.drop_last,
    )
    return Loader(data.train, partition, num_workers=job.data.num_workers, pin_memory=mesh.world.device.type == "cuda")


class Loop:
    """One rank's training of one run, from its newest checkpoint to the stop rule."""

    def __init__(self, run: Run, engine: Engine, data: DataSets, group: Group) -> None:
        self.run_directory, self.job, self.engine, self.data, self.group = run, run.job, engine, data, group
        self.metrics = build_metrics(self.job.metrics, engine.loss)
        self.epoch_steps = engine.loader.partition.steps_per_epoch
        self.stop = StopRule(self.job.stop, self.epoch_steps)
        self.total_steps = self.job.stop.total_steps(self.epoch_steps)
        self.events = Lines(run.path / "events.jsonl", lossy=True) if group.rank == 0 else None
        self.checkpointer = Checkpointer(
            run.checkpoints,
            rank=group.rank,
            world=group.size,
            keep=self.job.checkpoint.keep,
            deadline_s=self.job.deadline_s,
            report=self._event,
        )
        self.saving = Saving(self.checkpointer, self.job.checkpoint, engine.notes, self._event)
        engine.before_update = lambda: self.saving.before_update(engine.step_count + 1)
        self.recorder = Recorder(run.path, engine, epoch_steps=self.epoch_steps)
        self.progress = PlainProgress(self.total_steps) if group.rank == 0 and not is_our_rank() else None
        self.slow_ranks = SlowRanks(engine.plan, group.hosts)
        self.rejected: list[int] = []  # steps whose batch a rewind leaves out
        self.rewinds = 0
        self.evaluated_at = -1
        self.signal: str | None = None
        self._told = 0  # how many lines of the rule are in the record
        self._phase = engine.on_phase

    def run(self) -> None:
        """Train until the stop rule or a signal ends the run; the last state is saved either way.

        Raises:
            PacelineError: anything that keeps the run from going on. Checkpoints written before stay valid.
        """
        try:
            with self._signals():
                self._resume()
                if self.job.nonfinite == "rewind" and self.saving.at < 0:
                    self.save()
                self.engine.meter.restart()
                reason = self.stop.ended(self.engine.step_count)
                while reason is None:
                    reason = self._epoch()
                self._finish(reason)
        except BaseException as error:
            tell_of_failure(error)
            raise
        finally:
            self.engine.loader.close()
            self.recorder.close()
            if self.events is not None:
                self.events.close()

    def _epoch(self) -> str | None:
        """Train to the end of the epoch, or to a reason to stop, or to a rewind."""
        for batch in self.engine.loader:
            result = self.advance(batch)
            if result is not None and result.problem is not None and self._rewound(result):
                return None
            reason = self.stop.ended(self.engine.step_count) if result is None else self.after_step(result)
            if reason is not None:
                return reason
        every = self.job.evaluate.every_epochs
        if self.job.evaluate.every_steps is None and (self.engine.step_count // self.epoch_steps) % every == 0:
            return self._evaluate()
        return None

    def advance(self, batch: Batch | None) -> StepResult | None:
        """Take one step on this replica's share of a global batch and record it; None for a batch that a rewind left out."""
        engine = self.engine
        step = engine.step_count + 1
        if step in self.rejected:
            engine.step_count = step
            return None
        lr = self._set_learning_rate(step - 1)
        self._ask()
        result = engine.step(batch)
        position = engine.loader.position
        assert position is not None
        self.recorder.step(result, position.local, lr)
        if self.progress:
            self.progress.step(result, position.epoch)
        self._phase("data", step + 1)
        return result

    def after_step(self, result: StepResult) -> str | None:
        """Whether the step ends the run; evaluations and checkpoints that are due are made."""
        self.saving.poll()
        self._tell_of_lost_lines()
        for event, details in self.slow_ranks.step(result.step, self.engine.notes.take_busy()):
            self._event(event, details)
        self._tell_of_the_rule()
        votes = result.votes
        if "interrupted" in votes:
            return self.signal or "interrupted"
        # A loss that only this replica knows must not end the run of this replica alone.
        reason = self.stop.after_step(result.step, result.loss) if result.agreed else self.stop.ended(result.step)
        if reason is None and "out_of_time" in votes:
            reason = f"seconds: {self.job.stop.seconds:g} s are over"
        every = self.job.evaluate.every_steps
        if reason is None and every and result.step % every == 0:
            reason = self._evaluate()
        if self.saving.due(result.step, votes) and reason is None:
            self.save()
        return reason

    def _finish(self, reason: str) -> None:
        """Measure, save and note why the run ended."""
        interrupted = reason in ("interrupted", "SIGINT", "SIGTERM")
        if not interrupted and self.evaluated_at != self.engine.step_count:
            self._evaluate()
        elapsed_s = self.stop.elapsed_s
        if self.saving.at != self.engine.step_count:
            self.save()
        self.saving.finish()
        if any(found := self.group.gather_json(self.engine.expert_counts())):
            self._event("experts", {"step": self.engine.step_count, **add_counts(found)})
        reasons = self.group.gather_json(reason)
        named = next((r for r in reasons if r != "interrupted"), reason)
        self._event("end", {"reason": named, "step": self.engine.step_count, "elapsed_s": round(elapsed_s, 3), "interrupted": interrupted})
        self._phase("done", self.engine.step_count)

    def _evaluate(self) -> str | None:
        """Measure the held-out set, if there is one; returns a reason to stop if a metric reached its target."""
        engine = self.engine
        self.evaluated_at = engine.step_count
        if self.data.held_out is None:
            return None
        self._phase("evaluate", engine.step_count)
        whole = getattr(engine.loss, "whole_batch", False)  # then a measure of a batch depends on which samples are in it
        rank, size = engine.data_group.rank, engine.data_group.size
        batch = self.job.global_batch if whole else max(1, self.job.global_batch // size)
        batches: Iterable[Batch | None]
        batches = held_out_batches(self.data.held_out, batch=batch, replica=rank, replicas=size, in_turn=whole)
        if engine.split is not None and engine.split.all_must_compute:
            batches = padded(batches, most_batches(len(self.data.held_out), batch=batch, replicas=size, in_turn=whole))  # type: ignore[arg-type]
        metrics = engine.evaluate(batches, self.metrics)
        self._event("evaluation", {"step": engine.step_count, "epoch": engine.step_count / self.epoch_steps, "metrics": metrics})
        self.recorder.metrics(engine.step_count, metrics)
        return self.stop.after_evaluation(metrics)

    # State

    def save(self) -> None:
        """Begin a checkpoint of this moment; it is written while the next steps run."""
        self._phase("checkpoint", self.engine.step_count)
        values = {"stop": self.stop.state_dict(), "rejected": self.rejected, "synthetic": self.data.synthetic}
        self.saving.begin(self.engine.step_count, snapshot(self.engine, values), self.stop.elapsed_s)
        self.rewinds = 0
        self.engine.meter.mark(CHECKPOINT)

    def _resume(self) -> None:
        """Go on from the newest whole checkpoint, if there is any."""
        loaded = self._newest_checkpoint()
        if loaded is not None:
            try:
                values = restore(self.engine, loaded, self._event)
                self.stop.load_state_dict(values["stop"])
                self.rejected = values["rejected"]
                if self.engine.step_count != loaded.step:
                    raise ValueError(f"step {self.engine.step_count!r}")
            except (LookupError, TypeError, AttributeError, ValueError) as error:  # whole, but not as any version of ours writes it
                text = f"{loaded.path} holds values that no run writes ({error!r:.200})"
                raise CheckpointError(f"{text}. Remove that folder to go on from the checkpoint before.") from error
            self.saving.resumed(loaded.step, self.stop.elapsed_s)
        details = {
            "step": self.engine.step_count,
            "plan": str(self.run_directory.plan),
            "replicas": self.engine.plan.dp,
            "ranks": self.group.size,
        }
        details |= {
            "transport": self.group.transport,
            "samples_per_epoch": cast(Partition, self.engine.loader.partition).samples,
            "steps_per_epoch": self.epoch_steps,
            "total_steps": self.total_steps,
        }
        details |= {"parameters": self.engine.parameter_count, "synthetic": self.data.synthetic}
        details |= {"predicted_state_bytes": self._predicted_state_bytes()}
        self._event("resume" if loaded is not None else "start", details)
        self.engine.weighing.prepare()
        self._tell_of_the_rule()
        if self.group.transport_note is not None:
            self._event("transport", {"transport": self.group.transport, "reason": self.group.transport_note})

    def _tell_of_lost_lines(self) -> None:
        """Say in the record what is missing from it, once the disk takes lines again."""
        for lines in (self.recorder.lines, self.events):
            if lines is not None and self.events is not None and lines.missing and not self.events.lost:
                lost, lines.missing = lines.missing, 0
                self._event("lines_lost", {"file": str(lines.path.relative_to(self.run_directory.path)), "lines": lost})

    def _tell_of_the_rule(self) -> None:
        """What the rule has said since the last time: how it sums, and later what it found out while it trained."""
        said = self.engine.replica.said
        if len(said) > self._told:
            self._event("sync", {"said": said[self._told :]})
            self._told = len(said)
        if news := self.engine.weighing.news():
            self._event("loss", {"said": news})

    def _predicted_state_bytes(self) -> int:
        """Of rank 0's parameters, gradients and optimizer state, from their shapes; its lines tell what it holds (`state_bytes`)."""
        held = self.engine.named_parameters()
        parts = self.engine.parts or {name: Part(name, Layout.whole(p.shape)) for name, p in held.items()}
        return predicted_bytes(parts, held, self.job.optimizer).total

    def _newest_checkpoint(self) -> Loaded | None:
        """The newest that is whole; the ranks agree which that is."""
        group, folder = self.group, self.run_directory.checkpoints
        return load_latest(folder, rank=group.rank, world=group.size, report=self._event, agree=group.gather_json)

    def _rewound(self, result: StepResult) -> bool:
        """Follow the policy after an update that was left out; True if training went back to a checkpoint."""
        self._event("nonfinite", {"step": result.step, "problem": result.problem, "policy": self.job.nonfinite})
        if self.job.nonfinite != "rewind":
            return False
        self.rewinds += 1
        if self.rewinds > MAX_REWINDS:
            raise NonFiniteError(f"{result.problem}, after {MAX_REWINDS} rewinds in a row. Lower the learning rate or set clip_norm.")
        self.saving.settle()
        self.group.barrier()  # every rank's part of the checkpoint is written before any rank reads it
        loaded = self._newest_checkpoint()
        if loaded is None:  # that of before the first step could not be written
            raise NonFiniteError(f"{result.problem}, and there is no checkpoint to go back to.")
        rejected = [*self.rejected, result.step]
        self.stop.rewind(restore(self.engine, loaded)["stop"])
        self.rejected = rejected
        self.evaluated_at = -1
        self.saving.resumed(loaded.step, self.stop.elapsed_s)
        self.engine.meter.restart()
        self._event("rewind", {"from_step": result.step, "to_step": loaded.step})
        return True

    # Cadence

    def _set_learning_rate(self, step: int) -> float:
        lr = self.job.optimizer.lr * self.job.schedule.factor_at(step, self.total_steps)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _ask(self) -> None:
        """Ask the other ranks, with the next step's gradients, for what this rank's clock or a signal wants."""
        if self.signal is not None:
            self.engine.notes.vote("interrupted")
        if self.group.rank == 0:
            if self.stop.out_of_time():
                self.engine.notes.vote("out_of_time")
            self.saving.ask(self.engine.step_count + 1, self.stop.elapsed_s)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM ask for a stop after the step under way; the checkpoint that is being written is finished first."""

        def ask(number: int, frame: Any) -> None:
            self.signal = signal.Signals(number).name

        before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _event(self, event: str, details: dict[str, Any]) -> None:
        if self.events is not None:
            self.events.event(event, details)
        if self.progress is not None:
            self.progress.event({"event": event, **details})


def seed_all(seed: int) -> None:
    """Start every source of random numbers that models and data sets draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _host_samples(job: Job, data: DataSets, group: Group) -> list[int] | None:
    """How many samples each host holds, where each holds only its own files."""
    if not job.partition.host_files:
        return None
    lengths = group.gather_json(len(data.train))  # type: ignore[arg-type]
    of_host: dict[int, set[int]] = {}
    for host, length in zip(group.hosts, lengths, strict=True):
        of_host.setdefault(host, set()).add(length)
    for host, found in of_host.items():
        if len(found) > 1:
            raise DataError(f"the ranks of host {host} see training sets of different lengths: {sorted(found)}")
    return [of_host[host].pop() for host in sorted(of_host)]
