"""The listener: its own come in whatever unauthenticated peers do, and these leave no trace but a number."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from channel_ends import DEADLINE_S, Blob, Messages, Note, listening, reached
from paceline.errors import ChannelError
from paceline.wire import listener as admission_module
from paceline.wire.connection import Connection, connect
from paceline.wire.key import RunKey
from paceline.wire.listener import MOST_UNPROVEN, Listener
from refusals import raises

LOOPBACK = ("127.0.0.1", 0)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition, with a deadline."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.005)


def closed_by_peer(link: socket.socket, said: bytes | None = None) -> bool:
    """Wait until the other end has closed; true if it said nothing else before, or alerts of TLS."""
    heard = b""
    link.settimeout(DEADLINE_S)
    try:
        while data := link.recv(2**12):
            heard += data
    except TimeoutError:
        return False
    except OSError:  # an alert that TLS reads, or a reset
        pass
    return said is None or heard == said


def echo(connection: Connection, message: Note | Blob) -> None:
    connection.post(message)


def test_a_listener_serves_many_connections_in_its_own_thread() -> None:
    key = RunKey.make()
    ended: list[Connection] = []
    served = Listener(LOOPBACK, key, Messages, lambda _: None, on_message=echo, on_close=ended.append)
    connections = [connect(reached(served), key, Messages, deadline_s=DEADLINE_S) for _ in range(20)]
    for connection in connections:
        connection.send(Blob(bytes(2**18)))
    for number, connection in enumerate(connections):
        connection.send(Note("second", number))
    for number, connection in enumerate(connections):
        assert connection.receive(DEADLINE_S) == Blob(bytes(2**18))
        assert connection.receive(DEADLINE_S) == Note("second", number)
    for connection in connections[:10]:
        connection.close()
    until(lambda: len(ended) == 10, "the ends of ten connections")
    served.close()
    for connection in connections[10:]:
        with pytest.raises(ChannelError):
            connection.receive(DEADLINE_S)
        connection.close()
    assert served.unauthenticated == 0


def test_a_wrong_key_comes_in_nowhere_and_is_told_at_once() -> None:
    with listening(LOOPBACK, RunKey.make()) as (listener, arrived):
        with raises(ChannelError, "channel.key_differs"):
            connect(reached(listener), RunKey.make(), Messages, deadline_s=DEADLINE_S)
        until(lambda: listener.unauthenticated == 1, "the unauthenticated peer")
        assert arrived.empty()


def trusting(context: ssl.SSLContext) -> ssl.SSLContext:
    """A client that looks at no certificate, so that only the listener can refuse."""
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def old() -> ssl.SSLContext:
    context = trusting(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


@pytest.mark.parametrize(
    "intruder",
    [
        pytest.param(trusting(RunKey.make().client_context()), id="another key"),
        pytest.param(trusting(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)), id="no key"),
        pytest.param(old(), id="TLS 1.2"),
        pytest.param(b"GET / HTTP/1.0\r\n\r\n", id="HTTP"),
        pytest.param(b"\0\0\0\1x" * 10, id="a frame"),
        pytest.param(b"\x16\x03\x01\xff\xff" + b"\0" * 600, id="a long record"),
    ],
)
def test_who_does_not_show_the_key_is_turned_away_and_told_nothing(intruder: ssl.SSLContext | bytes) -> None:
    with listening(LOOPBACK, RunKey.make()) as (listener, arrived):
        link = socket.create_connection(reached(listener))  # type: ignore[arg-type]
        if isinstance(intruder, bytes):
            link.sendall(intruder)
            assert closed_by_peer(link)
        else:
            with suppress(OSError):
                link = intruder.wrap_socket(link)
                assert closed_by_peer(link, said=b"")
        link.close()
        until(lambda: listener.unauthenticated == 1, "the unauthenticated peer")
        assert arrived.empty()


def test_the_recorded_bytes_of_a_connection_open_no_other_one() -> None:
    key, recorded = RunKey.make(), bytearray()
    with listening(LOOPBACK, key) as (listener, arrived), socket.create_server(LOOPBACK) as middle:
        there = socket.create_connection(reached(listener))  # type: ignore[arg-type]

        def relay() -> None:
            link, _ = middle.accept()
            back = threading.Thread(target=pump, args=(there, link, None))
            back.start()
            pump(link, there, recorded)
            back.join()
            link.close()

        relaying = threading.Thread(target=relay)
        relaying.start()
        own = connect(middle.getsockname(), key, Messages, deadline_s=DEADLINE_S)
        own.send(Note("once"))
        accepted = arrived.get(timeout=DEADLINE_S)
        assert accepted.receive(DEADLINE_S) == Note("once")
        own.close()
        accepted.close()
        relaying.join()
        there.close()
        with socket.create_connection(reached(listener)) as replayed:  # type: ignore[arg-type]
            replayed.sendall(recorded)
            assert closed_by_peer(replayed)
        assert listener.unauthenticated == 1
        assert arrived.empty()


def pump(source: socket.socket, target: socket.socket, record: bytearray | None) -> None:
    """Pass bytes on until one end is over."""
    try:
        while data := source.recv(2**14):
            if record is not None:
                record += data
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def test_a_connection_reflected_to_its_own_sender_is_refused() -> None:
    """The bytes that a client sends come back to it, as if from a server."""
    with socket.create_server(LOOPBACK) as mirror:
        ended = threading.Event()

        def reflect() -> None:
            mirror.settimeout(0.05)
            while not ended.is_set():
                try:
                    link, _ = mirror.accept()
                except TimeoutError:
                    continue
                with link:
                    pump(link, link, None)

        reflecting = threading.Thread(target=reflect)
        reflecting.start()
        with raises(ChannelError, "channel.connect_deadline"):
            connect(mirror.getsockname(), RunKey.make(), Messages, deadline_s=0.5)
        ended.set()
        reflecting.join()


def test_slow_handshakes_hold_nobody_up_and_end_at_their_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "HANDSHAKE_S", 0.5)
    key = RunKey.make()
    with listening(LOOPBACK, key) as (listener, arrived):
        unauthenticated = [socket.create_connection(reached(listener)) for _ in range(10)]  # type: ignore[arg-type]
        for intruder in unauthenticated[5:]:
            intruder.sendall(b"\x16\x03\x01")  # the beginning of a handshake
        own = connect(reached(listener), key, Messages, deadline_s=DEADLINE_S)
        arrived.get(timeout=DEADLINE_S).send(Note("welcome"))
        assert own.receive(DEADLINE_S) == Note("welcome")
        for intruder in unauthenticated:
            assert closed_by_peer(intruder)
            intruder.close()
        assert listener.unauthenticated == 10
        own.close()


def test_its_own_come_in_while_unauthenticated_peers_flood_it() -> None:
    key = RunKey.make()
    with listening(LOOPBACK, key) as (listener, arrived):
        ended, made = threading.Event(), []

        def flood() -> None:
            while not ended.is_set():
                made.append(socket.create_connection(reached(listener)))  # type: ignore[arg-type]
                if len(made) % 3 == 0:
                    made[-1].sendall(b"\x16\x03\x01\x02\x00" + bytes(100))

        flooding = threading.Thread(target=flood)
        flooding.start()
        until(lambda: len(made) > 2 * MOST_UNPROVEN, "a flood")
        for number in range(5):
            own = connect(reached(listener), key, Messages, deadline_s=DEADLINE_S)
            accepted = arrived.get(timeout=DEADLINE_S)
            accepted.send(Note("welcome", number))
            assert own.receive(DEADLINE_S) == Note("welcome", number)
            own.close()
            assert len(listener.admission.pending) <= MOST_UNPROVEN
        ended.set()
        flooding.join()
        for link in made:
            link.close()
        assert listener.unauthenticated > MOST_UNPROVEN


def test_the_first_unauthenticated_peer_is_told_and_the_others_are_counted(capfd: pytest.CaptureFixture[str]) -> None:
    with listening(LOOPBACK, RunKey.make()) as (listener, _):
        for _ in range(3):
            with socket.create_connection(reached(listener)) as intruder:  # type: ignore[arg-type]
                intruder.sendall(b"hello, who are you?")
                assert closed_by_peer(intruder)
        assert listener.unauthenticated == 3
    shown = capfd.readouterr().err
    assert shown.count("does not belong to this run and was turned away") == 1


def test_a_unix_socket_is_made_in_a_private_folder_only_and_goes_with_its_listener(tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 100)  # longer than the kernel takes
    folder.mkdir(mode=0o755)
    with raises(ChannelError, "channel.folder_open"):
        Listener(folder / "socket", None, Messages, lambda _: None)
    folder.chmod(0o700)
    with listening(folder / "socket", None) as (listener, _):
        connect(reached(listener), None, Messages, deadline_s=DEADLINE_S).close()
        with raises(ChannelError, "channel.cannot_listen"):
            Listener(folder / "socket", None, Messages, lambda _: None)
    assert not list(folder.iterdir())


@pytest.mark.needs_root
def test_another_users_process_gets_nothing_out_of_a_unix_socket(tmp_path: Path) -> None:
    """It has the descriptor of the folder, which is worse than it can ever be."""
    tmp_path.chmod(0o700)
    with listening(tmp_path / "socket", None) as (listener, arrived):
        script = (
            "import os, socket, sys\n"
            "os.fchdir(int(sys.argv[1])); os.setgid(65534); os.setuid(65534)\n"
            "link = socket.socket(socket.AF_UNIX)\n"
            "try: link.connect('socket')\n"
            "except PermissionError: print('no way in'); sys.exit()\n"
            "print('got', link.recv(100))\n"
        )
        for mode, said in ((0o700, "no way in"), (0o777, "got b''")):
            (tmp_path / "socket").chmod(0o777)
            tmp_path.chmod(mode)
            folder = os.open(tmp_path, os.O_RDONLY)
            shown = subprocess.run(
                [sys.executable, "-c", script, str(folder)],
                pass_fds=[folder],
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            ).stdout
            os.close(folder)
            assert shown.strip() == said
        assert listener.unauthenticated == 1
        assert arrived.empty()
        connect(reached(listener), None, Messages, deadline_s=DEADLINE_S).close()


@pytest.mark.needs_root
def test_a_unix_socket_that_another_user_serves_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    script = (
        "import os, socket, sys\n"
        "os.fchdir(int(sys.argv[1])); os.setgid(65534); os.setuid(65534)\n"
        "server = socket.socket(socket.AF_UNIX); server.bind('socket'); server.listen()\n"
        "print('ready', flush=True)\n"
        "link, _ = server.accept()\n"
        "try: link.sendall(b'pace'); print(link.recv(100))\n"
        "except OSError: print(b'')\n"
    )
    folder = os.open(tmp_path, os.O_RDONLY)
    with subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], pass_fds=[folder], stdout=subprocess.PIPE, text=True
    ) as process:
        os.close(folder)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with raises(ChannelError, "channel.socket_of_other_user"):
            connect(tmp_path / "socket", None, Messages, deadline_s=DEADLINE_S)
        assert process.stdout.read().strip() == "b''"
