"""Simulated clients: samples, behaviour, and state between rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from paceline.errors import DataError, RunError
from paceline.files import private_opener
from paceline.job.samples import Collated, Selection
from paceline_federated.client import ClientState, Ints, LocalTraining, one_key, uniform
from paceline_federated.section import ClientsSpec, SimulateSpec

_DEAL, _HELD_OUT = 21, 22


class Deal:
    """Samples of every simulated client, as indices into the training set.

    The indices of all clients are in one array, so memory grows with the number of samples but not with the number of
    clients.

    Attributes:
        indices: indices of the samples, client by client.
        ends: offsets of the clients' parts, beginning with 0; one more than the number of clients.
    """

    def __init__(self, parts: Iterator[Ints] | list[Ints]) -> None:
        held = list(parts)
        self.ends = np.concatenate([[0], np.cumsum([len(part) for part in held])]).astype(np.int64)
        self.indices = np.concatenate(held).astype(np.int64)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, client: int) -> Ints:
        return self.indices[self.ends[client] : self.ends[client + 1]]

    @cached_property
    def samples(self) -> Ints:
        """Number of samples of each client."""
        return np.diff(self.ends)

    def split(self, share: float, seed: int) -> tuple[Deal, Deal]:
        """Split the samples into a deal for training and a deal of held-out samples.

        A client keeps at least one training sample, so a client with a single sample has none for evaluation.
        """
        train, held_out = [], []
        for client in range(len(self)):
            mine = self[client]
            own, rest = kept_apart(len(mine), share, seed, client)
            held_out.append(mine[own])
            train.append(mine[rest])
        return Deal(train), Deal(held_out)


def kept_apart(samples: int, share: float, seed: int, client: int) -> tuple[Ints, Ints]:
    """Return the indices of a client's held-out samples, and of its training samples."""
    kept = min(round(share * samples) or int(share > 0), max(samples - 1, 0))
    order = np.random.default_rng(one_key(seed, _HELD_OUT, client)).permutation(samples)
    return np.sort(order[:kept]), np.sort(order[kept:])


def deal(dataset: Dataset[Any], spec: ClientsSpec, clients: int, seed: int) -> Deal:
    """Divide a training set over clients.

    Raises:
        DataError: the training set has too few samples, or lacks the labels or users that the division needs.
    """
    samples = len(dataset)  # type: ignore[arg-type]
    if clients > samples:
        raise DataError(
            "federate.too_many_clients",
            "{clients} clients for {samples} training samples: some clients would have no samples. Set at most "
            "{samples} clients, or provide more data.",
            clients=clients,
            samples=samples,
        )
    random = np.random.default_rng(one_key(seed, _DEAL))
    match spec.kind:
        case "iid":
            return Deal([np.sort(part) for part in np.array_split(random.permutation(samples), clients)])
        case "dirichlet":
            return Deal(_dirichlet(_labels(dataset, "dirichlet"), spec.alpha, clients, random))
        case "shards":
            return Deal(_shards(_labels(dataset, "shards"), spec.shards, clients, random))
        case "user":
            return Deal(_users(dataset))


def _dirichlet(labels: Ints, alpha: float, clients: int, random: np.random.Generator) -> list[Ints]:
    owner = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        places = random.permutation(np.flatnonzero(labels == label))
        # With a small alpha, the gamma draws of all clients may be 0.
        shares = random.gamma(alpha, size=clients) + 1e-300
        cuts = np.round(np.cumsum(shares / shares.sum()) * len(places)).astype(np.int64)
        owner[places] = np.searchsorted(cuts, np.arange(len(places)), side="right").clip(max=clients - 1)
    return _by_owner(owner, clients)


def _shards(labels: Ints, shards: int, clients: int, random: np.random.Generator) -> list[Ints]:
    if clients * shards > len(labels):
        raise DataError(
            "federate.too_many_shards",
            "{clients} clients with {shards} shards each need at least {needed} samples, but the training set has "
            "{samples}",
            clients=clients,
            shards=shards,
            needed=clients * shards,
            samples=len(labels),
        )
    parts = np.array_split(np.argsort(labels, kind="stable"), clients * shards)
    drawn = random.permutation(len(parts)).reshape(clients, shards)
    return [np.sort(np.concatenate([parts[number] for number in mine])) for mine in drawn]


