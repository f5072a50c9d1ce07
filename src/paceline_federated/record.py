"""Record of a federated run: a line per round, events, and checkpoints."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.cluster.discover import discover
from paceline.data.samples import held_out_batches
from paceline.engine.evaluation import Measured
from paceline.engine.meter import PARTS
from paceline.errors import CheckpointError, JobError, RunError
from paceline.job.batch import place, target_of
from paceline.job.job import Job
from paceline.job.loss import Metric, build_metrics
from paceline.job.loss_items import ModelsOwn, call
from paceline.planning.plan import Plan
from paceline.run.record.run import JsonLines, Run
from paceline.run.train import RUNS, new_directory
from paceline.state.reader import Loaded, load_latest
from paceline.state.writer import Checkpointer, Snapshot
from paceline.units import count
from paceline_federated.client import ClientState, LocalTraining, tensors_of
from paceline_federated.server import Aggregate, Aggregator, Server

_MODEL, _BUFFER, _SERVER, _EXTRA = "model/", "buffer/", "server/", "extra/"


class Turnout(NamedTuple):
    """Number of a round's clients for each kind of response.

    Attributes:
        chosen: number of clients that received the task.
        answered: number of clients that answered in time.
        dropped: number of clients that did not answer.
        late: number of clients that answered after the deadline.
        more: additional numbers of the round, by name.
    """

    chosen: int
    answered: int
    dropped: int
    late: int = 0
    more: Mapping[str, float] = {}


class FederatedRecord:
    """Files of a federated run, open for writing.

    Attributes:
        failures: number of consecutive rounds without a step.

    Raises:
        RunError: the files cannot be written.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.rounds = JsonLines(run.path / "steps" / "rank-0.jsonl", lossy=True)
        self.events = JsonLines(run.path / "events.jsonl", lossy=True)
        self.failures = 0

    def round(
        self,
        server: Server,
        number: int,
        aggregator: Aggregator,
        turnout: Turnout,
        *,
        began_s: float,
        compute_s: float = 0.0,
        clipped: int | None = None,
    ) -> Aggregate | None:
        """Step the server with the updates of a round, and record the round.

        A round with too few updates takes no step, and counts as a failure. In the record, a round is a step of the
        run, and the times of the phases of a round add up to the time of the step.

        Args:
            number: number of the round, from 1. With an asynchronous rule, this is the number of the server's step.
            began_s: start of the round, as returned by `time.perf_counter`.
            compute_s: seconds of client training in this process; 0 for real clients.
            clipped: number of updates that were clipped before they reached the aggregator.

        Returns:
            The aggregated update, or None if too few clients answered.

        Raises:
            JobError: too many consecutive rounds took no step.
        """
        aggregate = aggregator.aggregate() if aggregator.clients >= server.spec.least else None
        self._step(server, number, aggregate, turnout.chosen, aggregator.refused)
        step_s = time.perf_counter() - began_s
        parts = dict.fromkeys(PARTS, 0.0) | {"compute": compute_s, "comm": step_s - compute_s}
        samples = 0 if aggregate is None else aggregate.samples
        values: dict[str, Any] = {
            "step": number,
            "epoch": 0,
            "time": round(time.time(), 3),
            "loss": None if aggregate is None or not math.isfinite(aggregate.loss) else aggregate.loss,
            "samples": samples,
            "local_samples": samples,
            "lr": server.lr_in(number),
            "grad_norm": None if aggregate is None else float(aggregate.delta.norm()),
            "step_s": round(step_s, 6),
            **{f"{part}_s": round(seconds, 6) for part, seconds in parts.items()},
            "clients": 0 if aggregate is None else aggregate.clients,
            "chosen": turnout.chosen,
            "dropped": turnout.dropped,
            "late": turnout.late,
            "refused": len(aggregator.refused),
            "clipped": 0 if aggregate is None else aggregate.clipped if clipped is None else clipped,
            "down_bytes": turnout.chosen * server.task_bytes,
            "up_bytes": turnout.answered * server.update_bytes,
            **({} if server.privacy is None else {"epsilon": server.privacy.epsilon}),
            **turnout.more,
        }
        self.rounds.write(json.dumps(values))
        return aggregate

    def _step(
        self, server: Server, round: int, aggregate: Aggregate | None, chosen: int, refused: Mapping[int, str]
    ) -> None:
        if refused:
            named = {str(client): reason for client, reason in list(refused.items())[:10]}
            self.events.event("refused", {"step": round, "clients": len(refused), "reasons": named})
        if aggregate is not None:
            self.failures = 0
            server.apply(aggregate)
            return
        self.failures += 1
        details = {"step": round, "chosen": chosen, "refused": len(refused), "failures": self.failures}
        self.events.event("round_failed", details)
        if self.failures >= server.spec.max_failures:
            raise JobError(
                "federate.too_few_updates",
                "round {round}: in each of the last {rounds}, fewer than {least} of {clients} sent a usable update "
                "(federate.max_failures). Choose more clients with federate.per_round, or find out why they drop "
                "out: events.jsonl contains the reason for each refused update.",
                round=round,
                clients=count(chosen, "client"),
                least=server.spec.least,
                rounds=count(self.failures, "round"),
            )

    def close(self) -> None:
        """Close the files."""
        self.rounds.close()
        self.events.close()


