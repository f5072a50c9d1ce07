"""Tensors that simulated clients keep between rounds, in a file of the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import RunError
from paceline.files import private_opener
from paceline_federated.client import ClientState, LocalTraining

Ints = NDArray[np.int64]
_FILE = "clients.state"
_PREFIX = "clients/"


class Kept:
    """Tensors of all clients, one row each, mapped into memory from a sparse file.

    A rule that keeps nothing, without personal parameters, costs nothing. Clients that have not trained have zeros, and
    the personal parameters that the job begins with.

    Raises:
        RunError: the file cannot be made.
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
            raise RunError(f"{self.path}, which holds what clients keep, cannot be made: {error}") from error
        for name, part in zip(shapes, whole.view(clients, width).split(list(numbers.values()), dim=1), strict=True):
            self._tables[name] = part

    def rule(self, clients: Ints) -> dict[str, Tensor]:
        """Copies of the rule's tensors of some clients, (k, p) each."""
        rows = torch.from_numpy(clients)
        return {name: self._tables[name][rows] for name in self.rule_names}

    def personal(self, clients: Ints) -> list[Tensor]:
        """Copies of the personal parameters of some clients, (k, …) each, in the layout's order."""
        rows, known = torch.from_numpy(clients), torch.from_numpy(self.touched[clients])
        found = []
        for name in self.personal_names:
            first = self.training.first_personal[name]
            stack = self._tables[name][rows].view(len(clients), *first.shape)
            found.append(torch.where(known.view(-1, *[1] * first.dim()), stack, first))
        return found

    def keep(self, clients: Ints, rule: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        """Keep the clients' tensors of the end of a round.

        `parameters` may have others than personal ones.
        """
        rows = torch.from_numpy(clients)
        for name in self.rule_names:
            self._tables[name][rows] = rule[name]
        for name in self.personal_names:
            self._tables[name][rows] = parameters[name].reshape(len(clients), -1)
        self.touched[clients] = True

    def state(self, client: int) -> ClientState:
        """State of one client, as real clients have it."""
        one = np.array([client])
        rule = {name: tensor[0] for name, tensor in self.rule(one).items()}
        personal = {n: t[0] for n, t in zip(self.personal_names, self.personal(one), strict=True)}
        return ClientState(rule, personal)

    def put(self, client: int, state: ClientState) -> None:
        """Keep the state of one client."""
        rule, personal = ({n: t.unsqueeze(0) for n, t in held.items()} for held in (state.rule, state.personal))
        self.keep(np.array([client]), rule, personal)

    def tensors(self) -> dict[str, Tensor]:
        """Rows of the clients that have trained, for a checkpoint."""
        if not self._tables:
            return {}
        rows = torch.from_numpy(np.flatnonzero(self.touched))
        return {f"{_PREFIX}rows": rows} | {f"{_PREFIX}{name}": table[rows] for name, table in self._tables.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore from a checkpoint's tensors."""
        if not self._tables:
            return
        rows = tensors[f"{_PREFIX}rows"]
        for name, table in self._tables.items():
            table.zero_()
            table[rows] = tensors[f"{_PREFIX}{name}"]
        self.touched[:] = False
        self.touched[rows.numpy()] = True

    def close(self) -> None:
        """Remove the file; checkpoints have its content."""
        self._tables.clear()
        self.path.unlink(missing_ok=True)
