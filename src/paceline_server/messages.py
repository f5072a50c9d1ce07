"""Messages between a client and a service."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

VERSION = 1


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """First message of a client; one of another version may have more."""

    version: int
    name: str
    identity: str


class Welcome(msgspec.Struct, array_like=True, tag="welcome", forbid_unknown_fields=True):
    """First message of a service: its limits, of calls at once and memory beside each."""

    attached_bytes: int
    calls_at_once: int


class Refused(msgspec.Struct, array_like=True, tag="refused", forbid_unknown_fields=True):
    """First and last message of a service that does not take calls."""

    reason: str


class SharedMemory(msgspec.Struct, array_like=True, tag="memory", forbid_unknown_fields=True):
    """Memory that the receiver is to map. Its descriptor comes with the message.

    A number that stood for other memory stands for this from now on.
    """

    number: int
    nbytes: int


class Block(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The bytes of a message's large tensors, in shared memory."""

    memory: int
    nbytes: int


class _Numbered(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A message on one call.

    Attributes:
        returned: shared memory of the receiver's that the sender has no tensors in any more.
    """

    number: int
    returned: list[int]


class Call(_Numbered, tag="call"):
    """Call a function; `stream` asks for its results one by one."""

    function: str
    arguments: Any
    block: Block | None
    stream: bool


class Forget(_Numbered, tag="forget"):
    """Nobody waits for the answer to a call. It need not begin, and its stream may end."""


class More(_Numbered, tag="more"):
    """A number of further results of a stream that may be sent."""

    count: int


class Answer(_Numbered, tag="answer"):
    """Result of a call, or the next one of a stream."""

    value: Any
    block: Block | None


class End(_Numbered, tag="end"):
    """A stream has no further results."""


class Raised(_Numbered, tag="raised"):
    """A call raised, or was refused (then without a kind)."""

    kind: str
    text: str
    remote_traceback: str


FromClient = Hello | Call | Forget | More | SharedMemory
FromService = Welcome | Refused | Answer | End | Raised | SharedMemory


F = TypeVar("F", bound=Callable[..., Any])
LATER = object()  # result of a trial that would have to wait


def quick(function: F) -> F:
    """Have a function run in the thread that reads its calls. It must never wait."""
    function.__dict__["remote_mark"] = "quick"
    return function


def at_once(function: F, trial: Callable[..., Any]) -> F:
    """Have a trial of a function run in the thread that reads its calls.

    Where the trial would have to wait it does nothing and returns `LATER`; the function itself is called then.
    """
    function.__dict__ |= {"remote_mark": "at once", "remote_trial": trial}
    return function


def in_order(function: F) -> F:
    """Have a client's calls of functions so marked run in order, one at a time."""
    function.__dict__["remote_mark"] = "in order"
    return function
