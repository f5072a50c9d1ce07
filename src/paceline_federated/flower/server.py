"""Flower `Strategy` with the rule of a federated job, which records the run."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.common import FitIns, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.constant import ErrorCode
from flwr.server import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Strategy,
)
from safetensors.torch import save_file

from paceline.errors import DataError, DeadlineError, FederateError
from paceline.job.job import Job
from paceline.job.stop import Epochs, StopRule
from paceline.run.build import load_published
from paceline.run.train import new_directory
from paceline_federated.client import Layout, LocalTraining, federated, first_model, tensors_of
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
    most_weight,
    weights_of,
)
from paceline_federated.flower.limits import FEWEST, must_fit_flower
from paceline_federated.record import Fairness, FederatedRecord, Measure, Turnout, run_at
from paceline_federated.rules import FederatedRule, Local, Task, Update
from paceline_federated.server import Aggregator, Server

MODEL = "final_model.safetensors"  # file of the final weights
RUN = "run"  # key of the run's directory in the app's configuration
_LOOK_S, _PATIENCE_S = 0.5, 600.0  # interval and limit of the wait for nodes
_MISSING = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)
_log = logging.getLogger("flwr")


def serve(job: Job, grid: Grid, context: Context) -> None:
    """Run all rounds of a job, and record the run.

    Raises:
        PacelineError: the job or its data is invalid, or too few clients answer.
    """
    named = str(context.run_config.get(RUN, ""))
    run = run_at(job, Path(named) if named else new_directory(job), resume=False)
    try:
        with closing(FederatedRecord(run)) as record:
            ours = JobStrategy(job, record, context)
            strategy = ours if ours.spec.privacy is None else private(ours)
            first = ours.first_arrays()
            result = strategy.start(
                grid, first, num_rounds=ours.rounds, timeout=ours.spec.deadline_s, evaluate_fn=ours.measured
            )
            ours.end(result.arrays or first, run.path / MODEL)
    except BaseException:
        run.withdraw_unless_begun()
        raise
    _log.info("the record and the model are in %s", run.path.absolute())


class JobStrategy(Strategy):
    """Flower strategy that applies a job's federated rule, with the same server as simulations.

    The nodes run `paceline_federated.flower.client`. Clients are chosen, weighted, clipped and refused as in a
    simulation, and the resulting weights are equal except for rounding. With `federate.secure`, `configure_train`
    itself sums the updates with SecAgg+, and sends no other message.

    Attributes:
        rounds: number of rounds of the job.

    Raises:
        JobError: the job has settings that a deployment does not support.
    """

    def __init__(self, job: Job, record: FederatedRecord, context: Context) -> None:
        self.job, self.spec, self.rounds = job, federated(job), must_fit_flower(job)
        self.record, self._context = record, context
        job.fetch()
        model = first_model(job)
        load_published(job, model)
        self.training = LocalTraining(job, model)
        layout = self.training.layout
        self.server = Server(job, layout, layout.flatten(model), self.spec.clients, adds_noise=False)
        self._returned = returned_by(self.server.rule, layout)
        self._measure, self._held_out = Measure(self.training), self._own_data()
        self._numbers: dict[int, int] = {}  # numbers of clients, by Flower's node
        self._samples: dict[int, int] = {}  # number of samples of each client
        self._task: Task | None = None
        self._sum: Sum | None = None  # secure sum of the current round, if the job uses one
        self._chosen = self._answered = self._clipped = 0
        self._refused: dict[int, str] = {}
        self._began_s, self._round_began_s = time.monotonic(), 0.0

    def first_arrays(self) -> ArrayRecord:
        """Return the job's initial weights."""
        return self._arrays()

    def summary(self) -> None:
        """Log the rule."""
        _log.info("\t├──> paceline: rule %s, %s clients", self.spec.rule, self.spec.clients)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Choose among the available clients, and return their tasks."""
        self._meet(grid, self.spec.clients if server_round == 1 else self.spec.least)
        if self.spec.privacy is not None:
            self.server.weights = weights_of(arrays, self.training.layout)  # with Flower's differential privacy
            np.random.seed()  # the job's seed must not predict the noise
        there = {number: node for node, number in self._numbers.items() if self._samples[number]}
        chosen = self.server.choose(server_round, np.array(sorted(there)))
        task = self._task = self.server.task(server_round)
        self._chosen, self._answered, self._clipped, self._refused = len(chosen), 0, 0, {}
        self._round_began_s = time.perf_counter()
        if self.spec.secure is not None:
            self._sum = Sum([there[number] for number in chosen], task)
            self._sum.make(self._workflow(len(chosen)), grid, self._context)
            return []
        content = RecordDict(
            {ARRAYS: self._arrays(), CONFIG: ConfigRecord({**config, ROUND: server_round, LR: task.lr})}
        )
        if task.sent:
            content[SENT] = ArrayRecord(dict(task.sent))
        return [Message(content, dst_node_id=there[number], message_type=MessageType.TRAIN) for number in chosen]

    def usable(self, replies: Iterable[Message]) -> list[Message]:
        """Return the replies with a valid update; refuse other replies with a reason."""
        found = []
        for reply in replies:
            if _is_missing(reply):
                continue
            number = self._numbers[reply.metadata.src_node_id]
            self._answered += 1
            try:
                update = self._update(number, reply)
            except FederateError as error:
                self._refused[number] = str(error)
            else:
                found.append(reply)
                if self.spec.privacy is not None:
                    self._clipped += float(update.delta.norm()) > self.spec.privacy.clip
        return found

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take a step with the valid updates, and record the round.

        Raises:
            JobError: too many rounds in a row had too few valid updates.
        """
        server, aggregator = self.server, self.server.aggregator(server_round)
        assert self._task is not None, "a round is under way"
        if self._sum is not None:
            self._answered = len(self._sum.nodes)
            self._add_sum(self._sum, aggregator)
        else:
            kept = list(replies) if self.spec.privacy is not None else self.usable(replies)
            for reply in kept:
                aggregator.add(self._update(self._numbers[reply.metadata.src_node_id], reply))
        aggregator.refused |= self._refused
        for number, why in sorted(aggregator.refused.items()):
            _log.warning("\t> the update of client %s is refused: %s", number, why)
        missing = self._chosen - self._answered
        turnout = Turnout(self._chosen, self._answered, missing)
        clipped = None if self.spec.privacy is None else self._clipped  # Flower has already clipped these updates
        aggregate = self.record.round(
            server, server_round, aggregator, turnout, began_s=self._round_began_s, clipped=clipped
        )
        told = {"chosen": self._chosen, "missing": missing, "refused": len(aggregator.refused)}
        if aggregate is None:
            return None, MetricRecord(told)
        more = {"epsilon": server.privacy.epsilon} if server.privacy is not None else {}
        return self._arrays(), MetricRecord({**told, "clients": aggregate.clients, "loss": aggregate.loss, **more})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the evaluation tasks of all clients with held-out samples, in rounds with evaluation."""
        if not self.spec.held_out or not self._measures(server_round):
            return []
        content = RecordDict({ARRAYS: arrays, CONFIG: ConfigRecord({**config, ROUND: server_round})})
        nodes = [node for node, number in self._numbers.items() if self._samples[number]]
        return [Message(content, dst_node_id=node, message_type=MessageType.EVALUATE) for node in nodes]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average each metric over clients, weighted by samples, and report the first metric's range.

        For metrics such as F1 or perplexity, this mean differs from the metric of all samples together. The names of
        the results therefore contain "mean over clients".
        """
        found = [dict(reply.content[METRICS]) for reply in replies if not reply.has_error()]
        if not found:
            return None
        weights = [float(metrics.pop(EXAMPLES)) for metrics in found]
        means = {
            f"{name}, mean over clients": float(np.average([each[name] for each in found], weights=weights))
            for name in found[0]
        }
        fairness = Fairness.of(self._measure.of_clients, [each[self._measure.of_clients] for each in found])
        if fairness is None:
            return MetricRecord(means)
        self.record.events.event("clients", {"step": server_round, **fairness._asdict()})
        return MetricRecord({**means, "worst of clients": fairness.worst, "best of clients": fairness.best})

    def measured(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Compute the job's metrics on the server's validation set.

        Returns None if there is no validation set, or this round has no evaluation.
        """
        if self._held_out is None or not self._measures(server_round):
            return None
        metrics = self._measure.validation(weights_of(arrays, self.training.layout), self._held_out)
        self.record.events.event("evaluation", {"step": server_round, "epoch": server_round, "metrics": metrics})
        return MetricRecord(metrics)

    def end(self, arrays: ArrayRecord, file: Path) -> None:
        """Write the final weights as safetensors, and the end of the record."""
        model = self.training.show(weights_of(arrays, self.training.layout))
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors_of(model).items()}, file)
        reason = StopRule(self.job.stop, Epochs(1)).ended(self.rounds)
        elapsed_s = round(time.monotonic() - self._began_s, 3)
        details = {"reason": reason, "step": self.rounds, "elapsed_s": elapsed_s, "interrupted": False}
        self.record.events.event("end", details)

    def _begin(self) -> None:
        samples = self._samples
        details = {
            "step": 0,
            "plan": str(self.record.run.plan),
            "federated": self.spec.rule,
            "clients": self.spec.clients,
            "clients_without_samples": sum(not count for count in samples.values()),
            "samples_per_epoch": sum(samples.values()),
            "total_steps": self.rounds,
            "parameters": self.training.layout.parameters,
            "synthetic": False,
        }
        self.record.events.event("start", details)

    def _workflow(self, clients: int) -> SecAggPlusWorkflow:
        secure = self.spec.secure
        assert secure is not None, "the job sums securely"
        threshold = max(FEWEST, round(secure.reconstruction_threshold * (secure.num_shares or clients)))
        return SecAggPlusWorkflow(
            secure.num_shares or 1.0, threshold, max_weight=most_weight(self.spec),
            clipping_range=secure.clipping_range, quantization_range=secure.quantization_range,
            timeout=self.spec.deadline_s,
        )  # fmt: skip

    def _add_sum(self, secure_sum: Sum, aggregator: Aggregator) -> None:
        """Pass the clients' weighted mean to the aggregator as a sum."""
        if secure_sum.mean is None:
            return
        layout, clients = self.training.layout, len(secure_sum.nodes)
        delta, *returned, loss = (torch.from_numpy(array).to(layout.dtype) for array in secure_sum.mean)
        samples = sum(self._samples[self._numbers[node]] for node in secure_sum.nodes)
        named = {name: tensor * clients for name, tensor in zip(sorted(self._returned), returned, strict=True)}
        weight = float(secure_sum.weight)
        aggregator.add_sum(delta * weight, weight, named, clients, samples, float(loss[0] / loss[1]))

    def _arrays(self) -> ArrayRecord:
        named = self.training.layout.named(self.server.weights)
        return ArrayRecord({name: tensor.contiguous() for name, tensor in named.items()})

    def _update(self, number: int, reply: Message) -> Update:
        """Validate and read the update of a client, which is untrusted.

        Raises:
            FederateError: the reply is not a valid update.
        """
        task, layout = self._task, self.training.layout
        assert task is not None, "a round is under way"
        if reply.has_error():
            raise FederateError("federate.client_refused", "the client reports: {reason}", reason=reply.error.reason)
        content = reply.content
        if ARRAYS not in content or METRICS not in content:
            raise FederateError("federate.not_an_update", "the message is not an update")
        weights, metrics = weights_of(content[ARRAYS], layout), content[METRICS]
        samples, steps, loss = (metrics.get(key, 0) for key in (EXAMPLES, "steps", "loss"))
        if not isinstance(samples, int) or not isinstance(steps, int) or not 0 < samples <= self._samples[number]:
            raise FederateError(
                "federate.samples_differ",
                "the client now has {samples} samples, but previously reported {before}",
                samples=samples,
                before=self._samples[number],
            )
        returned = content[RETURNED].to_torch_state_dict() if RETURNED in content else {}
        returned = {name: tensor.to(layout.dtype) for name, tensor in returned.items()}
        if returned.keys() != self._returned.keys():
            raise FederateError(
                "federate.other_tensors",
                "the clients returned {returned}, but rule {rule} needs other tensors",
                rule=self.spec.rule,
                returned=list(returned),
            )
        delta = weights - task.weights
        return Update(number, task.round, task.version, delta, returned, samples, steps, float(loss))

    def _meet(self, grid: Grid, least: int) -> None:
        """Map nodes to clients, and wait until enough nodes are connected.

        Raises:
            DeadlineError: too few nodes connected in time.
            FederateError: two nodes have the same client number.
        """
        until = time.monotonic() + _PATIENCE_S
        while True:
            nodes = set(grid.get_node_ids())
            self._numbers = {node: number for node, number in self._numbers.items() if node in nodes}
            self._ask(grid, nodes - self._numbers.keys())
            if sum(self._samples[number] > 0 for number in self._numbers.values()) >= self._possible(least):
                if self._task is None:
                    self._begin()
                return
            if time.monotonic() > until:
                raise DeadlineError(
                    "federate.too_few_nodes",
                    "only {there} of {needed} clients are connected after {waited_s:.0f} s",
                    there=len(self._numbers),
                    needed=least,
                    waited_s=_PATIENCE_S,
                )
            time.sleep(_LOOK_S)

    def _possible(self, least: int) -> int:
        """Return the number of clients to wait for, without clients known to have no samples."""
        return max(1, min(least, self.spec.clients - sum(not count for count in self._samples.values())))

    def _ask(self, grid: Grid, nodes: set[int]) -> None:
        asked = [Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY) for node in sorted(nodes)]
        for reply in grid.send_and_receive(asked, timeout=self.spec.deadline_s) if asked else ():
            if _is_missing(reply):
                continue
            if reply.has_error():
                raise FederateError(
                    "federate.node_failed",
                    "node {node}: {reason}",
                    node=reply.metadata.src_node_id,
                    reason=reply.error.reason,
                )
            node, metrics = reply.metadata.src_node_id, reply.content[METRICS]
            number = int(metrics[NUMBER])
            if number in self._numbers.values():
                raise FederateError(
                    "federate.two_nodes",
                    "two nodes have the client number {client}. Give each node a different partition-id.",
                    client=number,
                )
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


