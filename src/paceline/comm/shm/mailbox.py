"""Messages between ranks: a ring buffer in the sender's memory for each receiver.

A message is a header (tag, size) and its bytes; one that is larger than the ring flows through it. The receiver matches
tags: a message that nobody has asked for yet is taken out and kept, so that it does not block those behind it.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.c10d.operation import Steps
from paceline.comm.shm import futex
from paceline.comm.shm.progress import Peer
from paceline.comm.shm.rounds import MAIL_BYTES, Rounds
from paceline.errors import SyncError

_HEADER = struct.Struct("<qq")  # tag, size; a message is padded to a whole number of headers, so that none wraps around
_STEP_BYTES = MAIL_BYTES // 8  # moved at a time, so that one side writes while the other reads
_WRITTEN, _READ = 0, 8  # words: how many bytes ever, on cache lines of their own


class ShmOutbox:
    """This rank's end of the ring to one receiver."""

    def __init__(self, rounds: Rounds, receiver: int) -> None:
        self._peer = rounds.peers[receiver]
        self._words, self._headers, self._ring = rounds.mailbox(rounds.rank, receiver)
        self._written = 0

    def send(self, tensor: Tensor, tag: int) -> Steps:
        """Write a message; done when all of it is in the ring or taken."""
        data, size = tensor.view(torch.uint8), tensor.nbytes
        while self._free() < _HEADER.size:
            yield
        _HEADER.pack_into(self._headers, self._written % MAIL_BYTES, tag, size)
        self._written += _HEADER.size
        start = 0
        while start < size:
            at = self._written % MAIL_BYTES
            count = min(self._free(), MAIL_BYTES - at, size - start, _STEP_BYTES)
            if count:
                self._ring[at : at + count].copy_(data[start : start + count])
                start += count
                self._written += count
            if start < size:
                self._tell()
                if not count:
                    yield
        self._written += -size % _HEADER.size
        self._tell()

    def _free(self) -> int:
        used: int = self._written - self._words[_READ]
        return MAIL_BYTES - used

    def _tell(self) -> None:
        self._words[_WRITTEN] = self._written
        futex.fence()
        self._peer.ring()

    def waits_for(self) -> list[Peer]:
        """The receiver, while the ring is full."""
        return [self._peer] if self._free() < _HEADER.size else []


@dataclass
class ShmMessage:
    """One that is coming in, or waits to be asked for."""

    tag: int
    size: int
    data: Tensor
    received: int = 0

    @property
    def whole(self) -> bool:
        """True once all bytes have arrived."""
        return self.received == self.size


@dataclass
class ShmReceive:
    """A place for the next message with a tag, and the message once it comes."""

    tag: int
    target: Tensor
    message: ShmMessage | None = None
    inbox: ShmInbox | None = None

    def take(self, message: ShmMessage, inbox: ShmInbox) -> None:
        """The message is found."""
        self.message, self.inbox = message, inbox


class ShmInbox:
    """This rank's end of the ring from one sender."""

    def __init__(self, rounds: Rounds, sender: int) -> None:
        self.peer = rounds.peers[sender]
        self._words, self._headers, self._ring = rounds.mailbox(sender, rounds.rank)
        self._read = 0
        self._coming: ShmMessage | None = None
        self._abandoned = False
        self._kept: deque[ShmMessage] = deque()
        self._requests: deque[ShmReceive] = deque()

    def request(self, request: ShmReceive) -> None:
        """Ask for a message; those who ask first are served first.

        Raises:
            SyncError: one was asked for and not waited for, so nobody knows which message is whose.
        """
        if self._abandoned:
            raise SyncError(
                f"this group cannot be used any more for messages from rank {self.peer.rank}, since a receive "
                "from it failed"
            )
        self._requests.append(request)
        self._match()

    def receive(self, request: ShmReceive) -> Steps:
        """Wait until the message is in its place.

        Raises:
            SyncError: it has another size than the place.
        """
        try:
            while request.message is None or not request.message.whole:
                self.pump()
                if request.message is None or not request.message.whole:
                    yield
        except GeneratorExit:
            self.abandon()
            raise
        self.deliver(request)

    def abandon(self) -> None:
        """Take no further requests."""
        self._abandoned = True

    def deliver(self, request: ShmReceive) -> None:
        """Put a whole message where it was asked for."""
        message, target = request.message, request.target
        assert message is not None
        if message.size != len(target):
            raise SyncError(
                f"rank {self.peer.rank} sent a message of {message.size} bytes (tag {request.tag}) for a "
                f"tensor of {len(target)} bytes"
            )
        if message.data is not target:
            target.copy_(message.data)

    def pump(self) -> None:
        """Take what has come out of the ring."""
        while (there := self._words[_WRITTEN] - self._read) > 0:
            at = self._read % MAIL_BYTES
            if self._coming is None:
                tag, size = _HEADER.unpack_from(self._headers, at)
                self._coming = self._begin(tag, size)
                self._take(_HEADER.size)
            else:
                message = self._coming
                count = min(there, MAIL_BYTES - at, message.size - message.received, _STEP_BYTES)
                message.data[message.received : message.received + count].copy_(self._ring[at : at + count])
                message.received += count
                self._take(count)
            if self._coming.whole:
                self._take(-self._coming.size % _HEADER.size)
                self._coming = None

    def waits_for(self) -> list[Peer]:
        """The sender, while nothing of it is there to be read."""
        return [self.peer] if self._words[_WRITTEN] == self._read else []

    def _begin(self, tag: int, size: int) -> ShmMessage:
        """Straight into the first place that waits for it; else into memory of its own."""
        request = next((r for r in self._open() if r.tag == tag), None)
        fits = request is not None and len(request.target) == size
        message = ShmMessage(
            tag, size, request.target if request is not None and fits else torch.empty(size, dtype=torch.uint8)
        )
        if request is None:
            self._kept.append(message)
        else:
            request.take(message, self)
        return message

    def _match(self) -> None:
        """Give what was kept to those who ask for it."""
        for request in self._open():
            found = next((i for i, message in enumerate(self._kept) if message.tag == request.tag), None)
            if found is not None:
                request.take(self._kept[found], self)
                del self._kept[found]

    def _open(self) -> list[ShmReceive]:
        """Requests whose message has not begun; others may have been served by another sender."""
        self._requests = deque(request for request in self._requests if request.message is None)
        return list(self._requests)

    def _take(self, count: int) -> None:
        self._read += count
        self._words[_READ] = self._read
        futex.fence()
        self.peer.ring()


def receive_from_any(inboxes: Sequence[ShmInbox], request: ShmReceive) -> Steps:
    """Wait for the first message with the tag from any rank; returns that rank."""
    for inbox in inboxes:
        inbox.request(request)
    try:
        while request.inbox is None:
            for inbox in inboxes:
                inbox.pump()
            if request.inbox is None:
                yield
    except GeneratorExit:
        for inbox in inboxes:
            inbox.abandon()
        raise
    yield from request.inbox.receive(request)
    return request.inbox.peer.rank