def run_at(job: Job, path: Path, *, resume: bool) -> Run:
    """Open the run at `path`: create a new run, or resume an existing run.

    Raises:
        JobError: the run belongs to another job.
        RunError: the run exists and `resume` is False, or the run cannot be written.
    """
    if resume and (path / "job.yaml").exists():
        run = Run(path)
        run.continue_with(job, discover(), Plan())
        return run
    return Run.create(path, job, discover(), Plan())


class ServerCheckpoints:
    """Checkpoints of a server, in the usual format of runs.

    Args:
        model: the job's model. The server's weights are loaded into this model to be saved.
    """

    def __init__(self, run: Run, server: Server, model: nn.Module, record: FederatedRecord) -> None:
        self.run, self.server, self.model, self.record = run, server, model, record
        self._writer: Checkpointer | None = None

    def save(self, round: int, values: Mapping[str, Any], extra: Mapping[str, Tensor]) -> None:
        """Write a checkpoint, and wait until it is on disk.

        Args:
            extra: additional tensors.

        Raises:
            CheckpointError: the checkpoint cannot be written. Older checkpoints are unchanged.
        """
        if self._writer is None:
            spec, job = self.run.job.checkpoint, self.run.job
            self._writer = Checkpointer(
                self.run.checkpoints, rank=0, world=1, keep=spec.keep, deadline_s=job.deadline_s,
                report=self.record.events.event,
            )  # fmt: skip
        server, tensors = self.server, tensors_of(self.model)
        server.layout.load(self.model, server.weights)
        parameters = {name for name, _ in self.model.named_parameters()}
        shared = {f"{_MODEL}{name}": tensors[name].detach() for name in parameters}
        own = {f"{_BUFFER}{name}": tensors[name] for name in tensors if name not in parameters}
        of_rule, state = server.state_dict()
        shared |= {f"{_SERVER}{name}": tensor for name, tensor in of_rule.items()}
        shared |= {f"{_EXTRA}{name}": tensor.contiguous() for name, tensor in extra.items()}
        self._writer.save(round, Snapshot(shared, own=own, values={**values, "server": state}))
        self._writer.release()
        self._writer.close()

    def load(self) -> tuple[Loaded, dict[str, Tensor]] | None:
        """Restore the server from the newest complete checkpoint, and return it.

        Raises:
            CheckpointError: checkpoints exist, but none is complete and matches the job.
        """
        loaded = load_latest(self.run.checkpoints, rank=0, world=1, report=self.record.events.event)
        if loaded is None:
            return None
        tensors = tensors_of(self.model)
        try:
            for name in loaded.shared:
                if name.startswith(_MODEL):
                    loaded.shared.fill(name, tensors[name.removeprefix(_MODEL)].detach())
            for name, buffer in loaded.own.items():
                tensors[name.removeprefix(_BUFFER)].copy_(buffer)
            of_rule = {n.removeprefix(_SERVER): loaded.shared[n] for n in loaded.shared if n.startswith(_SERVER)}
            weights = self.server.layout.flatten(self.model)
            self.server.load_state_dict(weights, of_rule, loaded.values["server"])
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(
                "federate.checkpoint_of_other_job",
                "{checkpoint} does not belong to this federated job: {error}",
                checkpoint=loaded.path,
                error=error,
            ) from error
        extra = {n.removeprefix(_EXTRA): loaded.shared[n] for n in loaded.shared if n.startswith(_EXTRA)}
        return loaded, extra


