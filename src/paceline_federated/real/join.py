"""A client's process, which trains on its own data and gives away updates alone."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from paceline.errors import ChannelError, DataError, FederateError, SecureSumError
from paceline.job.job import Job
from paceline.job.zoo.data.samples import Selection
from paceline.printable import printable
from paceline.wire.key import RunKey
from paceline_federated.client import ClientState, LocalTraining, federated, first_model
from paceline_federated.codec import UpdateCodec
from paceline_federated.layout import Layout
from paceline_federated.measure import Measure
from paceline_federated.real.kept import ClientFolder, KeptState
from paceline_federated.real.terms import check_job, digest_of, packing_of
from paceline_federated.rule import FederatedRule, Task, Update
from paceline_federated.secure.client import SecureClient
from paceline_federated.secure.group import Plain, as_tensor
from paceline_federated.secure.messages import PublicKeys, Terms
from paceline_federated.server import codecs_of
from paceline_federated.simulation.deal import kept_apart

_PAUSES_S = (0.2, 5.0)  # between attempts to reach a server that went away
Say = Callable[[str], object]


def to_stderr(text: str) -> None:
    """Tell the person at the keyboard."""
    print(f"paceline: {printable(text)}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Joining:
    """Terms on which a client joins.

    Args:
        where: the server's address and port.
        name: of this client, as the server shows it.
        number: the place it wants; None takes any.
        patience_s: for which it tries to reach a server that went away.
    """

    where: tuple[str, int]
    key: RunKey
    name: str
    number: int | None = None
    patience_s: float = 300.0


def join(joining: Joining, folder: ClientFolder, data: Path | None, own_job: Job | None, say: Say = to_stderr) -> str:
    """Take part in a federation until it ends; returns the reason of its end.

    Args:
        data: file or folder of this client's samples, in the place of the job's `data.path`.
        own_job: this client's copy of the job; without one only jobs are taken that run paceline's own code alone.

    Raises:
        FederateError: the server does not take this client, or its job is none that this client takes.
        DataError: the data cannot be read, or is no data.
        ChannelError: the server is gone for longer than the client's patience.
    """
    with connected(joining, folder.identity) as server:
        job = checked(server, own_job)
        participant = Participant.of_samples(job, own_samples(job, data), folder, say)
        return take_part(server, joining, participant, say)


def checked(server: Server, own_job: Job | None) -> Job:
    """The server's job, if this client takes it."""
    return check_job(server.call("job"), own_job)


def own_samples(job: Job, data: Path | None) -> Dataset[Any]:
    """The samples of this client, all of them for training.

    Raises:
        DataError: there are none, or they cannot be read.
    """
    spec = job.data
    if data is not None:
        kind = type(spec) if "path" in type(spec).model_fields else None
        if kind is None:
            from paceline.job.data import Arrays

            spec = Arrays(kind="arrays", path=data.resolve())
        else:
            values = spec.model_dump(exclude={"held_out_path"}) | {"path": data.resolve()}
            spec = kind.model_validate(values)
    built = spec.model_copy(update={"held_out": 0.0}).build(input_shape=job.model.input_shape(), seed=job.seed)
    if not len(built.train):  # type: ignore[arg-type]
        raise DataError(f"{data}: there are no samples in it")
    return built.train


