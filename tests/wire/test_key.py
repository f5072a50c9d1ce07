"""The run's key: one that both ends hold lets them in, and its file is nobody else's."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from paceline.cli import app
from paceline.errors import LaunchError
from paceline.rank_environment import KEY_FD, KEY_FILE
from paceline.wire.key import RunKey, default_key_file, key_descriptor, own_key, read_key, write_key
from refusals import raises


def shaken_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Both ends of a TLS connection through memory, once each has said all that it has to say."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_side=False),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
                end.read(1)
            except ssl.SSLWantReadError:
                continue
    return ends


def test_two_ends_with_one_key_meet_over_tls_1_3_and_prove_its_certificate() -> None:
    key = RunKey.make()
    for end in shaken_hands(RunKey.from_pem(key.to_pem()).client_context(), key.server_context()):
        assert end.version() == "TLSv1.3"
        assert end.getpeercert(binary_form=True) == key.certificate_der


def test_another_runs_key_opens_nothing_in_either_direction() -> None:
    ours, another = RunKey.make(), RunKey.make()
    assert ours.fingerprint != another.fingerprint
    trusting = another.client_context()  # looks at no certificate, so only the server can refuse
    trusting.verify_mode = ssl.CERT_NONE
    for client in (another.client_context(), trusting):
        with pytest.raises(ssl.SSLError):
            shaken_hands(client, ours.server_context())
    with pytest.raises(ssl.SSLError):
        shaken_hands(ours.client_context(), another.server_context())


def test_an_older_tls_is_refused() -> None:
    key = RunKey.make()
    older = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    older.check_hostname, older.verify_mode = False, ssl.CERT_NONE
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        shaken_hands(older, key.server_context())


def test_the_key_is_handed_over_by_file_or_by_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = RunKey.make()
    assert own_key() is None
    write_key(key, tmp_path / "key")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "key"))
    found = own_key()
    assert found is not None
    assert found.fingerprint == key.fingerprint
    descriptor = key_descriptor(another := RunKey.make())
    monkeypatch.setenv(KEY_FD, str(descriptor))
    found = own_key()
    assert found is not None
    assert found.fingerprint == another.fingerprint
    with pytest.raises(OSError):
        os.write(descriptor, b"changed")
    os.close(descriptor)
    with pytest.raises(LaunchError, match=KEY_FD):
        own_key()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o602, 0o660])
def test_a_key_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    write_key(RunKey.make(), path := tmp_path / "key")
    path.chmod(mode)
    with raises(LaunchError, "key.exposed"):
        read_key(path)


@pytest.mark.needs_root
def test_a_key_of_another_user_is_refused(tmp_path: Path) -> None:
    write_key(RunKey.make(), path := tmp_path / "key")
    os.chown(path, 65534, 65534)
    with raises(LaunchError, "key.exposed"):
        read_key(path)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A key as Kubernetes mounts a Secret under `fsGroup: 4242`: behind links, and root's with mode 0440."""
    (tmp_path / "..2026").mkdir()
    write_key(RunKey.make(), tmp_path / "..2026" / "key.pem")
    os.chown(tmp_path / "..2026" / "key.pem", 0, 4242)
    (tmp_path / "..2026" / "key.pem").chmod(0o440)
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "key.pem").symlink_to("..data/key.pem")
    tmp_path.chmod(0o755)
    return tmp_path / "key.pem"


@pytest.mark.needs_root
def test_a_secret_that_a_pod_mounts_for_its_group_is_read_there_and_nowhere_else(
    secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [*os.getgroups(), 4242]
    monkeypatch.setattr(os, "getgroups", lambda: groups)
    with raises(LaunchError, "key.exposed"):
        read_key(secret)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    read_key(secret)
    groups.remove(4242)
    with raises(LaunchError, "key.exposed"):
        read_key(secret)


@pytest.mark.needs_root
@pytest.mark.parametrize(("owner", "mode"), [(0, 0o460), (0, 0o444), (0, 0o450), (65534, 0o440)])
def test_in_a_pod_nobody_else_may_write_or_read_a_key_and_root_owns_it(
    secret: Path, owner: int, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(os, "getgroups", lambda: [4242])
    os.chown(secret, owner, 4242)
    secret.chmod(mode)
    with raises(LaunchError, "key.exposed"):
        read_key(secret)


def test_a_key_file_is_never_written_over_or_through_a_link(tmp_path: Path) -> None:
    write_key(key := RunKey.make(), path := tmp_path / "key")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for taken in (path, tmp_path / "link", tmp_path / "no folder" / "key"):
        with raises(LaunchError, "key.unwritable"):
            write_key(RunKey.make(), taken)
    assert read_key(path).fingerprint == key.fingerprint
    assert not (tmp_path / "elsewhere").exists()


def test_a_key_that_is_given_no_name_is_made_where_hosts_look_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    app(["key"], standalone_mode=False)
    assert read_key(default_key_file()).fingerprint in capsys.readouterr().out
    assert default_key_file() == tmp_path / "home" / "key"
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700
    with raises(LaunchError, "key.unwritable"):
        app(["key"], standalone_mode=False)


def test_what_is_no_key_of_ours_is_refused_without_showing_it(tmp_path: Path) -> None:
    encoding = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _, certificate = RunKey.make().to_pem().split(b"-----END PRIVATE KEY-----\n")
    strange = [
        b"",
        b"secret words",
        RunKey.make().to_pem()[:-100],
        ed25519.Ed25519PrivateKey.generate().private_bytes(*encoding) + certificate,
        ec.generate_private_key(ec.SECP256R1()).private_bytes(*encoding) + certificate,
        ec.generate_private_key(ec.SECP384R1()).private_bytes(*encoding) + certificate,
    ]
    path = tmp_path / "key"
    path.touch(mode=0o600)
    for pem in strange:
        path.write_bytes(pem)
        with raises(LaunchError, "key.file_invalid") as failure:
            read_key(path)
        assert "secret" not in str(failure.value)
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(LaunchError, match="paceline key"):
            read_key(path)


def test_the_command_makes_a_key_and_shows_its_fingerprint_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app(["key", str(path := tmp_path / "run.key")], standalone_mode=False)
    shown = capsys.readouterr().out.replace("\n", "")
    assert read_key(path).fingerprint in shown
    assert "PRIVATE" not in shown
