"""Operations that change a server, which are the entries of its log."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from paceline.errors import ServerRefused
from paceline_server.parameters.parameters import Gradient, Rows
from paceline_server.parameters.tickets import Ticket

SLOWEST_BYTES_PER_S = 10e6  # of a link that is not taken for lost


class _Action(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that a client asks for once."""


class Join(_Action, frozen=True, tag="join"):
    """Become a member under a name; another client that has it is lost."""


class Leave(_Action, frozen=True, tag="leave"):
    """End a membership: one's own, or that of a client that died."""

    client: str | None = None


class Initialize(_Action, frozen=True, tag="initialize"):
    """Give the parameters their first values; the first one counts."""

    tensors: dict[str, Tensor]


class Push(_Action, frozen=True, tag="push"):
    """A gradient, or a change of the parameters.

    Attributes:
        read: the version that it was computed with.
        ticket: number and attempt.
        take: deal the next ticket with the answer, where there is one now.
        coded: names of dense tensors, and all their numbers in the settings' code; a server decodes them into `dense`.
        coded_bytes: bytes in which `dense` came; 0: as it is.
    """

    dense: dict[str, Tensor]
    rows: dict[str, tuple[Tensor, Tensor]]
    read: int
    ticket: tuple[int, int] | None = None
    delta: bool = False
    take: bool = False
    coded: tuple[list[str], Tensor] | None = None
    coded_bytes: int = 0

    def gradients(self) -> dict[str, Gradient]:
        """All of it by name."""
        return {**self.dense, **{name: Rows(*rows) for name, rows in self.rows.items()}}


class Take(_Action, frozen=True, tag="take"):
    """Ask for a ticket."""


class GiveBack(_Action, frozen=True, tag="give_back"):
    """Return a ticket that was not computed."""

    number: int
    attempt: int


class Open(_Action, frozen=True, tag="open"):
    """Allow tickets of more global batches."""

    until: int


class Load(_Action, frozen=True, tag="load"):
    """Restore the parameters of a checkpoint, after so many global batches."""

    parameters: dict[str, Any]
    batches: int


Action = Join | Leave | Initialize | Push | Take | GiveBack | Open | Load


class Operation(NamedTuple):
    """An action with its client and the number that this client gave it.

    Attributes:
        name: of the client, as people read it.
        identity: random, of this one process.
    """

    name: str
    identity: str
    sequence: int
    action: Action


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of an operation.

    Attributes:
        version: of the parameters, after it.
        accepted: False: the ticket was dealt to another client meanwhile, and the push was dropped.
        stepped: the optimizer took a step.
        staleness: steps since the version that the push was computed with.
        ticket: number, batch, piece, attempt and needs of the ticket that was dealt.
    """

    version: int
    accepted: bool = True
    stepped: bool = False
    staleness: int = 0
    ticket: Ticket | None = None


def plain(action: Action) -> dict[str, Any]:
    """The action as nested plain values and tensors."""
    return {"type": type(action).__struct_config__.tag, **msgspec.structs.asdict(action)}


def read_action(values: Any) -> Action:
    """The action that `plain` wrote. Raises ServerRefused where it is none."""
    try:
        action: Action = msgspec.convert(values, Action)
        return action
    except (msgspec.ValidationError, TypeError) as error:
        raise ServerRefused(f"a client asked for something that is no action of a server: {error}") from None


def nbytes(value: Any) -> int:
    """Memory of all tensors in nested values."""
    if isinstance(value, dict):
        return sum(nbytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(nbytes(item) for item in value)
    return int(getattr(value, "nbytes", 0))
