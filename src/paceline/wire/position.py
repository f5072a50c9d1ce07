"""Position of a rank in its collectives, which the launcher asks for when ranks hang.

While a rank trains, it only counts the collectives of each group. The rest of a position is read at the request of the
launcher (`comm/positions.py`). `elastic/stall.py` compares the positions of all ranks. This module does not import
torch.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

# Signal that asks a rank for its position. Every thread of a rank blocks it, and one thread waits for it.
ASK = signal.SIGRTMAX - 5
# Signal for a rank that SIGSTOP has suspended; SIGCONT follows. The rank writes its stack trace and its position, and
# suspends itself again.
ASK_STOPPED = signal.SIGRTMAX - 6
POSITION = ".position"  # suffix of the file with a rank's position, beside its error record


class Wait(msgspec.Struct, frozen=True):
    """Collective or message in which a rank waits for other ranks.

    All ranks are numbered as in the rank's generation.

    Attributes:
        group: torch's name of the process group, equal on all its ranks.
        label: name of the group for people, such as `tp`.
        number: number of the collective in its group, from 1; 0 for a message.
        what: the operation, such as `all_reduce`.
        tensors: types and shapes of the operation's tensors.
        members: ranks of the group.
        awaited: ranks whose data has not arrived; None if the transport does not know them.
        layer: name of the module that called the operation; "" outside of modules.
        waited_s: seconds since the rank entered the operation.
        after: operation and tensors of the call that came before the rank's earlier calls like this one, if another
            call came before this one. The rank may have left it out.
    """

    group: str
    label: str
    number: int
    what: str
    tensors: str
    members: Sequence[int] = ()
    awaited: Sequence[int] | None = None
    layer: str = ""
    waited_s: float = 0.0
    after: tuple[str, str] | None = None

    @property
    def call(self) -> tuple[str, str]:
        """The operation and, if they must be equal on all ranks, its tensors."""
        return call_of(self.what, self.tensors)

    def __str__(self) -> str:
        """Describe the operation for people."""
        number = f" {self.number}" if self.number else ""
        tensors = f" ({self.tensors})" if self.tensors else ""
        layer = f" in layer {self.layer}" if self.layer else ""
        return f"{self.what}{number}{tensors} of group {self.label}{layer}"


def call_of(what: str, tensors: str) -> tuple[str, str]:
    """Return what must be equal on all ranks in a call of a collective."""
    return what, "" if what in ("gather", "scatter", "all_to_all") else tensors


class Position(msgspec.Struct, frozen=True):
    """Position of one rank.

    Attributes:
        rank: number of the rank in its generation.
        layer: name of the module that the main thread executes; "" outside of modules.
        entered: number of collectives that the rank has entered, by group.
        waits: operations in which the rank waits, or whose wait has just ended at the deadline.
    """

    rank: int = 0
    layer: str = ""
    entered: dict[str, int] = {}
    waits: Sequence[Wait] = ()

    @classmethod
    def from_json(cls, text: str | bytes) -> Position | None:
        """Read a position; return None if the text is not a position."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError:
            return None


_readers: list[Callable[[BaseException | None], Position]] = []  # at most one
_reporters: list[Callable[[BaseException | None], Any]] = []  # at most one


def read_positions_with(read: Callable[[BaseException | None], Position]) -> None:
    """Register the function that reads this rank's position."""
    _readers[:] = [read]


def own_position(error: BaseException | None = None) -> Position:
    """Read this rank's position, or the position in which an error was raised."""
    return _readers[0](error) if _readers else Position()


def report_waits_with(report: Callable[[BaseException | None], Any]) -> None:
    """Register the function that reports a wait beyond its deadline to the launcher."""
    _reporters[:] = [report]


def report_wait(error: BaseException | None = None) -> None:
    """Report that a wait of this rank has reached its deadline.

    Args:
        error: the error that has ended the wait, if it is already raised.
    """
    for report in _reporters:
        report(error)
