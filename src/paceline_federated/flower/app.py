"""The two ends of a Flower app. Torch is imported only when a client trains or the server begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from paceline.job.job import Job
from paceline_federated.section import federate_spec


def client_app(job: str | Path) -> Any:
    """A Flower ClientApp that trains and measures clients of a job.

    A node is the client with the number `partition-id` of its configuration. It trains on its part of the job's data,
    or on the file or folder `data` of its configuration. Weights come and go as "arrays", by the names of the model's
    shared tensors, so every strategy of Flower can be the server. With `federate.secure` in the job, updates leave a
    client under the masks of SecAgg+ only.

    Args:
        job: file of the job.
    """
    secure = federate_spec(Job.load(job)).secure is not None
    app: Any = ClientApp(mods=[secaggplus_mod] if secure else [])

    def clients() -> Any:
        from paceline_federated.flower.client import clients_of

        return clients_of(str(job))

    def train(message: Message, context: Context) -> Message:
        return Message(clients().trained(message.content, context), reply_to=message)

    def evaluate(message: Message, context: Context) -> Message:
        return Message(clients().measured(message.content, context), reply_to=message)

    def query(message: Message, context: Context) -> Message:
        return Message(clients().described(context), reply_to=message)

    app.train()(train)
    app.evaluate()(evaluate)
    app.query()(query)
    return app


def server_app(job: str | Path) -> Any:
    """A Flower ServerApp that trains a job by its own rule.

    The record goes to the directory `run` of the app's configuration, or to a new one under `runs`. The model is
    there, too, as `final_model.safetensors`.

    Args:
        job: file of the job.
    """
    app: Any = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        from paceline_federated.flower.server import serve

        serve(Job.load(job), grid, context)

    app.main()(main)
    return app