def directory_of(job: Job, run: str | Path | None, *, resume: bool) -> Path:
    """Choose a run's directory: the given one, the newest to resume, or a new one.

    Raises:
        RunError: there is no run to resume.
    """
    if run is not None:
        return Path(run)
    if not resume:
        return new_directory(job)
    newest = Run.newest(RUNS, job.name) if RUNS.is_dir() else None
    if newest is None:
        raise RunError(
            "federate.nothing_to_resume",
            "{runs} contains no run of job {job} to continue. Leave --resume out.",
            job=job.name,
            runs=RUNS,
        )
    return newest.path


class Measure:
    """Evaluation of a shared model with the job's metrics."""

    def __init__(self, training: LocalTraining) -> None:
        self.training = training
        self.metrics: list[Metric] = build_metrics(training.job.metrics, training.loss)

    def validation(self, weights: Tensor, dataset: Dataset[Any], state: ClientState | None = None) -> dict[str, float]:
        """Compute every metric of the weights on a data set.

        Args:
            state: state of the client whose personal parameters complete the weights.
        """
        training = self.training
        model = training.show(weights, state).eval()
        measured = Measured(self.metrics)
        dtype = None if training.layout.dtype is torch.float32 else training.layout.dtype
        with torch.inference_mode():
            for read in held_out_batches(dataset, batch=training.job.global_batch, replica=0, replicas=1):
                batch = place(read, torch.device("cpu"), dtype=dtype, channels_last=False)
                output = call(model, batch, loss=training.loss)
                target: Any = batch if isinstance(training.loss, ModelsOwn) else target_of(batch)
                measured.add([metric(output, target) for metric in self.metrics])
        return measured.results()

    @property
    def of_clients(self) -> str:
        """Return the metric for comparing clients: the job's first metric, or the loss."""
        return self.metrics[1].name if len(self.metrics) > 1 else self.metrics[0].name


class Fairness(NamedTuple):
    """Distribution of a metric over clients, each evaluated on its own samples.

    Attributes:
        metric: name of the metric.
        clients: number of evaluated clients.
        worst: lowest value of the metric.
        tenth: tenth percentile of the metric.
        median: median of the metric.
        best: highest value of the metric.
        variance: variance of the metric over the clients.
    """

    metric: str
    clients: int
    worst: float
    tenth: float
    median: float
    best: float
    variance: float

    @classmethod
    def of(cls, metric: str, values: Iterable[float]) -> Fairness | None:
        """Compute the distribution of finite values; return None without finite values.

        Args:
            metric: name of the metric. For `loss`, where lower is better, worst and best are swapped.
        """
        finite = np.array([value for value in values if np.isfinite(value)])
        if not len(finite):
            return None
        sign = -1.0 if metric == "loss" else 1.0
        worst, tenth, median, best = (sign * float(np.percentile(sign * finite, at)) for at in (0, 10, 50, 100))
        return cls(metric, len(finite), worst, tenth, median, best, float(finite.var()))

    def sentence(self) -> str:
        """Describe the distribution as text."""
        return (
            f"{self.metric} of {self.clients} clients on their own samples: worst {self.worst:.4f}, tenth percentile "
            f"{self.tenth:.4f}, median {self.median:.4f}, best {self.best:.4f}, variance {self.variance:.3g}"
        )