def _users(dataset: Dataset[Any]) -> list[Ints]:
    users = users_of(dataset)
    if users is None:
        raise DataError(
            "federate.no_users",
            "federate.partition user: the data set does not assign samples to users. Add an attribute `users` with "
            "one value per sample, or use iid, dirichlet or shards.",
        )
    names, owner = np.unique(users, return_inverse=True)
    return _by_owner(owner.astype(np.int64), len(names))


def users_of(dataset: Any) -> NDArray[Any] | None:
    """Return the user of each sample (the data set's attribute `users`), or None."""
    if isinstance(dataset, Collated):
        return users_of(dataset.dataset)
    if isinstance(dataset, Selection):
        users = users_of(dataset.dataset)
        return None if users is None else users[dataset.rows]
    users = getattr(dataset, "users", None)
    if users is None:
        return None
    users = np.asarray(users)
    if len(users) != len(dataset):
        raise DataError(
            "federate.users_differ",
            "the data set has {samples} samples, but `users` has {users} values. Give one user per sample.",
            samples=len(dataset),
            users=len(users),
        )
    return users


def _labels(dataset: Dataset[Any], kind: str) -> Ints:
    labels = getattr(dataset, "labels", None)
    if labels is None:
        raise DataError(
            "federate.no_labels",
            "federate.partition {kind} divides by class, but the data set has no classes. Add an attribute "
            "`labels` with one whole number per sample, or use iid or user.",
            kind=kind,
        )
    return np.asarray(labels)


def _by_owner(owner: Ints, clients: int) -> list[Ints]:
    order = np.argsort(owner, kind="stable")
    ends = np.searchsorted(owner[order], np.arange(clients + 1))
    return [np.sort(order[ends[client] : ends[client + 1]]) for client in range(clients)]


_DROP, _SPEED, _ANGLE, _POISON = 31, 32, 33, 34
POISON = -10.0  # factor by which a poisoner multiplies its update


class Answers(NamedTuple):
    """Chosen clients of a round that answer in time, never answer, or answer late."""

    present: list[int]
    dropped: list[int]
    late: list[int]


class Behaviour:
    """Random behaviour of simulated clients, determined by the job's seed.

    Args:
        step_counts: number of local steps of each client per round.
    """

    def __init__(self, spec: SimulateSpec, seed: int, step_counts: NDArray[np.int64]) -> None:
        self.spec, self.seed = spec, seed
        clients = np.arange(len(step_counts))
        radius = np.sqrt(-2.0 * np.log1p(-uniform(seed, _SPEED, clients)))
        normal = radius * np.cos(2.0 * np.pi * uniform(seed, _ANGLE, clients))
        trains = step_counts > 0
        usual = float(np.median(step_counts[trains])) if trains.any() else 1.0
        # time of each client's work relative to a typical client
        self.times = np.exp(spec.spread * normal) * step_counts / usual
        self.poisons = uniform(seed, _POISON, clients) < spec.poisoners

    def drops(self, round: int, client: int) -> bool:
        """True if a client never answers in this round."""
        return bool(self.spec.drop_out) and bool(uniform(self.seed, _DROP, round, client) < self.spec.drop_out)

    def answers(self, round: int, chosen: Sequence[int]) -> Answers:
        """Return the answers of the chosen clients of a round."""
        if not self.spec.drop_out and self.spec.deadline is None:
            return Answers(list(chosen), [], [])
        numbers = np.asarray(chosen, np.int64)
        dropped = uniform(self.seed, _DROP, round, numbers) < self.spec.drop_out
        late = np.zeros(len(numbers), bool)
        if self.spec.deadline is not None:
            late = ~dropped & (self.times[numbers] > self.spec.deadline)
        return Answers(numbers[~dropped & ~late].tolist(), numbers[dropped].tolist(), numbers[late].tolist())


_FILE = "clients.state"
_PREFIX = "clients/"


