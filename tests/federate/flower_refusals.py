"""What each end of a deployed job refuses, by the interpreter of an environment with Flower.

    flower_refusals.py FOLDER

Prints JSON: for each case of the server the counts of the round and the reasons, for each case of a client its error.
The grid is played by this script: three of four clients send proper updates, and the last one does not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from paceline.errors import FederateError
from paceline.job.job import Job
from paceline.run.record.run import Run
from paceline_federated.flower.client import ARRAYS, METRICS, RETURNED, SENT, Clients
from paceline_federated.flower.server import serve

CLIENTS, SAMPLES = 4, 10
JOB = {
    "name": "refusals",
    "model": {"zoo": "mlp", "args": {"hidden": 4}},
    "data": "digits",
    "loss": "cross_entropy",
    "optimizer": {"name": "sgd", "lr": 0.1},
    "global_batch": 8,
    "stop": {"steps": 1},
    "federate": {"rule": "scaffold", "clients": CLIENTS, "least": 3},
}
Change = Callable[[dict[str, Any]], object]


def arrays(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    """A change of the weights that the last client sends."""

    def changed(answer: dict[str, Any]) -> None:
        tensors = dict(answer[ARRAYS].to_torch_state_dict())
        change(tensors)
        answer[ARRAYS] = ArrayRecord(tensors)

    return changed


def returned(tensor: torch.Tensor) -> Change:
    """Another control variate from the last client."""
    return lambda answer: answer.update({RETURNED: ArrayRecord({"control": tensor})})


def metrics(**values: Any) -> Change:
    """Other numbers from the last client."""
    return lambda answer: answer.update({METRICS: MetricRecord({**dict(answer[METRICS]), **values})})


def numel(answer: dict[str, Any]) -> int:
    return sum(tensor.numel() for tensor in answer[ARRAYS].to_torch_state_dict().values())


OF_UPDATES: dict[str, Change] = {
    "proper": lambda answer: None,
    "weights that are not finite": arrays(lambda tensors: next(iter(tensors.values())).fill_(torch.nan)),
    "weights of another shape": arrays(lambda tensors: tensors.update({next(iter(tensors)): torch.zeros(3)})),
    "weights without a name": arrays(lambda tensors: tensors.pop(next(iter(tensors)))),
    "weights of another model": lambda answer: answer.update(
        {ARRAYS: ArrayRecord({"a": Array(torch.zeros(2).numpy())})}
    ),
    "nothing": lambda answer: answer.clear(),
    "more samples than it has": metrics(**{"num-examples": SAMPLES + 1}),
    "no samples": metrics(**{"num-examples": 0}),
    "no steps": metrics(steps=0),
    "no tensors of the rule": lambda answer: answer.pop(RETURNED),
    "tensors of the rule of another shape": returned(torch.zeros(2)),
    "tensors of the rule that are not finite": lambda answer: returned(torch.full((numel(answer),), torch.inf))(answer),
    "an error": lambda answer: answer.update({"error": "no disk"}),
}


class Played(Grid):
    """The nodes of a deployment, the last of which sends what a case says."""

    def __init__(self, change: Change, numbers: Iterable[int]) -> None:
        self.change, self.numbers = change, dict(enumerate(numbers, start=1))

    def get_node_ids(self) -> list[int]:
        return list(self.numbers)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return [self.answered(message) for message in messages]

    def answered(self, message: Message) -> Message:
        """The answer of a node to a query or a task."""
        number = self.numbers[message.metadata.dst_node_id]
        if message.metadata.message_type == "query":
            known = {"number": number, "num-examples": SAMPLES}
            return Message(RecordDict({METRICS: MetricRecord(known)}), reply_to=message)
        answer: dict[str, Any] = {
            ARRAYS: message.content[ARRAYS],
            RETURNED: message.content[SENT],
            METRICS: MetricRecord({"num-examples": SAMPLES, "loss": 1.0, "steps": 1}),
        }
        if message.metadata.dst_node_id == CLIENTS:
            self.change(answer)
        if "error" in answer:
            return Message(Error(0, answer["error"]), reply_to=message)
        return Message(RecordDict(answer), reply_to=message)

    def set_run(self, run_id: int) -> None: ...

    @property
    def run(self) -> Any: ...
    def create_message(self, *_: Any, **__: Any) -> Any: ...
    def push_messages(self, messages: Any) -> Any: ...
    def pull_messages(self, message_ids: Any) -> Any: ...


def context(**config: Any) -> Context:
    return Context(1, 1, config, RecordDict(), {})


def of_updates(folder: Path, change: Change, numbers: Iterable[int] = range(CLIENTS)) -> Any:
    """Counts and reasons of a round, or why it cannot begin."""
    whole = context()
    whole.run_config["run"] = str(folder)
    try:
        serve(Job.model_validate(JOB), Played(change, numbers), whole)
    except FederateError as error:
        return {"error": str(error)}
    run = Run(folder)
    (line,) = run.steps()
    reasons = [event["reasons"] for event in run.events() if event["event"] == "refused"]
    return {"clients": line["clients"], "refused": line["refused"], "reasons": reasons}


def of_tasks() -> dict[str, str]:
    """What a client says to tasks and configurations that it cannot work with."""
    clients = Clients(Job.model_validate(JOB))
    layout = clients.training.layout
    good = {name: torch.zeros(shape) for name, shape in zip(layout.names, layout.shapes, strict=True)}
    first = layout.names[0]
    control = {SENT: ArrayRecord({"control": torch.zeros(layout.parameters)})}
    mine = {"partition-id": 0}
    tasks: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]] = {
        "proper": (good, control, mine),
        "weights that are not finite": (good | {first: torch.full_like(good[first], torch.nan)}, control, mine),
        "weights of another shape": (good | {first: torch.zeros(1)}, control, mine),
        "weights without a name": ({n: t for n, t in good.items() if n != first}, control, mine),
        "a server without the rule": (good, {}, mine),
        "a node without a number": (good, control, {}),
        "a client that the job does not have": (good, control, {"partition-id": CLIENTS}),
        "another number of nodes": (good, control, {"partition-id": 0, "num-partitions": 9}),
    }
    found = {}
    for case, (weights, more, config) in tasks.items():
        content = RecordDict({ARRAYS: ArrayRecord(weights), "config": ConfigRecord({}), **more})
        try:
            clients.trained(content, context(**config))
            found[case] = ""
        except FederateError as error:
            found[case] = str(error)
    return found


def main(folder: Path) -> None:
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # as in an app under way
    found = {case: of_updates(folder / str(n), change) for n, (case, change) in enumerate(OF_UPDATES.items())}
    found["two nodes are one client"] = of_updates(folder / "twice", OF_UPDATES["proper"], [0, 1, 2, 2])
    np.savez(folder / "own.npz", x=np.zeros((6, 784), np.float32), y=np.zeros(6, np.int64))
    own = Clients(Job.model_validate(JOB)).described(context(**{"partition-id": 1, "data": str(folder / "own.npz")}))
    print(json.dumps({"server": found, "client": of_tasks(), "own data": dict(own[METRICS])}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
