"""An edge: the server of some clients, and one client of the server above it.

It takes a task down, gathers its own clients' updates, and gives their mean up with their samples as its weight. So
the mean at the top is that of all clients.
"""

from __future__ import annotations

import math

from paceline.errors import DataError, FederateError
from paceline.job.job import Job
from paceline.wire.ends import name_of
from paceline.wire.listener import Where
from paceline_federated.aggregate import Aggregator
from paceline_federated.client import ClientState, LocalTraining, federated, first_model
from paceline_federated.real.gather import Gathering
from paceline_federated.real.join import Joining, Participant, Say, checked, connected, take_part, to_stderr
from paceline_federated.real.kept import ClientFolder
from paceline_federated.real.terms import returned_by
from paceline_federated.rule import Task, Update

_OF_THE_DEADLINE = 0.8  # that an edge gives its clients, so that its own answer is in time


def edge(
    joining: Joining, folder: ClientFolder, where: Where, clients: int, own_job: Job | None, say: Say = to_stderr
) -> str:
    """Gather clients' updates for a server above until it ends; returns the reason.

    Args:
        joining: how it joins the server above.
        where: address and port that its own clients connect to.
        clients: of its own, for all of which it waits before it joins.

    Raises:
        FederateError: the server does not take it, or the job does not go through an edge.
        DeadlineError: its clients did not come in time.
    """
    with connected(joining, folder.identity) as server:
        job = checked(server, own_job)
        own = Edge(job, clients, joining.name, first=(joining.number or 0) * clients)
        with own.gathering.front.serve(where, joining.key) as service:
            say(f"{joining.name} listens at {name_of(service.address)} for {clients} clients")
            own.gathering.front.wait_for(clients, federated(job).deadline_s)
            part = Participant(job, own.layout, own.rule, folder, lambda: own.samples, own.train, say)
            reason = "the server above is gone"
            try:
                reason = take_part(server, joining, part, say)
            finally:
                own.gathering.front.say_farewell(reason)
    return reason


class Edge:
    """The clients of an edge, as one.

    Args:
        first: number of its first client; where edges have numbers and as many clients each, all clients' differ.

    Raises:
        FederateError: the job's rule or weights do not go through an edge unchanged.
    """

    def __init__(self, job: Job, clients: int, name: str, first: int = 0) -> None:
        self._spec, self.name = federated(job), name
        training = LocalTraining(job, first_model(job))
        self.layout, self.rule = training.layout, training.rule
        if problem := _problem(job, bool(returned_by(self.rule, self.layout)), self.rule.buffer is not None):
            raise FederateError(f"{problem} does not go through an edge; have the clients join the server itself")
        deadline_s = _OF_THE_DEADLINE * self._spec.deadline_s
        self.gathering = Gathering(
            job, self.layout, self.rule, name=name, places=clients, deadline_s=deadline_s, first=first
        )

    @property
    def samples(self) -> int:
        """Samples of its clients together."""
        return sum(member.samples for member in self.gathering.front.members.all())

    def train(self, task: Task, number: int, state: ClientState) -> Update:
        """Have this edge's clients train on a task, and agree on their updates.

        Raises:
            DataError: no client gave an update.
        """
        front = self.gathering.front
        aggregator = Aggregator(self._spec, self.layout, self.rule)
        chosen = self.gathering.trusted(front.there())
        outcome, agreed = self.gathering.round(task, chosen, aggregator, weights=task.weights)
        if agreed is None:
            why = "; ".join(f"{front.members[n].name}: {text}" for n, text in sorted(outcome.refused.items()))
            raise DataError(f"no client of {self.name} gave an update. {why or 'None answered in time'}")
        packing = self.gathering.packing
        if packing is not None and packing.weight(agreed.samples) == 1.0:
            most = packing.most_samples or 0
            raise DataError(f"{agreed.samples} samples at {self.name}; set federate.secure.most_samples above {most}")
        steps = max(1, outcome.steps // agreed.clients)
        loss = agreed.loss if math.isfinite(agreed.loss) else math.nan
        return Update(number, task.round, task.version, agreed.delta, {}, agreed.samples, steps, loss)


def _problem(job: Job, returns: bool, asynchronous: bool) -> str | None:
    """Part of a job that an edge would change; None if there is none."""
    spec = federated(job)
    if returns or asynchronous:
        return f"federate.rule {spec.rule}"
    if spec.privacy is not None:
        return "federate.privacy, which bounds what one client does to the sum at the server,"
    if spec.weigh != "samples":
        return f"federate.weigh {spec.weigh}, by which an edge would count as one client,"
    return None
