"""Attacks on the connections between ranks: nothing is read, nothing is changed, and results are exact.

A proxy between the two ranks is the man in the middle; others come to the port by themselves.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from between import HANDSHAKE_BYTES, Change, group_through
from paceline.comm.tcp import TcpProcessGroup
from paceline.comm.tcp.link import GREETING_BYTES, Greeting
from paceline.errors import SyncError
from paceline.wire.key import RunKey
from paceline.wire.listener import TlsHandshake
from ranks import RankError, Ranks

ROUNDS, NUMEL = 6, 300_000
TELLING = b"nobody is to read this" * 100


def passing(number: int, outward: bool, at: int, data: bytes) -> bytes:
    return data


def exact(group: TcpProcessGroup) -> bool:
    """All-reduces whose sums are known."""
    for i in range(ROUNDS):
        tensor = torch.full((NUMEL,), float(10**i * (1 + group.rank())))
        dist.all_reduce(tensor, group=group)
        if not (tensor == 3.0 * 10**i).all():
            return False
    return True


def attacked(change: Change) -> tuple[bool, int]:
    """Whether results are exact with that man in the middle, and how many connections it took."""
    with group_through(change) as (group, _):
        is_exact = exact(group)
        dist.barrier()
        return is_exact, next(iter(group.mesh.links.values())).connections


def tampering(number: int, outward: bool, at: int, data: bytes) -> bytes:
    """Change one bit in each of the first connections, in one direction or the other."""
    if number < 3 and outward == bool(number % 2) and at <= 50_000 < at + len(data):
        changed = bytearray(data)
        changed[50_000 - at] ^= 16
        return bytes(changed)
    return data


def shortening(number: int, outward: bool, at: int, data: bytes) -> bytes:
    """Leave bytes out, and repeat others."""
    if number == 0 and at > HANDSHAKE_BYTES:
        return data[7:]
    if number == 1 and at > HANDSHAKE_BYTES:
        return data + data
    return data


def without_tls_1_3(number: int, outward: bool, at: int, data: bytes) -> bytes:
    """Have the first connections offer TLS 1.2 only."""
    return data.replace(b"\x00\x2b\x00\x03\x02\x03\x04", b"\x00\x2b\x00\x03\x02\x03\x03") if number < 3 else data


def in_the_handshake(number: int, outward: bool, at: int, data: bytes) -> bytes:
    """Change a bit of the handshake, at a place of its own in every connection."""
    place = 150 * number
    if number < 8 and at <= place < at + len(data):
        return data[: place - at] + bytes([data[place - at] ^ 1]) + data[place - at + 1 :]
    return data


@pytest.mark.parametrize("change", [tampering, shortening, without_tls_1_3, in_the_handshake])
def test_what_is_changed_on_the_way_costs_a_connection_and_no_bit(ranks: Ranks, change: Change) -> None:
    for is_exact, connections in ranks(2, attacked, change, backend="tcp"):
        assert is_exact
        assert connections >= (1 if change in (without_tls_1_3, in_the_handshake) else 2)


def reflected() -> bool:
    """In the first connection, rank 1 gets its own records back instead of rank 0's."""
    own: list[bytes] = []

    def reflect(number: int, outward: bool, at: int, data: bytes) -> bytes:
        if number or at < HANDSHAKE_BYTES:
            return data
        if outward:
            own.append(data)
            return data
        return own.pop(0) if own else b""

    return attacked(reflect)[0]


def test_own_records_that_come_back_are_not_taken_for_the_others(ranks: Ranks) -> None:
    assert ranks(2, reflected, backend="tcp") == [True, True]


def always(number: int, outward: bool, at: int, data: bytes) -> bytes:
    return data if at < HANDSHAKE_BYTES else data[:-1] + bytes([data[-1] ^ 1])


def never_left_alone(folder: Path) -> None:
    with group_through(always) as (group, _):
        try:
            exact(group)
        except SyncError as error:
            (folder / f"error-{group.rank()}").write_text(str(error))


def test_bytes_that_are_always_changed_end_the_group_with_a_word_about_it(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, never_left_alone, tmp_path, backend="tcp")
    errors = [file.read_text() for file in tmp_path.iterdir()]
    assert any("the bytes of 5 connections in a row were altered in transit" in e for e in errors), errors
    assert all("rank 0" in error and "rank 1" in error for error in errors)


def replayed() -> tuple[bool, bool, int]:
    """All bytes of a connection, said again to rank 0 and, by another port, to rank 1."""
    with group_through(passing) as (group, proxy):
        is_exact, answers = exact(group), b""
        admission = group.mesh.admission
        if proxy is not None:
            before = bytes(proxy.seen[0][True])
            with socket.create_connection(proxy.target, 10) as again:
                try:
                    again.sendall(before)
                    while data := again.recv(2**16):
                        answers += data
                except OSError:
                    pass
        dist.barrier()
        is_exact &= exact(group)
        dist.barrier()
        return is_exact, TELLING in answers, admission.unauthenticated


def test_a_recorded_connection_that_is_played_again_is_an_unauthenticated_peers(ranks: Ranks) -> None:
    results = ranks(2, replayed, backend="tcp")
    assert results == [(True, False, 1), (True, False, 0)]


def said_in_clear() -> tuple[bool, bool]:
    """Whether results are exact, and whether the proxy has read them."""
    with group_through(passing) as (group, proxy):
        message = torch.frombuffer(bytearray(TELLING * 50), dtype=torch.uint8)
        place = torch.empty_like(message)
        if group.rank() == 0:
            dist.send(message, 1, group=group)
        else:
            dist.recv(place, 0, group=group)
        is_exact = group.rank() == 0 or torch.equal(place, message)
        dist.barrier()
        return is_exact, proxy is not None and TELLING in bytes(proxy.seen[0][False])


