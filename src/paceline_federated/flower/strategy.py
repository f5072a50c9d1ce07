"""Rule of a federated job as a Flower `Strategy`."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy
from safetensors.torch import save_file

from paceline.errors import DataError, DeadlineError, FederateError
from paceline.job.job import Job
from paceline.run.build import load_published
from paceline_federated.client import LocalTraining, federated, first_model
from paceline_federated.flower.client import (
    ARRAYS,
    CONFIG,
    EXAMPLES,
    LR,
    METRICS,
    NUMBER,
    RETURNED,
    ROUND,
    SENT,
    weights_of,
)
from paceline_federated.flower.export import must_fit_flower
from paceline_federated.layout import tensors_of
from paceline_federated.measure import Measure
from paceline_federated.real.terms import returned_by
from paceline_federated.rule import Task, Update
from paceline_federated.server import Server

MODEL = "final-model"  # in the app's configuration: file of the last weights
_LOOK_S, _PATIENCE_S = 0.5, 600.0  # for nodes
_log = logging.getLogger("flwr")


def server_app(job: str | Path) -> Any:
    """A Flower ServerApp that trains a job by its own rule.

    The model goes to the file `final-model` of the app's configuration, as safetensors.

    Args:
        job: file of the job.
    """
    app: Any = ServerApp()

    def main(grid: Grid, context: Any) -> None:
        strategy = JobStrategy(Job.load(job))
        strategy.start(
            grid,
            strategy.first_arrays(),
            num_rounds=strategy.rounds,
            timeout=strategy.spec.deadline_s,
            evaluate_fn=strategy.measured,
        )
        strategy.save(Path(str(context.run_config.get(MODEL, "final_model.safetensors"))))

    app.main()(main)
    return app


class JobStrategy(Strategy):
    """A job's federated rule, with the server of paceline's own federations.

    The nodes run `paceline_federated.flower.client`. Clients are chosen, weighed, bounded and refused as under
    `paceline federate serve`, and the weights are the same, to rounding.

    Attributes:
        rounds: that the job makes.

    Raises:
        JobError: the job has something that is not for Flower's messages.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.spec, self.rounds = job, federated(job), must_fit_flower(job)
        job.fetch()
        model = first_model(job)
        load_published(job, model)
        self.training = LocalTraining(job, model)
        layout = self.training.layout
        secret = secrets.randbits(62)
        self.server = Server(job, layout, layout.flatten(model), self.spec.clients, secret=secret)
        self._returned = returned_by(self.server.rule, layout)
        self._measure, self._held_out = Measure(self.training), self._own_data()
        self._numbers: dict[int, int] = {}  # of clients, by Flower's node
        self._samples: dict[int, int] = {}  # of each client
        self._task: Task | None = None
        self._chosen = self._failures = 0

    def first_arrays(self) -> ArrayRecord:
        """The weights that the job begins with."""
        return self._arrays()

    def summary(self) -> None:
        """Log the rule."""
        _log.info("\t├──> paceline: rule %s, %s clients", self.spec.rule, self.spec.clients)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Tasks of the clients that are chosen among those that are there."""
        self._meet(grid, self.spec.clients if server_round == 1 else self.spec.least)
        there = {number: node for node, number in self._numbers.items() if self._samples[number]}
        chosen = self.server.choose(server_round, np.array(sorted(there)))
        task = self._task = self.server.task(server_round)
        self._chosen = len(chosen)
        content = RecordDict(
            {ARRAYS: self._arrays(), CONFIG: ConfigRecord({**config, ROUND: server_round, LR: task.lr})}
        )
        if task.sent:
            content[SENT] = ArrayRecord(dict(task.sent))
        return [Message(content, dst_node_id=there[number], message_type=MessageType.TRAIN) for number in chosen]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Step on the updates that can be used.

        Raises:
            FederateError: too few could be, in too many rounds in a row.
        """
        aggregator, answered = self.server.aggregator(server_round), 0
        for reply in replies:
            number = self._numbers[reply.metadata.src_node_id]
            answered += 1
            try:
                aggregator.add(self._update(number, reply))
            except FederateError as error:
                aggregator.refused[number] = str(error)
        for number, why in sorted(aggregator.refused.items()):
            _log.warning("\t> the update of client %s is refused: %s", number, why)
        agreed = aggregator.agree() if aggregator.clients >= self.spec.least else None
        told = {"chosen": self._chosen, "missing": self._chosen - answered, "refused": len(aggregator.refused)}
        if agreed is None:
            self._failures += 1
            if self._failures >= self.spec.max_failures:
                raise FederateError(
                    f"in {self._failures} rounds in a row fewer than {self.spec.least} clients sent an update that can "
                    "be used (federate.max_failures)"
                )
            return None, MetricRecord(told)
        self._failures = 0
        self.server.apply(agreed)
        spent = {"epsilon": self.server.privacy.epsilon} if self.server.privacy is not None else {}
        metrics = MetricRecord({**told, "clients": agreed.clients, "loss": agreed.loss, **spent})
        return self._arrays(), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Have all clients that keep samples apart be measured, when the job measures."""
        if not self.spec.held_out or not self._measures(server_round):
            return []
        content = RecordDict({ARRAYS: arrays, CONFIG: ConfigRecord({**config, ROUND: server_round})})
        nodes = [node for node, number in self._numbers.items() if self._samples[number]]
        return [Message(content, dst_node_id=node, message_type=MessageType.EVALUATE) for node in nodes]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Means of the clients' metrics by samples, and the range of the first one."""
        found = [dict(reply.content[METRICS]) for reply in replies if not reply.has_error()]
        if not found:
            return None
        weights = [float(metrics.pop(EXAMPLES)) for metrics in found]
        means = {name: float(np.average([each[name] for each in found], weights=weights)) for name in found[0]}
        of_clients = [each[self._measure.of_clients] for each in found]
        return MetricRecord({**means, "least of clients": min(of_clients), "most of clients": max(of_clients)})

    def measured(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """The job's metrics on the server's validation set.

        None where it has none, or the job does not measure in this round.
        """
        if self._held_out is None or not self._measures(server_round):
            return None
        weights = weights_of(arrays, self.training.layout)
        return MetricRecord(self._measure.validation(weights, self._held_out))

    def save(self, file: Path) -> None:
        """Write the newest weights of the whole model as safetensors."""
        model = self.training.show(self.server.weights)
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors_of(model).items()}, file)
        _log.info("the model is in %s", file)

    def _arrays(self) -> ArrayRecord:
        named = self.training.layout.named(self.server.weights)
        return ArrayRecord({name: tensor.contiguous() for name, tensor in named.items()})

    def _update(self, number: int, reply: Message) -> Update:
        """A client's update, of which nothing is believed.

        Raises:
            FederateError: it is none.
        """
        task, layout = self._task, self.training.layout
        assert task is not None, "a round is under way"
        if reply.has_error():
            raise FederateError(f"the client says: {reply.error.reason}")
        content = reply.content
        if ARRAYS not in content or METRICS not in content:
            raise FederateError("this is no update")
        weights, metrics = weights_of(content[ARRAYS], layout), content[METRICS]
        samples, steps, loss = (metrics.get(key, 0) for key in (EXAMPLES, "steps", "loss"))
        if not isinstance(samples, int) or not isinstance(steps, int) or not 0 < samples <= self._samples[number]:
            raise FederateError(f"{samples} samples, where this client said {self._samples[number]}")
        returned = content[RETURNED].to_torch_state_dict() if RETURNED in content else {}
        returned = {name: tensor.to(layout.dtype) for name, tensor in returned.items()}
        if returned.keys() != self._returned.keys():
            raise FederateError(f"rule {self.spec.rule} needs other tensors of its clients than {list(returned)}")
        delta = weights - task.weights
        return Update(number, task.round, task.version, delta, returned, samples, steps, float(loss))

    def _meet(self, grid: Grid, least: int) -> None:
        """Learn which client each node is, and wait until enough are there.

        Raises:
            DeadlineError: fewer came in time.
            FederateError: two nodes are the same client.
        """
        until = time.monotonic() + _PATIENCE_S
        while True:
            nodes = set(grid.get_node_ids())
            self._numbers = {node: number for node, number in self._numbers.items() if node in nodes}
            self._ask(grid, nodes - self._numbers.keys())
            if sum(self._samples[number] > 0 for number in self._numbers.values()) >= self._possible(least):
                return
            if time.monotonic() > until:
                raise DeadlineError(f"{len(self._numbers)} of {least} clients are there after {_PATIENCE_S:.0f} s")
            time.sleep(_LOOK_S)

    def _possible(self, least: int) -> int:
        """Number of clients to wait for, without those that are known to have no samples."""
        return max(1, min(least, self.spec.clients - sum(not count for count in self._samples.values())))

    def _ask(self, grid: Grid, nodes: set[int]) -> None:
        asked = [Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY) for node in sorted(nodes)]
        for reply in grid.send_and_receive(asked, timeout=self.spec.deadline_s) if asked else ():
            if reply.has_error():
                raise FederateError(f"node {reply.metadata.src_node_id}: {reply.error.reason}")
            node, metrics = reply.metadata.src_node_id, reply.content[METRICS]
            number = int(metrics[NUMBER])
            if number in self._numbers.values():
                raise FederateError(f"two nodes are client {number}: give each a partition-id of its own")
            self._numbers[node], self._samples[number] = number, int(metrics[EXAMPLES])

    def _measures(self, server_round: int) -> bool:
        every = self.job.evaluate.every_steps
        return server_round == self.rounds or bool(every and server_round and server_round % every == 0)

    def _own_data(self) -> Any:
        try:
            return self.job.data.build(input_shape=self.job.model.input_shape(), seed=self.job.seed).held_out
        except DataError as error:
            _log.warning("nothing is measured at the server, which has no data: %s", error)
            return None