class Participant:
    """A client's part in every round, without a connection.

    Args:
        layout, rule: of the job.
        samples: what it trains on, counted now.
        train: the work on a task; it updates the state.
    """

    def __init__(
        self,
        job: Job,
        layout: Layout,
        rule: FederatedRule,
        folder: ClientFolder,
        samples: Callable[[], int],
        train: Callable[[Task, int, ClientState], Update],
        say: Say = to_stderr,
    ) -> None:
        self.job, self.layout, self._folder, self._say = job, layout, folder, say
        self._samples, self._do_train = samples, train
        self.number = -1
        self.kept: KeptState = folder.load()
        self._up, self._down = codecs_of(job, layout)
        self._packing = packing_of(job, layout, rule)
        self._update: Update | None = None
        self._secure: SecureClient | None = None

    @classmethod
    def of_samples(cls, job: Job, samples: Dataset[Any], folder: ClientFolder, say: Say = to_stderr) -> Participant:
        """A client that trains on samples of its own."""
        training = LocalTraining(job, first_model(job))
        # imports what training needs, which takes seconds, before any deadline runs
        job.optimizer.build(training.model.parameters())

        share, count = federated(job).held_out, len(samples)  # type: ignore[arg-type]
        measure = Measure(training)

        def train(task: Task, number: int, state: ClientState) -> Update:
            own, rest = kept_apart(count, share, job.seed, number)
            if len(own):
                metrics = measure.validation(task.weights, Selection(samples, own), state)
                told = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
                say(f"round {task.round}: {told} on {len(own)} samples of its own, with the weights of the server")
            return training.train(task, number, Selection(samples, rest), state)

        training_count = len(kept_apart(count, share, job.seed, 0)[1])  # the same for every number
        return cls(job, training.layout, training.rule, folder, lambda: training_count, train, say)

    def about(self) -> Plain:
        """Description of this client for the server: its number of samples, and its job."""
        return {"samples": self._samples(), "job": digest_of(self.job), "numel": self.layout.numel}

    def begin(self, number: int, counted_round: int) -> None:
        """Take note of this client's number, and of the newest round in which it counted."""
        self.number = number
        if self.kept.counted is None:
            self.kept.counted = counted_round >= self.kept.round

    def answer(self, work: Plain) -> tuple[int, str, Any]:
        """Do what is asked; returns round, kind and content of the answer."""
        round, kind = int(work["round"]), str(work["do"])
        try:
            if kind == "train":
                return self._train(round, work)
            return round, kind, self._for_sum(kind, work)
        except (SecureSumError, DataError) as error:
            self._secure = None
            self._say(f"round {round}: {error}")
            return round, "cannot", str(error)

    def told(self, round: int, kind: str, receipt: Plain) -> None:
        """Take note of what the server did with an answer."""
        if receipt["receipt"] != "counted":
            self._say(f"round {round}: the {kind} of this client was {receipt['receipt']}: {receipt['why']}")
        last = "unmasking" if self._packing is not None else "update"
        if self.kept.round == round and (kind == last or receipt["receipt"] != "counted"):
            self.kept.counted = receipt["receipt"] == "counted"
            self._folder.save(self.kept)

    def _train(self, round: int, work: Plain) -> tuple[int, str, Any]:
        task = _task(work, self._down, self.layout)
        state = self.kept.for_round(round)
        began = self.kept.for_round(round)
        update = self._do_train(task, self.number, state)
        if not update.steps:
            raise DataError("this client has no batch to train on")
        self.kept = self.kept.trained(round, began, state)
        if state.rule or state.personal:
            self._folder.save(self.kept)
        if self._packing is not None:
            self._update, self._secure = update, SecureClient(self.number + 1)
            keys, digest = self._secure.keys()
            return round, "keys", [*keys, digest]
        delta: Tensor = update.delta
        if not self._up.exact:
            delta = self._up.encode(delta, round, self.number)
        content = {
            "delta": delta,
            "returned": dict(update.returned),
            "steps": update.steps,
            "loss": update.loss if math.isfinite(update.loss) else math.nan,
            "samples": update.samples,
        }
        return round, "update", content

    def _for_sum(self, kind: str, work: Plain) -> Any:
        """One answer of a secure sum."""
        if self._secure is None or self._update is None or self._packing is None:
            raise SecureSumError(
                "this client was started anew since it trained, and has no keys of this round any more"
            )
        match kind:
            case "shares":
                about = work["terms"]
                terms = Terms(about["name"], about["threshold"], about["numbers"], about["most"])
                if terms.numbers != self._packing.numbers or terms.most != self._packing.clients:
                    raise SecureSumError("the server's terms of the sum are not those of the job; nothing was sent")
                keys = {int(number): PublicKeys(*each) for number, each in work["keys"].items()}
                return self._secure.shares(terms, keys)
            case "vector":
                return as_tensor(self._secure.masked(work["shares"], self._packing.pack(self._update)))
            case "unmasking":
                return [dict(part) for part in self._secure.unmask(work["survivors"])]
        raise SecureSumError(f"the server asks for {kind!r}, which this client does not know")


class Server:
    """The server as a client sees it: calls are tried again while it is away.

    Raises:
        ChannelError: nobody answers there at first, or it has another key.
    """

    def __init__(self, joining: Joining, identity: str) -> None:
        from paceline_server.client import Client

        self._patience_s = joining.patience_s
        self._client = Client(joining.where, joining.key, name=joining.name, identity=identity)

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function of the server.

        Raises:
            ChannelError: it cannot be reached for longer than the patience.
        """
        until = time.monotonic() + self._patience_s
        pause_s, longest_s = _PAUSES_S
        while True:
            try:
                return self._client.call(function, *arguments)
            except ChannelError:
                if time.monotonic() + pause_s > until:
                    raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def close(self) -> None:
        """Leave."""
        self._client.close()


@contextmanager
def connected(joining: Joining, identity: str) -> Iterator[Server]:
    """A server to call."""
    server = Server(joining, identity)
    try:
        yield server
    finally:
        server.close()


def take_part(server: Server, joining: Joining, participant: Participant, say: Say) -> str:
    """Do what a server asks until it ends; returns the reason of its end."""
    work: Plain = {"do": "join"}
    while True:
        match work["do"]:
            case "join":
                wanted = joining.number if participant.number < 0 else participant.number
                welcome = server.call("join", joining.name, wanted, participant.about())
                if "refused" in welcome:
                    raise FederateError(f"the server does not take this client: {welcome['refused']}")
                participant.begin(int(welcome["number"]), int(welcome["counted"]))
                say(f"{joining.name} is client {participant.number} of {welcome['clients']}")
            case "wait":
                time.sleep(min(30.0, max(0.0, float(work["pause_s"]))))
            case "end":
                return str(work["reason"])
            case _:
                round, kind, content = participant.answer(work)
                participant.told(round, kind, server.call("deliver", round, kind, content))
        work = server.call("work")


def _task(work: Plain, down: UpdateCodec, layout: Layout) -> Task:
    """The task that a server sends; it may be any server that has the key."""
    weights, sent = work["weights"], work["sent"]
    if not down.exact and isinstance(weights, Tensor) and weights.shape == (down.nbytes,):
        weights = down.decode(weights)
    fits = isinstance(weights, Tensor) and weights.shape == (layout.numel,) and weights.dtype == layout.dtype
    for tensor in sent.values():
        fits = fits and isinstance(tensor, Tensor) and tensor.shape == (layout.parameters,)
    if not fits or not bool(weights.isfinite().all()):
        raise FederateError("the server sends the weights of another model, or NaN; this client takes no part")
    return Task(int(work["round"]), int(work["version"]), weights, dict(sent), float(work["lr"]))
