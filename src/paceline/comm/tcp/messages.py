"""Messages on a stream: headers, matching of receives, and checks that both sides agree.

Two channels share a stream. On that of collectives the next message is for whoever has asked first; on that of c10d's
messages, for whoever has asked first for its tag. One that nobody has asked for yet is kept, so that it does not block
those behind it.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.tcp.wire import AlteredError

_HEADER = struct.Struct("<BBBBiQqQQ")  # channel, what, how, dtype, root, number, tag, elements, bytes
HEADER_BYTES = _HEADER.size
COLLECTIVE, MESSAGE, FAILURE = range(3)  # channels
LONGEST_FAILURE_BYTES = 10_000  # of UTF-8
_WHAT = (
    "message",
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "failure",
)
_HOW = ("", "sum", "mean", "product", "min", "max", "and", "or", "xor")
_DTYPE_NAMES = (
    *(
        "uint8",
        "int8",
        "uint16",
        "int16",
        "uint32",
        "int32",
        "uint64",
        "int64",
        "bool",
        "float16",
        "bfloat16",
        "float32",
        "float64",
    ),
    *(
        "complex32",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ),
)
_DTYPES = tuple(getattr(torch, name) for name in _DTYPE_NAMES)
_WHAT_CODES = {name: code for code, name in enumerate(_WHAT)}
_HOW_CODES = {name: code for code, name in enumerate(_HOW)}
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class CurrentCall(NamedTuple):
    """A rank's current call, which both ends of a message must agree about.

    `elements` are those of the whole call.
    """

    what: int
    how: int = 0
    dtype: int = 0
    root: int = -1
    number: int = 0
    tag: int = 0
    elements: int = 0

    @classmethod
    def of(
        cls,
        what: str,
        dtype: torch.dtype = torch.uint8,
        elements: int = 0,
        *,
        how: str = "",
        root: int = -1,
        number: int = 0,
    ) -> CurrentCall:
        """A call in numbers."""
        return cls(_WHAT_CODES[what], _HOW_CODES[how], _DTYPE_CODES[dtype], root, number, 0, elements)

    def __str__(self) -> str:
        if self.what >= len(_WHAT) or self.how >= len(_HOW) or self.dtype >= len(_DTYPES):
            return f"a call {tuple(self)} of another version of paceline"
        what = _WHAT[self.what]
        words = [what, _HOW[self.how]]
        if what not in ("all_to_all", "barrier"):
            words += ["of", str(_DTYPES[self.dtype]).removeprefix("torch."), "x", str(self.elements)]
        words += [f"with root {self.root}"] if self.root >= 0 else []
        words += [f"with tag {self.tag}"] if self.tag else []
        words += [f"(collective {self.number} of this group)"] if self.number else []
        return " ".join(word for word in words if word)


def header(channel: int, call: CurrentCall, nbytes: int) -> bytes:
    """The header of a message with so many bytes."""
    what, how, dtype, root, number, tag, elements = call
    return _HEADER.pack(channel, what, how, dtype, root, number, tag, elements, nbytes)


@dataclass
class TcpMessage:
    """One that is coming in, or waits to be asked for."""

    channel: int
    call: CurrentCall
    data: memoryview
    received: int = 0

    @property
    def whole(self) -> bool:
        """True once all bytes have arrived."""
        return self.received == len(self.data)


@dataclass(eq=False)
class TcpReceive:
    """A place for a message that is waited for."""

    call: CurrentCall
    target: memoryview
    message: TcpMessage | None = None
    source: int = -1

    @property
    def done(self) -> bool:
        """True once the message is in its place."""
        return self.message is not None and self.message.whole


class TcpInbox:
    """Receiver of one rank's messages.

    `on_mismatch` gets a message that is not the expected one, `on_failure` the other's failure.
    """

    def __init__(
        self, source: int, on_mismatch: Callable[[int, TcpReceive, TcpMessage], None], on_failure: Callable[[str], None]
    ) -> None:
        self.source = source
        self._on_mismatch, self._on_failure = on_mismatch, on_failure
        self._receives: dict[int, deque[TcpReceive]] = {channel: deque() for channel in (COLLECTIVE, MESSAGE)}
        self._kept: dict[int, deque[TcpMessage]] = {channel: deque() for channel in (COLLECTIVE, MESSAGE)}
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._header_received = 0
        self._coming: TcpMessage | None = None

    def ask(self, channel: int, receive: TcpReceive) -> None:
        """Wait for a message; those who ask first are served first."""
        kept = self._kept[channel]
        for at, message in enumerate(kept):
            if channel != MESSAGE or message.call.tag == receive.call.tag:
                del kept[at]
                self._give(receive, message)
                return
        self._receives[channel].append(receive)

    # As the sink of a stream

    def target(self) -> memoryview:
        """The memory for the next bytes."""
        if self._coming is not None:
            return self._coming.data[self._coming.received :]
        return self._header[self._header_received :]

    def advance(self, count: int) -> None:
        """Account for `count` received bytes."""
        message = self._coming
        if message is None:
            self._header_received += count
            if self._header_received < HEADER_BYTES:
                return
            self._header_received = 0
            message = self._coming = self._begin()
        else:
            message.received += count
        if message.whole:
            self._coming = None
            if message.channel == FAILURE:
                self._on_failure(bytes(message.data).decode(errors="replace"))

    def _begin(self) -> TcpMessage:
        """Straight into the place that waits for it, else into memory of its own."""
        channel, what, how, dtype, root, number, tag, elements, nbytes = _HEADER.unpack(self._header)
        call = CurrentCall(what, how, dtype, root, number, tag, elements)
        if channel == FAILURE:
            if nbytes > LONGEST_FAILURE_BYTES:
                raise AlteredError(f"a failure's text of {nbytes} bytes is not one of paceline's")
            return TcpMessage(channel, call, memoryview(bytearray(nbytes)))
        receive = self._who_waits(channel, tag)
        if receive is not None and self._fits(receive, call, nbytes):
            receive.message, receive.source = TcpMessage(channel, call, receive.target), self.source
            return receive.message
        message = TcpMessage(channel, call, torch.empty(nbytes, dtype=torch.uint8).numpy().data)
        if receive is None:
            self._kept[channel].append(message)
        else:
            self._on_mismatch(self.source, receive, message)
        return message

    def _who_waits(self, channel: int, tag: int) -> TcpReceive | None:
        waiting = self._receives[channel]
        while waiting and waiting[0].message is not None:  # it asked several ranks, and another one has served it
            waiting.popleft()
        for at, receive in enumerate(waiting):
            if receive.message is None and (channel != MESSAGE or receive.call.tag == tag):
                del waiting[at]
                return receive
        return None

    def _give(self, receive: TcpReceive, message: TcpMessage) -> None:
        if not self._fits(receive, message.call, len(message.data)):
            self._on_mismatch(self.source, receive, message)
        elif message.whole:
            receive.target[:] = message.data
            receive.message, receive.source = message, self.source
        else:  # what is still to come goes to its place
            receive.target[: message.received] = message.data[: message.received]
            message.data = receive.target
            receive.message, receive.source = message, self.source

    @staticmethod
    def _fits(receive: TcpReceive, call: CurrentCall, nbytes: int) -> bool:
        return receive.call == call and len(receive.target) == nbytes


def bytes_of(flat: Tensor) -> memoryview:
    """The memory of a flat, contiguous tensor."""
    view: memoryview = flat.view(torch.uint8).numpy().data
    return view