class Sum:
    """One round of Flower's SecAgg+, in Flower's older strategy interface.

    Args:
        nodes: nodes of the chosen clients.

    Attributes:
        nodes: nodes of the clients in the sum, once the sum is computed.
        mean: weighted mean of the clients' vectors; None if there is no sum.
        weight: sum of the clients' weights.
    """

    def __init__(self, nodes: Sequence[int], task: Task) -> None:
        self.nodes, self._task = list(nodes), task
        self.mean: list[Any] | None = None
        self.weight = 0

    def make(self, workflow: SecAggPlusWorkflow, grid: Grid, context: Context) -> None:
        """Let the clients train, and sum their masked updates."""
        state = RecordDict({MAIN_CONFIGS_RECORD: ConfigRecord({Key.CURRENT_ROUND: self._task.round})})
        state[MAIN_PARAMS_RECORD] = ArrayRecord()
        whole = Context(context.run_id, context.node_id, context.node_config, state, context.run_config)
        chosen, self.nodes = self.nodes, []
        self._proxies = [SimpleNamespace(node_id=node) for node in chosen]
        ends: Any = self
        workflow(grid, LegacyContext(whole, strategy=ends, client_manager=ends))

    def num_available(self) -> int:
        """Return the number of nodes; Flower logs this number."""
        return len(self._proxies)

    def configure_fit(self, *_: object) -> list[tuple[Any, FitIns]]:
        """Return the task for each node."""
        task = self._task
        arrays = [task.weights.numpy(), *(task.sent[name].numpy() for name in sorted(task.sent))]
        ins = FitIns(ndarrays_to_parameters(arrays), {ROUND: task.round, LR: task.lr})
        return [(proxy, ins) for proxy in self._proxies]

    def aggregate_fit(self, _: int, results: Sequence[tuple[Any, Any]], __: object) -> tuple[None, dict[str, Any]]:
        """Keep the mean, which every result contains."""
        if results:
            self.nodes = [proxy.node_id for proxy, _ in results]
            self.mean = parameters_to_ndarrays(results[0][1].parameters)
            self.weight = sum(result.num_examples for _, result in results)
        return None, {}


