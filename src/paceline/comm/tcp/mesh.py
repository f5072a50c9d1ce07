"""Links from a rank to all other ranks of a group, for messages and failures.

Each stream has two channels. On the channel for collectives, the next message goes to the first request. On the channel
for c10d's messages, the next message goes to the first request for its tag. A message without a request is kept, so
that it does not block later messages.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from ipaddress import ip_address
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.cluster.machine import own_address, own_host
from paceline.comm.messages import Matching, Message, Receive
from paceline.comm.operation import Breakage
from paceline.comm.process_group import different_calls
from paceline.comm.rendezvous import tell_all
from paceline.comm.tcp.link import GREETING_BYTES, GROUP_BYTES, Greeting, Membership, PeerLink, RankAddress
from paceline.comm.tcp.progress import TcpProgress
from paceline.comm.tcp.stream import MESSAGE_HEADER, AlteredError, OutgoingBytes
from paceline.comm.transport import encrypts
from paceline.errors import ChannelError, LaunchError, SyncError
from paceline.wire.key import RunKey, own_key
from paceline.wire.listener import Admission, listen

_SMALL_BYTES = 2**15  # a message up to here is copied into one chunk with its header
_GOODBYE_S = 2.0  # time for other ranks to receive the goodbye, which tells them that this rank has not died
_LINGER_BROKEN_S = 1.0  # time to send a failure notice
_UNAUTHENTICATED_PER_S = 50.0  # peers without the key, before the listener pauses
_REST_S = 0.05  # after a fault


class TcpSend:
    """Message that is being sent; the tensor may change only after `end_loan`."""

    def __init__(self, link: PeerLink, chunk: OutgoingBytes) -> None:
        self.link, self._chunk, self._end = link, chunk, chunk.end

    @property
    def done(self) -> bool:
        """Return True once the kernel has all bytes of the message.

        The bytes are needed again only if the connection is lost.
        """
        return self.link.stream.written >= self._end

    def end_loan(self) -> None:
        """Copy the bytes that may have to be sent again."""
        self.link.stream.keep(self._chunk)


class LinkMesh(Breakage):
    """This rank's links to all other ranks.

    Callers of all methods except the constructor and `close` must hold the loop's lock.
    """

    def __init__(self, loop: TcpProgress, store: Store, rank: int, size: int, timeout_s: float) -> None:
        super().__init__()
        self.rank, self.size, self.loop = rank, size, loop
        self._timeout_s = timeout_s
        self.links: dict[int, PeerLink] = {}
        self._inboxes: dict[int, TcpInbox] = {}
        # connections that peers made before this rank knows all addresses
        self._early: dict[int, tuple[socket.socket, Greeting]] | None = {}
        member = _membership(store, rank, size, timeout_s)
        self.address, self.admission = self._listen(member)
        try:
            own = RankAddress(rank, own_host(), *self.address, os.getpid())
            places = [RankAddress(**place) for place in tell_all(store, "place", rank, size, timeout_s, asdict(own))]
            _must_be_reachable(own, places)
            with loop.lock:
                for peer in places:
                    if peer.rank != rank:
                        inbox = self._inboxes[peer.rank] = TcpInbox(peer.rank, self._on_mismatch, self._on_failure)
                        self.links[peer.rank] = PeerLink(loop, own, peer, member, inbox, self._on_fault)
                self._own, early, self._early = own, self._early, None
                for connection, hello in early.values():
                    self._give(connection, hello)
                for link in self.links.values():
                    link.begin()
        except BaseException:
            with loop.lock:
                self._stop_listening()
                for connection, _ in (self._early or {}).values():
                    connection.close()
            raise

    def send(self, to: int, channel: int, call: CurrentCall, tensor: Tensor) -> TcpSend:
        """Send a flat tensor, after all earlier messages to the same rank."""
        link, data = self.links[to], bytes_of(tensor)
        head = header(channel, call, len(data))
        if len(data) <= _SMALL_BYTES:
            chunk = link.stream.give(memoryview(head + bytes(data)), lent=False)
        else:
            link.stream.give(memoryview(head), lent=False)
            chunk = link.stream.give(data, lent=True)
        link.flush()
        return TcpSend(link, chunk)

    def receive(self, source: int | None, channel: int, call: CurrentCall, tensor: Tensor) -> Receive:
        """Receive the next message with the call's tag into a flat tensor.

        If `source` is None, the message may come from any rank.
        """
        receive = Receive(call, bytes_of(tensor), source=-1 if source is None else source)
        for inbox in self._inboxes.values() if source is None else [self._inboxes[source]]:
            if receive.message is None:
                inbox.ask(channel, receive)
        return receive

    def links_of(self, under_way: Sequence[TcpSend | Receive]) -> list[PeerLink]:
        """Return the links for which messages wait.

        A receive from any rank counts as waiting only if all links are over.
        """
        found: dict[PeerLink, None] = {}
        for message in under_way:
            if message.done:
                continue
            if isinstance(message, TcpSend):
                found[message.link] = None
            elif message.source >= 0:
                found[self.links[message.source]] = None
            elif all(link.why_over() for link in self.links.values()):
                found.update(dict.fromkeys(self.links.values()))
        return list(found)

    def fail(self, error: Exception) -> None:
        """Fail all operations of this group, and send the reason to the other ranks.

        A notified rank forwards the notice before it leaves, so that the other ranks know the reason.
        """
        if self.error is not None:
            return
        self.error = error
        said = str(error) if isinstance(error, SyncError) else f"{self._own}: {type(error).__name__}: {error}"
        text = said.encode(errors="replace")[:LONGEST_FAILURE_BYTES].decode(errors="ignore").encode()
        for link in self.links.values():
            link.stream.give(memoryview(header(FAILURE, CurrentCall.of("failure"), len(text)) + text), lent=False)
            link.flush()

    def close(self, linger_s: float) -> None:
        """End all links when the other ranks have received all bytes, or after `linger_s` seconds."""
        until = time.monotonic() + (linger_s if self.error is None else min(linger_s, _LINGER_BROKEN_S))
        polite_until = min(until, time.monotonic() + _GOODBYE_S)

        def has_left(link: PeerLink) -> bool:
            if link.stream.outstanding and not link.why_over():
                return time.monotonic() > until
            link.say_goodbye()
            return bool(link.why_over()) or time.monotonic() > polite_until

        self.loop.drive(lambda: all([has_left(link) for link in self.links.values()]))  # noqa: C419 - every one is to say goodbye
        with self.loop.lock:
            for link in self.links.values():
                link.close()
            self._stop_listening()

    def _listen(self, member: Membership) -> tuple[tuple[str, int], Admission]:
        try:
            listening = listen((own_address(), 0))
        except (ChannelError, OSError) as error:
            raise LaunchError(
                "ranks.address_wrong",
                "{error}. PACELINE_ADDRESS must be the address of this host that the other hosts can reach.",
                error=error,
            ) from error
        address = listening.getsockname()[:2]
        with self.loop.lock:
            admission = Admission(
                listening,
                member.key,
                self.loop,
                self._welcome,
                expects=GREETING_BYTES,
                unauthenticated_per_s=_UNAUTHENTICATED_PER_S,
                on_refused=self._count_unauthenticated,
            )
            self.loop.add_clock(admission, admission.look, lambda _: admission.rest(_REST_S))
        return address, admission

    def _stop_listening(self) -> None:
        self.loop.remove_clock(self.admission)
        self.admission.close()

    def _count_unauthenticated(self, _: str) -> None:
        self.loop.unauthenticated += 1

    def _welcome(self, connection: socket.socket, message: bytes) -> None:
        try:
            hello = Greeting.from_bytes(message)
        except ConnectionError:  # of another version
            connection.close()
            return
        self._give(connection, hello)

    def _give(self, connection: socket.socket, hello: Greeting) -> None:
        """Pass a connection to the link of the rank that greeted."""
        if self._early is not None:  # without this, the peer would retry later, and this rank would wait for the peer
            before, _ = self._early.pop(hello.sender, (None, None))
            if before is not None:
                before.close()
            self._early[hello.sender] = connection, hello
            return
        link = self.links.get(hello.sender)
        if link is None:
            connection.close()
            return
        try:
            link.accept(connection, hello)
        except OSError as error:
            connection.close()
            link.lose(error)
        except SyncError as error:
            connection.close()
            self.fail(error)
        except Exception as error:  # noqa: BLE001 - as in a handler of the link's own
            connection.close()
            self._on_fault(link, error)

    def _on_mismatch(self, source: int, receive: Receive, message: Message) -> None:
        own, peer = self._own, self.links[source].peer
        ours, theirs = str(receive.call), str(message.call)
        if ours == theirs:  # all_to_all, whose sizes may differ from pair to pair
            ours += f" of {len(receive.target)} bytes from rank {source}"
            theirs += f" of {len(message.data)} bytes to rank {own.rank}"
        self.fail(different_calls(f"{own} {ours}", f"{peer} {theirs}"))

    def _on_fault(self, link: PeerLink, error: Exception) -> None:
        self.fail(error)
        link.end(str(self.error))

    def _on_failure(self, text: str) -> None:
        self.fail(SyncError("ranks.connection_failed", "{reason}", reason=text))


def _membership(store: Store, rank: int, size: int, timeout_s: float) -> Membership:
    """Return the group's name, with the run's key or a new key.

    Rank 0 creates a new key if the run has none, and publishes it in the store. Any process that can read the store can
    then join the group.
    """
    key, sealed = own_key(), encrypts()
    made = RunKey.make() if key is None and rank == 0 else None
    offer = {
        "given": key and key.fingerprint,
        "made": made and made.to_pem().decode(),
        "group": secrets.token_hex(GROUP_BYTES),
    }
    offers = tell_all(store, "tcp", rank, size, timeout_s, offer)
    given = [offer["given"] for offer in offers]
    if other := next((r for r in range(size) if given[r] != given[0]), None):
        first, second = (f"the run's key {name}" if name else "no key" for name in (given[0], given[other]))
        raise LaunchError(
            "key.hosts_differ",
            "rank 0 has {first}, and rank {other} has {second}. Every host of a run needs the same key. Copy the key "
            "file of the first host to all hosts (PACELINE_KEY_FILE).",
            first=first,
            other=other,
            second=second,
        )
    key = key or made or RunKey.from_pem(offers[0]["made"].encode())
    return Membership(bytes.fromhex(offers[0]["group"]), key, sealed)


def _must_be_reachable(own: RankAddress, places: Sequence[RankAddress]) -> None:
    unreachable = [p for p in places if ip_address(p.address).is_loopback != ip_address(own.address).is_loopback]
    if unreachable:
        alone = own if ip_address(own.address).is_loopback else unreachable[0]
        raise LaunchError(
            "ranks.loopback_only",
            "{alone} can be reached only from its own host, but the other ranks are on other hosts. On that host, "
            "set PACELINE_ADDRESS to an address that the other hosts can reach, or MASTER_ADDR to a name that is "
            "not an alias of loopback.",
            alone=alone,
        )


COLLECTIVE, MESSAGE, FAILURE = range(3)  # channels
LONGEST_FAILURE_BYTES = 10_000  # bytes of UTF-8
_CALLS = "all_reduce reduce broadcast all_gather gather scatter reduce_scatter all_to_all barrier"
_WHAT = ("message", *_CALLS.split(), "failure")
_HOW = ("", "sum", "mean", "product", "min", "max", "and", "or", "xor")
_WHOLE = "uint8 int8 uint16 int16 uint32 int32 uint64 int64 bool"
_FLOATS = "float16 bfloat16 float32 float64 complex32 complex64 complex128"
_NARROW = "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
_DTYPES = tuple(getattr(torch, name) for name in f"{_WHOLE} {_FLOATS} {_NARROW}".split())
_WHAT_CODES = {name: code for code, name in enumerate(_WHAT)}
_HOW_CODES = {name: code for code, name in enumerate(_HOW)}
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class CurrentCall(NamedTuple):
    """Current call of a rank, which must be equal on both ends of a message.

    `elements` is the number of elements of the call's whole tensor.
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
        """Encode a call as numbers."""
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
    """Pack the header of a message whose body has `nbytes` bytes."""
    what, how, dtype, root, number, tag, elements = call
    return MESSAGE_HEADER.pack(channel, what, how, dtype, root, number, tag, elements, nbytes)


