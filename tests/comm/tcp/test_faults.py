"""A fault in one group over TCP does not affect the other groups of the process."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]

from paceline.comm.operation import Operation, OperationQueue, Steps
from paceline.comm.tcp.link import PeerLink
from paceline.comm.tcp.mesh import LinkMesh, TcpInbox
from paceline.comm.tcp.process_group import TcpProcessGroup
from paceline.comm.tcp.progress import TcpProgress
from paceline.comm.tcp.stream import ByteStream
from paceline.errors import SyncError
from paceline.wire.listener import TlsHandshake

DEADLINE_S = 20.0
_names = itertools.count()


def on_both(call: Callable[[int], Any]) -> list[Any]:
    """Results or exceptions of two ranks, each a thread."""
    found: list[Any] = [None, None]

    def run(rank: int) -> None:
        try:
            found[rank] = call(rank)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE_S)
    return found


def pair() -> list[TcpProcessGroup]:
    store, name = HashStore(), f"pair {next(_names)}"
    made = on_both(lambda rank: TcpProcessGroup(store, rank, 2, timedelta(seconds=10 * DEADLINE_S), name))
    assert all(isinstance(group, TcpProcessGroup) for group in made), made
    return made


def summed(groups: list[TcpProcessGroup], numel: int = 4) -> list[Any]:
    def call(rank: int) -> list[float]:
        tensor = torch.full((numel,), float(rank + 1))
        groups[rank].allreduce([tensor]).wait()
        return tensor[:2].tolist()

    return on_both(call)


@pytest.fixture
def two_groups() -> Iterator[tuple[list[TcpProcessGroup], list[TcpProcessGroup]]]:
    groups = pair(), pair()
    yield groups
    for group in (*groups[0], *groups[1]):
        group.abort()


Pairs = tuple[list[TcpProcessGroup], list[TcpProcessGroup]]


def test_a_group_that_ends_with_a_receive_nobody_sent_to_leaves_others_alone(two_groups: Pairs) -> None:
    ended, other = two_groups
    work = ended[0].recv([torch.zeros(4)], 1, 0)
    for group in ended:
        group.abort()
    assert summed(other) == [[3.0, 3.0]] * 2
    with pytest.raises(SyncError):
        work.wait()


FAULTS = [AttributeError("x"), MemoryError(), UnicodeError("x")]
HANDLED = [
    (TcpInbox, "advance"),
    (TcpInbox, "target"),
    (ByteStream, "read"),
    (ByteStream, "write"),
    (ByteStream, "acknowledge_soon"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize(("kind", "method"), HANDLED, ids=[method for _, method in HANDLED])
def test_an_exception_while_a_connection_is_served_ends_its_group_only(
    monkeypatch: pytest.MonkeyPatch, kind: type, method: str, fault: Exception
) -> None:
    made: list[Any] = []
    begin = kind.__init__  # type: ignore[misc]

    def noted(self: Any, *arguments: Any) -> None:
        made.append(self)
        begin(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(kind, "__init__", noted)
        faulty = pair()
    other = pair()
    raised = threading.Event()
    original = getattr(kind, method)

    def once(self: Any, *arguments: Any) -> Any:
        if self in made and not raised.is_set():
            raised.set()
            raise fault
        return original(self, *arguments)

    monkeypatch.setattr(kind, method, once)
    for result in summed(faulty, 300_000):
        assert isinstance(result, Exception) or result == [3.0, 3.0]
    assert raised.wait(DEADLINE_S)
    assert summed(other) == [[3.0, 3.0]] * 2
    for group in (*faulty, *other):
        group.abort()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_an_exception_while_an_unauthenticated_peer_is_served_turns_it_away(
    two_groups: Pairs, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    original, raised = TlsHandshake.message, threading.Event()

    def once(self: TlsHandshake, size: int) -> bytes | None:
        if not raised.is_set():
            raised.set()
            raise fault
        return original(self, size)

    monkeypatch.setattr(TlsHandshake, "message", once)
    third = pair()
    for result in summed(third):  # its first attempt to connect fails, on one side or the other
        assert isinstance(result, Exception) or result == [3.0, 3.0]
    assert raised.is_set()
    assert summed(two_groups[0]) == [[3.0, 3.0]] * 2
    for group in third:
        group.abort()


class Meshes:
    """Two ranks' links, in this process."""

    def __enter__(self) -> list[LinkMesh]:
        self.loop, store = TcpProgress.acquire(), HashStore()
        self.made: list[LinkMesh] = on_both(lambda rank: LinkMesh(self.loop, store, rank, 2, DEADLINE_S))
        return self.made

    def __exit__(self, *_: object) -> None:
        on_both(lambda rank: self.made[rank].close(0.0))
        TcpProgress.release()

    def wait_until(self, is_over: Callable[[], bool]) -> None:
        self.loop.drive(is_over)


class Late:
    """A handshake that arrives after the rank that began it has given it up."""

    def __init__(self) -> None:
        self.closed, self.connection = False, self

    def close(self) -> None:
        self.closed = True

    def send(self, _: bytes) -> None:
        raise AssertionError("answered an abandoned connection")


def test_a_greeting_of_a_connection_given_up_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    greetings: list[tuple[PeerLink, Any]] = []
    accept = PeerLink.accept

    def noting(self: PeerLink, handshake: Any, hello: Any) -> None:
        greetings.append((self, hello))
        accept(self, handshake, hello)

    monkeypatch.setattr(PeerLink, "accept", noting)
    group = pair()
    summed(group, 100_000)
    link, first = greetings[0]  # sent before anything was received
    late, loop = Late(), TcpProgress.acquire()
    loop.drive(lambda: link.stream.acknowledged > 0)
    with loop.lock:
        link.accept(late, first)  # type: ignore[arg-type]
    TcpProgress.release()
    assert late.closed
    assert summed(group) == [[3.0, 3.0]] * 2
    for one in group:
        one.abort()


@settings(max_examples=6, deadline=None)
@given(st.text(min_size=1, max_size=8), st.integers(1, 5000))
def test_a_failures_text_of_any_characters_arrives(word: str, times: int) -> None:
    meshes = Meshes()
    with meshes as (first, second):
        with first.loop.lock:
            first.fail(SyncError("test.planted", "{text}", text=word * times))
        meshes.wait_until(lambda: second.error is not None)
        said = str(second.error)
    assert (word * times).encode(errors="replace").decode().startswith(said)


def test_the_deadline_of_an_operation_begins_when_those_before_it_are_done() -> None:
    def steps() -> Steps:
        yield

    queue = OperationQueue()
    queue.operations += [Operation("first", steps(), 1.0, list), Operation("second", steps(), 1.0, list)]
    first, second = queue.operations
    queue.advance()
    assert math.isfinite(first.started)
    assert math.isinf(second.started)
    queue.advance()
    assert first.done
    assert math.isfinite(second.started)