class Kept:
    """Tensors of all clients, one row per client, mapped into memory from a sparse file.

    If the rule keeps no tensors and there are no personal parameters, no memory is used. The rule's tensors of a client
    that has not trained are zero, and its personal parameters are the job's initial parameters.

    Raises:
        RunError: the file cannot be created.
    """

    def __init__(self, training: LocalTraining, clients: int, folder: Path) -> None:
        self.training, self.path = training, folder / _FILE
        self.rule_names, self.personal_names = training.rule.client_keeps, training.layout.personal
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(self.rule_names, (training.layout.parameters,))
        first = training.first_personal
        shapes |= {name: tuple(first[name].shape) for name in self.personal_names}
        self.touched = np.zeros(clients, bool)
        self._tables: dict[str, Tensor] = {}
        numbers = {name: int(np.prod(shape)) for name, shape in shapes.items()}
        width = sum(numbers.values())
        if not width:
            return
        dtype = training.layout.dtype
        try:
            with open(self.path, "wb", opener=private_opener) as file:
                file.truncate(clients * width * dtype.itemsize)
            whole = torch.from_file(str(self.path), shared=True, size=clients * width, dtype=dtype)
        except (OSError, RuntimeError) as error:
            raise RunError(
                "federate.state_folder",
                "the folder {path} for the state of clients cannot be created: {error}",
                path=self.path,
                error=error,
            ) from error
        for name, part in zip(shapes, whole.view(clients, width).split(list(numbers.values()), dim=1), strict=True):
            self._tables[name] = part

    def rule(self, clients: Ints) -> dict[str, Tensor]:
        """Copy the rule's tensors of k clients, each of shape (k, p)."""
        rows = torch.from_numpy(clients)
        return {name: self._tables[name][rows] for name in self.rule_names}

    def personal(self, clients: Ints) -> list[Tensor]:
        """Copy the personal parameters of k clients, each of shape (k, …), in layout order."""
        rows, known = torch.from_numpy(clients), torch.from_numpy(self.touched[clients])
        found = []
        for name in self.personal_names:
            first = self.training.first_personal[name]
            stack = self._tables[name][rows].view(len(clients), *first.shape)
            found.append(torch.where(known.view(-1, *[1] * first.dim()), stack, first))
        return found

    def keep(self, clients: Ints, rule: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        """Store the clients' tensors at the end of a round.

        `parameters` may also contain shared parameters.
        """
        rows = torch.from_numpy(clients)
        for name in self.rule_names:
            self._tables[name][rows] = rule[name]
        for name in self.personal_names:
            self._tables[name][rows] = parameters[name].reshape(len(clients), -1)
        self.touched[clients] = True

    def state(self, client: int) -> ClientState:
        """Return the state of one client, in the same form as for a real client."""
        one = np.array([client])
        rule = {name: tensor[0] for name, tensor in self.rule(one).items()}
        personal = {n: t[0] for n, t in zip(self.personal_names, self.personal(one), strict=True)}
        return ClientState(rule, personal)

    def put(self, client: int, state: ClientState) -> None:
        """Store the state of one client."""
        rule, personal = ({n: t.unsqueeze(0) for n, t in held.items()} for held in (state.rule, state.personal))
        self.keep(np.array([client]), rule, personal)

    def tensors(self) -> dict[str, Tensor]:
        """Return the rows of all clients that have trained, for a checkpoint."""
        if not self._tables:
            return {}
        rows = torch.from_numpy(np.flatnonzero(self.touched))
        return {f"{_PREFIX}rows": rows} | {f"{_PREFIX}{name}": table[rows] for name, table in self._tables.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the rows from a checkpoint's tensors."""
        if not self._tables:
            return
        rows = tensors[f"{_PREFIX}rows"]
        for name, table in self._tables.items():
            table.zero_()
            table[rows] = tensors[f"{_PREFIX}{name}"]
        self.touched[:] = False
        self.touched[rows.numpy()] = True

    def close(self) -> None:
        """Remove the file, whose contents are in the checkpoints."""
        self._tables.clear()
        self.path.unlink(missing_ok=True)
