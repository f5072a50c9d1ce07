"""Rounds of a server or an edge, in a plain or a secure sum."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor

from paceline.job.job import Job
from paceline_federated.aggregate import Aggregator, Agreed
from paceline_federated.client import federated
from paceline_federated.layout import Layout
from paceline_federated.real.front import Front, decoding
from paceline_federated.real.members import Members
from paceline_federated.real.rounds import Outcome, Rounds
from paceline_federated.real.terms import packing_of, returned_by
from paceline_federated.rule import FederatedRule, Task
from paceline_federated.secure.round import Gathered, SecureRound
from paceline_federated.secure.suspects import Suspects
from paceline_federated.server import codecs_of


class Gathering:
    """Gathers the updates of real clients.

    Args:
        name: of the run and this server, in no other secure sum.
        places: clients at most, numbered from `first` on.
        deadline_s: of a client's training.

    Attributes:
        front: what the clients reach.
        suspects: clients that poisoned secure sums, or may have.
    """

    def __init__(
        self,
        job: Job,
        layout: Layout,
        rule: FederatedRule,
        *,
        name: str,
        places: int,
        deadline_s: float,
        first: int = 0,
    ) -> None:
        self.job, self.name, self._spec = job, name, federated(job)
        self.packing = packing_of(job, layout, rule)
        self.suspects = Suspects()
        self._up, self._down = codecs_of(job, layout)
        rounds = Rounds(
            Members(places, first),
            numel=layout.numel,
            returned=returned_by(rule, layout),
            deadline_s=deadline_s,
            asynchronous=rule.buffer is not None,
            decode=decoding(self._up),
        )
        self.front = Front(job, layout, rounds)

    def trusted(self, there: Collection[int]) -> list[int]:
        """Clients of these that have not poisoned a sum."""
        return [number for number in there if str(number) not in self.suspects.found]

    def round(
        self,
        task: Task,
        chosen: Collection[int],
        aggregator: Aggregator,
        *,
        weights: Tensor,
        enough: int | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> tuple[Outcome, Agreed | None]:
        """Make one round; the agreement is None where no update was accepted.

        Args:
            weights: of the task, before they are coded.
            stopped: if true, the round is not waited for any more.
        """
        coded = None if self._down.exact else self._down.encode(weights, task.round)
        secure = self.secure_round(task)
        if secure is None:
            outcome = self.front.round(task, chosen, gathers=aggregator, enough=enough, coded=coded, stopped=stopped)
        else:
            outcome = self.front.round(task, chosen, secure=secure, coded=coded, stopped=stopped)
        if outcome.secure is not None:
            self.add_sums(outcome.secure, aggregator)
        return outcome, aggregator.agree()

    def secure_round(self, task: Task) -> SecureRound | None:
        """The secure round of a task; None where the job's rounds are plain."""
        secure = self._spec.secure
        if secure is None or self.packing is None:
            return None
        name = f"{self.name}/{task.round}"
        return SecureRound(name, self.packing, secure.group, secure.phase_s, self.suspects, self.job.seed)

    def add_sums(self, gathered: Gathered, aggregator: Aggregator) -> None:
        """Give the sums of a secure round to what agrees on them."""
        assert self.packing is not None, "sums were packed"
        for total, clients in gathered.sums:
            samples = self.packing.samples(total, clients)
            aggregator.add_sum(total.weighted, total.weight, total.returned, clients, samples, total.loss / clients)