class TcpInbox:
    """Receiver of the messages of one rank.

    The inbox calls `on_mismatch` with an unexpected message, and `on_failure` with the text of the other rank's failure
    notice.
    """

    def __init__(
        self, source: int, on_mismatch: Callable[[int, Receive, Message], None], on_failure: Callable[[str], None]
    ) -> None:
        self.source = source
        self._on_mismatch, self._on_failure = on_mismatch, on_failure
        self._matching = Matching()
        self._header = memoryview(bytearray(MESSAGE_HEADER.size))
        self._header_received = 0
        self._coming: Message | None = None

    def ask(self, channel: int, receive: Receive) -> None:
        """Request a message; requests are served in order."""
        message = self._matching.ask(_key(channel, receive.call.tag), receive)
        if message is not None:
            self._give(receive, message)

    # As the sink of a stream

    def target(self) -> memoryview:
        if self._coming is not None:
            rest: memoryview = self._coming.data[self._coming.received :]
            return rest
        return self._header[self._header_received :]

    def advance(self, count: int) -> None:
        message = self._coming
        if message is None:
            self._header_received += count
            if self._header_received < MESSAGE_HEADER.size:
                return
            self._header_received = 0
            message = self._coming = self._begin()
        else:
            message.received += count
        if message.whole:
            self._coming = None
            if message.call is None:  # a failure notice
                self._on_failure(bytes(message.data).decode(errors="replace"))

    def _begin(self) -> Message:
        """Start to receive a message into the waiting tensor, or else into separate memory."""
        channel, what, how, dtype, root, number, tag, elements, nbytes = MESSAGE_HEADER.unpack(self._header)
        call = CurrentCall(what, how, dtype, root, number, tag, elements)
        if channel == FAILURE:
            if nbytes > LONGEST_FAILURE_BYTES:
                raise AlteredError(f"a failure notice of {nbytes} bytes is not valid")
            return Message(None, memoryview(bytearray(nbytes)))
        receive = self._matching.who_waits(_key(channel, tag))
        if receive is not None and self._fits(receive, call, nbytes):
            message = Message(call, receive.target)
            receive.take(message, self.source)
            return message
        message = Message(call, torch.empty(nbytes, dtype=torch.uint8).numpy().data)
        if receive is None:
            self._matching.keep(_key(channel, tag), message)
        else:
            self._on_mismatch(self.source, receive, message)
        return message

    def _give(self, receive: Receive, message: Message) -> None:
        if not self._fits(receive, message.call, len(message.data)):
            self._on_mismatch(self.source, receive, message)
        else:
            receive.target[: message.received] = message.data[: message.received]
            message.data = receive.target  # the remaining bytes go directly to the target
            receive.take(message, self.source)

    @staticmethod
    def _fits(receive: Receive, call: CurrentCall, nbytes: int) -> bool:
        return receive.call == call and len(receive.target) == nbytes


def _key(channel: int, tag: int) -> tuple[int, int]:
    return channel, tag if channel == MESSAGE else 0


def bytes_of(flat: Tensor) -> memoryview:
    """Return the memory of a flat, contiguous tensor."""
    view: memoryview = flat.view(torch.uint8).numpy().data
    return view
