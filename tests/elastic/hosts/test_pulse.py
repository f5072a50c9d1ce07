"""A host that says nothing for too long is told, once, and one that is only busy is not."""

from __future__ import annotations

import os
import queue
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from msgspec import Struct

from commands import events, paceline, write_job
from paceline.elastic.hosts.link import SILENCE, Beat, Pulse, Pulses, rounds_of, silence_limit_s
from paceline.errors import LaunchError
from paceline.wire.connection import Connection
from paceline.wire.key import RunKey
from paceline.wire.listener import Listener
from paceline.wire.silence import is_heard

KEY, LIMIT_S, DEADLINE_S = RunKey.make(), 0.4, 30.0


@pytest.fixture(autouse=True)
def _short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SILENCE, str(LIMIT_S))


def test_a_host_that_beats_no_more_is_told_with_its_number() -> None:
    beats, silent = queue.Queue[Beat](), queue.Queue[int]()

    def listener(messages: type[Struct], take: Callable[[Connection, Beat], None]) -> Listener:
        def note(connection: Connection, beat: Beat) -> None:
            take(connection, beat)
            beats.put(beat)

        return Listener(("127.0.0.1", 0), KEY, messages, lambda _: None, on_message=note)

    with closing(Pulses(listener, lambda host, _: silent.put(host))) as pulses:
        pulse = Pulse(("127.0.0.1", pulses.port), KEY, 8, LIMIT_S, lambda _: None)
        assert beats.get(timeout=DEADLINE_S) == Beat(8)
        pulse.close()
        assert silent.get(timeout=DEADLINE_S) == 8


def test_a_coordinator_that_answers_no_more_is_told_to_the_host() -> None:
    silent: queue.Queue[float] = queue.Queue()
    answers = [Beat(0)]
    listener = Listener(
        ("127.0.0.1", 0),
        KEY,
        Beat,
        lambda _: None,
        on_message=lambda peer, _: peer.post(answers.pop()) if answers else None,
    )
    assert isinstance(listener.address, tuple)
    pulse = Pulse(listener.address, KEY, 1, LIMIT_S, silent.put)
    assert silent.get(timeout=DEADLINE_S) == pytest.approx(LIMIT_S, rel=1)
    assert not answers
    pulse.close()
    listener.close()


def test_what_comes_on_another_connection_is_heard_of_the_same_host() -> None:
    own = f"127.{os.getpid() >> 8 & 255}.{os.getpid() & 255}.9"  # an address that no other process uses now
    with socket.create_server((own, 0)) as listener, ExitStack() as held:

        def connected() -> tuple[socket.socket, socket.socket]:
            near = held.enter_context(socket.create_connection(listener.getsockname()))
            return near, held.enter_context(listener.accept()[0])

        (pulse, _), (_, far) = connected(), connected()
        time.sleep(0.3)
        assert not is_heard(pulse, 0.2)
        far.send(b"gradients")
        assert is_heard(pulse, 0.2)


def test_of_a_connection_that_was_reset_nothing_is_heard() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as near:
        far, _ = listener.accept()
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        far.close()
        with pytest.raises(ConnectionResetError):
            near.recv(1)
        assert not is_heard(near, 0.0)


@pytest.mark.needs_root
@pytest.mark.needs_iproute2
def test_a_link_that_is_full_is_not_one_that_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SILENCE)
    # the speed of the link is measured with messages that its queue holds up for half a second
    model = {"zoo": "mlp", "args": {"hidden": 16}}
    job = write_job(tmp_path / "job.yaml", model=model, stop={"steps": 12})
    (tmp_path / "cluster.yaml").write_text("emulate: {hosts: 2, rate: 4mbit}\n")
    arguments = ("train", job, "--cluster", "cluster.yaml", "--plan", "dp=2", "--run", "run")
    shown = paceline(*arguments, folder=tmp_path)
    assert shown.code == 0, shown.err
    assert not events(tmp_path / "run", "host_lost")
    assert not events(tmp_path / "run", "lost")


@pytest.mark.parametrize("text", ["soon", "0", "nan", "1e9"])
def test_a_limit_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SILENCE, text)
    with pytest.raises(LaunchError, match=SILENCE):
        silence_limit_s()


def test_many_hosts_beat_more_rarely_and_few_often() -> None:
    assert [rounds_of(hosts) for hosts in (1, 4, 16, 32, 64, 1000)] == [32, 32, 32, 16, 8, 8]