class _Private(DifferentialPrivacyServerSideFixedClipping):
    """Wrapper of Flower's differential privacy that tolerates invalid updates."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Clip, sum and add noise."""
        assert isinstance(self.strategy, JobStrategy), "made for a job"
        arrays, metrics = super().aggregate_train(server_round, self.strategy.usable(replies))
        return arrays, metrics


def _is_missing(reply: Message) -> bool:
    """Return True if a reply is Flower's report that a node did not answer."""
    return reply.has_error() and reply.error.code in _MISSING


def private(strategy: JobStrategy) -> Strategy:
    """Wrap a strategy in Flower's differential privacy.

    If individual updates are hidden, the clients clip their own updates.
    """
    privacy, chosen = strategy.spec.privacy, strategy.server.per_round
    assert privacy is not None, "the job is private"
    kind = _Private if strategy.spec.secure is None else DifferentialPrivacyClientSideFixedClipping
    return kind(strategy, privacy.noise, privacy.clip, chosen)


def returned_by(rule: FederatedRule, layout: Layout) -> dict[str, int]:
    """Return the length of each additional tensor that a rule's clients return."""
    zeros = torch.zeros(layout.parameters, dtype=layout.dtype)
    state = {name: zeros.clone() for name in rule.client_keeps}
    sent = {name: zeros.clone() for name in rule.sends()} | {name: zeros.clone() for name in rule.client_keeps}
    returned = rule.finish(zeros, torch.ones((), dtype=layout.dtype), Local(zeros, sent, 1.0, state))
    return {name: tensor.numel() for name, tensor in returned.items()}
