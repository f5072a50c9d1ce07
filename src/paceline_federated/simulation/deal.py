"""Division of one training set over simulated clients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from paceline.errors import DataError
from paceline.job.zoo.data.samples import Collated, Selection
from paceline_federated.order import one_key
from paceline_federated.section import ClientsSpec

Ints = NDArray[np.int64]
_DEAL, _HELD_OUT = 21, 22


class Deal:
    """Samples of every simulated client, as indices into the training set.

    All clients' indices are one array, so ten thousand clients take no more memory than the set has samples.

    Attributes:
        indices: of the samples, client by client.
        ends: end of each client's part, from 0 on, one more than there are clients.
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
        """Deals of samples to train on, and of a share to measure clients on.

        A client keeps at least one sample to train on; one with a single sample has none to be measured on.
        """
        train, held_out = [], []
        for client in range(len(self)):
            mine = self[client]
            own, rest = kept_apart(len(mine), share, seed, client)
            held_out.append(mine[own])
            train.append(mine[rest])
        return Deal(train), Deal(held_out)


def kept_apart(samples: int, share: float, seed: int, client: int) -> tuple[Ints, Ints]:
    """Indices of the samples to measure a client on, and of those to train on."""
    kept = min(round(share * samples) or int(share > 0), max(samples - 1, 0))
    order = np.random.default_rng(one_key(seed, _HELD_OUT, client)).permutation(samples)
    return np.sort(order[:kept]), np.sort(order[kept:])


def deal(dataset: Dataset[Any], spec: ClientsSpec, clients: int, seed: int) -> Deal:
    """Divide a training set over clients.

    Raises:
        DataError: the set has no labels or users where the division needs them, or too few samples.
    """
    samples = len(dataset)  # type: ignore[arg-type]
    if clients > samples:
        raise DataError(
            f"{clients} clients for {samples} training samples: some would have none. Name at most {samples} clients, "
            "or more data"
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
    """Divide each class by shares of its own."""
    owner = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        places = random.permutation(np.flatnonzero(labels == label))
        # A gamma draw of a small alpha may be 0 for every client.
        shares = random.gamma(alpha, size=clients) + 1e-300
        cuts = np.round(np.cumsum(shares / shares.sum()) * len(places)).astype(np.int64)
        owner[places] = np.searchsorted(cuts, np.arange(len(places)), side="right").clip(max=clients - 1)
    return _by_owner(owner, clients)


def _shards(labels: Ints, shards: int, clients: int, random: np.random.Generator) -> list[Ints]:
    if clients * shards > len(labels):
        raise DataError(
            f"{clients} clients with {shards} shards each need {clients * shards} samples or more, and there are "
            f"{len(labels)}"
        )
    parts = np.array_split(np.argsort(labels, kind="stable"), clients * shards)
    drawn = random.permutation(len(parts)).reshape(clients, shards)
    return [np.sort(np.concatenate([parts[number] for number in mine])) for mine in drawn]


def _users(dataset: Dataset[Any]) -> list[Ints]:
    users = users_of(dataset)
    if users is None:
        raise DataError(
            "federate.partition user: the data set names no users; give it an attribute `users` with one value per "
            "sample, or take iid, dirichlet or shards"
        )
    names, owner = np.unique(users, return_inverse=True)
    return _by_owner(owner.astype(np.int64), len(names))


def users_of(dataset: Any) -> NDArray[Any] | None:
    """User of each sample, by the data set's attribute `users`; None without one."""
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
        raise DataError(f"the data set has {len(dataset)} samples and users of {len(users)}; give one per sample")
    return users


def _labels(dataset: Dataset[Any], kind: str) -> Ints:
    labels = getattr(dataset, "labels", None)
    if labels is None:
        raise DataError(
            f"federate.partition {kind} divides by class, and the data set has no classes; give it an attribute "
            "`labels` with one whole number per sample, or take iid or user"
        )
    return np.asarray(labels)


def _by_owner(owner: Ints, clients: int) -> list[Ints]:
    order = np.argsort(owner, kind="stable")
    ends = np.searchsorted(owner[order], np.arange(clients + 1))
    return [np.sort(order[ends[client] : ends[client + 1]]) for client in range(clients)]
