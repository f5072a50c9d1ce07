"""The folder of one client: its identity, and its state between rounds."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from paceline.errors import FederateError
from paceline.files import private_folder, read_text, write_whole
from paceline_federated.client import ClientState

_IDENTITY, _STATE, _LOCK = "identity", "state.safetensors", "lock"


@dataclass
class KeptState:
    """A client's state before and after the last round that it trained.

    Whether that round counts is known by the server alone, which may have been restarted from before it.

    Attributes:
        round: of `after`; 0 before any.
        counted: True if the server said so; False if it refused; None while it has not answered.
    """

    before: ClientState = field(default_factory=ClientState)
    after: ClientState = field(default_factory=ClientState)
    round: int = 0
    counted: bool | None = False

    def for_round(self, round: int) -> ClientState:
        """A copy of the state with which a round begins."""
        done = self.counted is not False and round > self.round
        chosen = self.after if done else self.before
        return ClientState(*({name: t.clone() for name, t in part.items()} for part in (chosen.rule, chosen.personal)))

    def trained(self, round: int, began: ClientState, ended: ClientState) -> KeptState:
        """The state after training a round that may or may not count yet."""
        return KeptState(began, ended, round, None)


class ClientFolder:
    """Keeps a client's identity and state. One process at a time has it.

    Raises:
        FederateError: another process has it, or it cannot be written or read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            private_folder(path)
            self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise FederateError(
                f"{path} cannot be a client's folder: {error.strerror}. Name another: --state"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise FederateError(
                f"{path} is another running client's. Two clients need two folders, named by --state or by --name."
            ) from None
        self.identity = self._identity()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        os.close(self._lock)

    def load(self) -> KeptState:
        """The state of the last round; an empty one for a new client."""
        path = self.path / _STATE
        if not path.exists():
            return KeptState()
        try:
            with safe_open(path, "pt") as file:
                about = json.loads(file.metadata()["kept"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
            before, after = (
                ClientState(_part(tensors, f"{when}.rule."), _part(tensors, f"{when}.personal.")) for when in _WHEN
            )
            return KeptState(before, after, int(about["round"]), about["counted"])
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise FederateError(f"{path} is no client's state: {error}. Move it away to begin anew.") from error

    def save(self, state: KeptState) -> None:
        """Write a state, durably and whole."""
        tensors: dict[str, Tensor] = {}
        for when, part in zip(_WHEN, (state.before, state.after), strict=True):
            tensors |= {f"{when}.rule.{name}": tensor.contiguous() for name, tensor in part.rule.items()}
            tensors |= {f"{when}.personal.{name}": tensor.contiguous() for name, tensor in part.personal.items()}
        about = {"kept": json.dumps({"round": state.round, "counted": state.counted})}
        try:
            write_whole(self.path / _STATE, save(tensors, about), durable=True)
        except OSError as error:
            raise FederateError(f"{self.path} cannot keep the client's state: {error.strerror}") from error

    def _identity(self) -> str:
        path = self.path / _IDENTITY
        try:
            return read_text(path, 256).strip()
        except FileNotFoundError:
            identity = secrets.token_urlsafe(24)
            write_whole(path, identity + "\n", durable=True)
            return identity
        except (OSError, UnicodeDecodeError) as error:
            raise FederateError(f"{path} cannot be read: {error}") from error


_WHEN = ("before", "after")


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
