"""Rounds with real clients, without sockets: tasks, answers and receipts.

A client asks for work, does it, delivers the answer, and asks again; all calls come from the client, so it may be
behind a router. Every answer counts once: a repeated one gets the receipt that the first one got.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from paceline.errors import FederateError, SecureSumError
from paceline_federated.real.members import Members
from paceline_federated.rule import Task, Update
from paceline_federated.secure.group import Plain
from paceline_federated.secure.round import Gathered, SecureRound

_PAUSES_S = (0.02, 5.0)  # between two questions of a client that has nothing to do, the shortest and the longest
_ASKED_PER_S = 200.0  # such questions of all clients together


class Gathers(Protocol):
    """Takes plain updates of a round (`paceline_federated.aggregate.Aggregator`)."""

    def add(self, update: Update, staleness: int = 0) -> str | None:
        """Take an update in; returns the reason where it is refused."""
        ...


@dataclass
class Outcome:
    """The end of a round.

    Attributes:
        secure: sums of a secure round; None where updates were plain.
        counted: clients whose updates are in.
        missing: clients that were asked and did not answer in time.
        refused: reasons by client.
    """

    round: int
    secure: Gathered | None = None
    counted: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    late: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Asked:
    """A task that a client has."""

    task: Task
    weights: Tensor  # as they travel


class Rounds:
    """Gives clients their work, round after round.

    Not thread-safe: `serve` calls it under one lock.

    Args:
        members: all clients.
        numel, returned: lengths of an update's difference, and of the tensors that a rule's clients return, by name.
        decode: of coded differences.
        deadline_s: of the clients' training.
        asynchronous: every client has a task at all times, and a round ends after `enough` updates, of whatever age.
    """

    def __init__(
        self,
        members: Members,
        *,
        numel: int,
        returned: dict[str, int],
        deadline_s: float,
        asynchronous: bool = False,
        decode: Callable[[Any], Tensor] | None = None,
    ) -> None:
        self.members, self._numel, self._returned = members, numel, returned
        self._deadline_s, self._asynchronous, self._decode = deadline_s, asynchronous, decode
        self._asked: dict[int, Asked] = {}
        self._receipts: dict[tuple[int, str], tuple[int, Plain]] = {}
        self._newest: Asked | None = None
        self._until = 0.0
        self._enough = 0
        self._gathers: Gathers | None = None
        self._secure: SecureRound | None = None
        self._outcome: Outcome | None = None

    @property
    def between(self) -> bool:
        """True between two asynchronous rounds, when an answer has to wait."""
        return self._asynchronous and self._outcome is None and self._newest is not None

    def training(self, now: float) -> set[int]:
        """Clients that have a task in asynchronous training, and were heard within their deadline."""
        heard = self.members.heard_since(now - self._deadline_s) if self._asynchronous else []
        return self._asked.keys() & set(heard)

    def begin(
        self,
        task: Task,
        chosen: Collection[int],
        now: float,
        *,
        gathers: Gathers | None = None,
        secure: SecureRound | None = None,
        enough: int | None = None,
        coded: Tensor | None = None,
    ) -> None:
        """Begin a round.

        Args:
            coded: the task's weights as they travel; None: as they are.
            chosen: clients that get the task; those that still have an older one keep it, in asynchronous training.
            gathers, secure: one of both takes the answers.
            enough: updates that end the round; else all of `chosen`.
        """
        assert self._outcome is None, "one round at a time"
        if self._newest is not None and task.round <= self._newest.task.round:
            # a server that was restarted from before makes a round again, and answers to it count again
            self._receipts.clear()
        newest = Asked(task, task.weights if coded is None else coded)
        self._newest, self._until = newest, now + self._deadline_s
        self._gathers, self._secure = gathers, secure
        self._outcome = Outcome(task.round)
        self._enough = len(chosen) if enough is None else enough
        if not self._asynchronous:
            self._asked.clear()
        for number in chosen:
            self._asked.setdefault(number, newest)

    def counted_round(self, number: int) -> int:
        """The newest round in which a client's update counts; 0 before any."""
        return self.members[number].counted_round

    def abandon(self) -> Outcome:
        """End a round before its time; what was gathered is void."""
        assert self._outcome is not None, "a round is under way"
        outcome, self._outcome = self._outcome, None
        self._secure = self._gathers = None
        self._asked.clear()
        return outcome

    def hasten(self) -> None:
        """Let the deadline of training pass, as somebody who knows that no more will come."""
        self._until = 0.0

    def work(self, number: int, now: float) -> Plain:
        """The next thing for a client to do, as plain values and tensors."""
        member = self.members[number]
        member.heard = now
        work = self._work(number) or {"do": "wait", "pause_s": self._pause_s()}
        member.bytes_to += payload_bytes(work)
        return work

    def take(self, number: int, round: int, kind: str, content: Any, now: float) -> Plain:
        """An answer of a client; returns its receipt: `counted`, `late` or `refused`, and why."""
        member = self.members[number]
        member.heard = now
        before = self._receipts.get((number, kind))
        if before is not None and before[0] == round:
            return before[1]
        member.bytes_from += payload_bytes(content)
        receipt = self._receipt(number, round, kind, content)
        if receipt["receipt"] != "late":  # the round may be made again, by a server that was restarted
            self._receipts[number, kind] = round, receipt
        else:
            member.late += 1
            if self._outcome is not None:
                self._outcome.late += 1
        if receipt["receipt"] == "refused":
            member.refused += 1
        return receipt

    def advance(self, now: float) -> Outcome | None:
        """Go on where answers are in or overdue; returns the outcome of an ended round."""
        outcome = self._outcome
        if outcome is None:
            return None
        overdue = now >= self._until
        if self._secure is None:
            if len(outcome.counted) < self._enough and self._asked and not overdue:
                return None
        elif not self._secure_ended(now, overdue):
            return None
        return self._ended(outcome)

    def _work(self, number: int) -> Plain | None:
        asked = self._asked.get(number)
        if self._secure is not None and number in self._secure.ready:
            return self._with_round(self._secure.work(number))
        outcome = self._outcome
        if asked is None and self._asynchronous and outcome is not None and number not in outcome.counted:
            assert self._newest is not None
            asked = self._asked[number] = self._newest
        if asked is None or (self._secure is not None and self._secure.summing):
            return None
        task = asked.task
        return {
            "do": "train",
            "round": task.round,
            "version": task.version,
            "weights": asked.weights,
            "sent": dict(task.sent),
            "lr": task.lr,
            "secure": self._secure is not None,
        }

    def _with_round(self, work: Plain | None) -> Plain | None:
        assert self._newest is not None
        return None if work is None else {**work, "round": self._newest.task.round}

    def _receipt(self, number: int, round: int, kind: str, content: Any) -> Plain:
        asked = self._asked.get(number)
        if self._outcome is None or asked is None or asked.task.round != round:
            if round == self.members[number].counted_round and kind in ("update", "unmasking"):
                return _receipt("counted")  # by this server before it was restarted
            return _receipt("late", f"round {round} is over, or this client has no part in it")
        try:
            if kind == "cannot":
                return self._cannot(number, content)
            if self._secure is not None:
                if kind == "keys" and self._secure.summing:
                    return _receipt("late", "the others are being summed already")
                self._secure.take(number, kind, content)
                return _receipt("counted")
            if kind != "update":
                raise FederateError(f"{kind!r} is no answer that a round takes")
            return self._update(number, asked.task, content)
        except (FederateError, SecureSumError) as error:
            return self._refused(number, str(error))

    def _cannot(self, number: int, content: Any) -> Plain:
        if self._secure is not None:
            self._secure.leave(number)
        return self._refused(number, f"the client says: {str(content)[:500]}")

    def _refused(self, number: int, why: str) -> Plain:
        assert self._outcome is not None
        self._outcome.refused[number] = why
        if self._secure is None or number not in self._secure.ready:
            self._asked.pop(number, None)
        return _receipt("refused", why)

    def _update(self, number: int, task: Task, content: Any) -> Plain:
        assert self._outcome is not None
        assert self._newest is not None
        assert self._gathers is not None
        update = self._read(number, task, content)
        if (problem := self._gathers.add(update, self._newest.task.version - task.version)) is not None:
            return self._refused(number, problem)
        del self._asked[number]
        self._outcome.counted.append(number)
        self._count(number, task.round)
        self._outcome.steps += update.steps
        return _receipt("counted")

    def _count(self, number: int, round: int) -> None:
        member = self.members[number]
        member.counted, member.counted_round = member.counted + 1, round

    def _read(self, number: int, task: Task, content: Any) -> Update:
        """An update of a client's, of which nothing is believed.

        Raises:
            FederateError: it is none.
        """
        if not isinstance(content, dict) or content.keys() != {"delta", "returned", "steps", "loss", "samples"}:
            raise FederateError("this is no update")
        delta, returned = content["delta"], content["returned"]
        if self._decode is not None:
            delta = self._decode(delta)
        if not isinstance(delta, Tensor) or delta.shape != (self._numel,) or delta.dtype != task.weights.dtype:
            raise FederateError(
                f"an update of the model has {self._numel:,} numbers of {task.weights.dtype}; this one has "
                f"{_shape(delta)}: another model?"
            )
        lengths = {name: _shape(each) for name, each in returned.items()} if isinstance(returned, dict) else None
        if lengths != {name: _shape(delta[:length]) for name, length in self._returned.items()}:
            raise FederateError(f"the rule's tensors of an update are {self._returned or 'none'}, not {lengths}")
        steps, loss, samples = content["steps"], content["loss"], content["samples"]
        if (type(steps), type(samples), type(loss)) != (int, int, float):
            raise FederateError("an update has whole steps and samples, and a loss")
        if not 0 < samples <= (joined := self.members[number].samples):
            raise FederateError(f"{samples} samples, where this client joined with {joined}")
        return Update(number, task.round, task.version, delta, returned, samples, steps, loss)

    def _secure_ended(self, now: float, overdue: bool) -> bool:
        assert self._secure is not None
        assert self._outcome is not None
        if not self._secure.summing:
            if self._asked.keys() - self._secure.ready and not overdue:
                return False
            self._secure.begin(now)
        self._secure.advance(now)
        return self._secure.ended

    def _ended(self, outcome: Outcome) -> Outcome:
        if self._secure is not None:
            outcome.secure = self._secure.gathered()
            outcome.counted = outcome.secure.counted
            outcome.refused |= outcome.secure.refused
            for number in outcome.secure.refused:
                self.members[number].refused += 1
            for number in outcome.counted:
                self._count(number, outcome.round)
        outcome.counted.sort()
        if not self._asynchronous:
            outcome.missing = sorted(self._asked.keys() - set(outcome.counted) - outcome.refused.keys())
            self._asked.clear()
        for number in outcome.missing:
            self.members[number].missed += 1
        self._outcome = self._secure = self._gathers = None
        return outcome

    def _pause_s(self) -> float:
        shortest, longest = _PAUSES_S
        return min(longest, max(shortest, len(self.members) / _ASKED_PER_S))


def payload_bytes(value: Any) -> int:
    """Bytes of the tensors and byte strings in nested plain values."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(payload_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(payload_bytes, value))
    return 8


def _receipt(receipt: str, why: str = "") -> Plain:
    return {"receipt": receipt, "why": why}


def _shape(value: Any) -> str:
    return f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