@pytest.mark.parametrize("encrypt", ["on", "off"])
def test_nobody_on_the_way_reads_unless_encryption_is_off(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, encrypt: str
) -> None:
    monkeypatch.setenv("PACELINE_ENCRYPT", encrypt)
    assert ranks(2, said_in_clear, backend="tcp") == [(True, False), (True, encrypt == "off")]


def differently_set() -> str:
    os.environ["PACELINE_ENCRYPT"] = "on" if dist.get_rank() else "off"
    with pytest.raises(SyncError) as caught, group_through(passing) as (group, _):
        exact(group)
    return str(caught.value)


def test_ranks_of_which_one_does_not_encrypt_are_both_named(ranks: Ranks) -> None:
    for error in ranks(2, differently_set, backend="tcp"):
        assert "rank 0 (host" in error
        assert "rank 1 (host" in error
        assert "encrypts" in error
        assert "has encrypt=off" in error


def test_an_unknown_word_about_encryption_is_refused(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_ENCRYPT", "perhaps")
    with pytest.raises(RankError, match="PACELINE_ENCRYPT=perhaps is neither on nor off"):
        ranks(2, differently_keyed, [], backend="tcp")


def differently_keyed(files: list[Path]) -> None:
    if files:
        os.environ["PACELINE_KEY_FILE"] = str(files[dist.get_rank()])
    dist.barrier(dist.new_group(backend="tcp"))


def test_ranks_that_were_given_different_keys_are_told(ranks: Ranks, tmp_path: Path) -> None:
    files = [tmp_path / "0", tmp_path / "1"]
    for file in files:
        file.touch(0o600)
        file.write_bytes(RunKey.make().to_pem())
    with pytest.raises(RankError, match=r"rank 0 has the run's key [0-9a-f]+, and rank 1 has the run's key [0-9a-f]+"):
        ranks(2, differently_keyed, files, backend="tcp")


# Who comes to the port by himself


def answer_to(context: ssl.SSLContext, where: tuple[str, int], greeting: Greeting) -> bytes:
    """What a rank's listener says inside TLS to who shows that key and says that; nothing where it hangs up."""
    handshake = TlsHandshake(socket.create_connection(where, 20), context, accepts=False, opening=greeting.to_bytes())
    try:
        while (answer := handshake.message(GREETING_BYTES)) is None:
            pass
    except OSError:
        return b""
    finally:
        handshake.link.close()
    return answer


def told_to_others() -> list[int]:
    """Lengths of the answers to a key of its own, to TLS 1.2, and to ranks at the wrong door."""
    group = dist.group.WORLD
    assert isinstance(group, TcpProcessGroup)
    link = next(iter(group.mesh.links.values()))
    where = link.peer.address, link.peer.port
    honest = Greeting(link.member.group, link.own.rank, link.peer.rank, True, True, 0, 0)
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode, old.maximum_version = False, ssl.CERT_NONE, ssl.TLSVersion.TLSv1_2
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
    found = [
        len(answer_to(context, where, greeting))
        for context, greeting in (
            (RunKey.make().client_context(), honest),
            (old, honest),
            (nobody, honest),
            (link.member.key.client_context(), replace(honest, group=bytes(16), reconnect=False)),
            (link.member.key.client_context(), replace(honest, receiver=7, reconnect=False)),
            (link.member.key.client_context(), replace(honest, sender=link.peer.rank, reconnect=False)),
            (link.member.key.client_context(), replace(honest, group=bytes(16))),
        )
    ]
    dist.barrier()
    return found


def test_only_a_rank_of_the_group_that_holds_the_key_gets_an_answer(ranks: Ranks) -> None:
    for lengths in ranks(2, told_to_others, backend="tcp"):
        assert lengths == [0] * 7


def at_a_dead_ranks_port() -> tuple[bool, str, bytes]:
    """An intruder listens where rank 0 did: what rank 1's link says of it, and what the intruder was told."""
    with group_through(passing) as (group, _):
        is_exact, error, told = exact(group), "", b""
        dist.barrier()
        if group.rank() == 1:
            error, told = intruder_instead(group)
        dist.barrier()
        return is_exact and exact(group), error, told


def intruder_instead(group: TcpProcessGroup) -> tuple[str, bytes]:
    link, told, until = group.mesh.links[0], b"", time.monotonic() + 30
    context = RunKey.make().server_context()
    context.verify_mode = ssl.CERT_NONE
    real, state = link.peer, ""
    with socket.create_server(("127.0.0.1", 0)) as intruder:
        with group.mesh.loop.lock:
            link.peer = replace(real, port=intruder.getsockname()[1])
            link.lose(ConnectionError("as a test wants it"))
        intruder.settimeout(1)
        while "run's key" not in state and time.monotonic() < until:
            with suppress(OSError):
                handshake = TlsHandshake(intruder.accept()[0], context, accepts=True)
                handshake.link.settimeout(20)
                try:
                    told += handshake.message(GREETING_BYTES) or b""
                finally:
                    handshake.link.close()
            time.sleep(0.02)  # for the link to see that
            with group.mesh.loop.lock:
                state = link.state()
        with group.mesh.loop.lock:
            link.peer = real
    return state, told


def test_an_unauthenticated_peer_at_the_port_of_a_dead_rank_learns_nothing(ranks: Ranks) -> None:
    (first, _, _), (second, error, told) = ranks(2, at_a_dead_ranks_port, backend="tcp")
    assert first
    assert second
    assert "does not show this run's key" in error
    assert told == b""
