"""Key of a run, which both ends of a connection must have.

The key is a private key with a certificate. There is no certificate authority, and host names are not checked. A peer
belongs to the run if it proves in a TLS 1.3 handshake that it has the private key of this certificate. The program that
starts the run makes the key. It passes the key on through an inherited descriptor, a file that only its user can read,
or a secret of the launch engine.
"""

from __future__ import annotations

import datetime
import fcntl
import os
import socket
import ssl
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from paceline.errors import LaunchError
from paceline.files import create_private, home_folder, user_name
from paceline.rank_environment import KEY_FD, KEY_FILE

_SUBJECT = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "paceline run")])
# The clocks of hosts may differ by any amount, so the certificate is valid at any date.
_BEGIN, _END = (datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for year in (2000, 9999))
_PEM_LIMIT = 2**14  # largest size of a key file
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class RunKey:
    """EC P-256 key with a self-signed certificate."""

    def __init__(self, private: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._private, self._certificate = private, certificate

    @classmethod
    def make(cls) -> RunKey:
        """Make a new key for one run."""
        private = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_SUBJECT)
            .issuer_name(_SUBJECT)
            .public_key(private.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(_BEGIN)
            .not_valid_after(_END)
            .sign(private, hashes.SHA256())
        )
        return cls(private, certificate)

    @classmethod
    def from_pem(cls, pem: bytes) -> RunKey:
        """Parse the text of a key from `to_pem`.

        Raises:
            LaunchError: the text is not a key of paceline.
        """
        try:
            private = serialization.load_pem_private_key(pem, None)
            certificate = x509.load_pem_x509_certificate(pem)
        except (ValueError, TypeError):
            raise _no_key() from None  # the error's reason could reveal a part of the key
        ours = isinstance(private, ec.EllipticCurvePrivateKey) and isinstance(private.curve, ec.SECP256R1)
        if not ours or certificate.subject != _SUBJECT or certificate.public_key() != private.public_key():
            raise _no_key()
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        return cls(private, certificate)

    def to_pem(self) -> bytes:
        """Return the private key and the certificate as text.

        The text is secret, and must not appear on a command line, in a log or in a store.
        """
        return (
            self._private.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            + self._certificate_pem
        )

    @property
    def fingerprint(self) -> str:
        """First 16 hexadecimal digits of the certificate's SHA-256 digest, which are not secret."""
        return self._certificate.fingerprint(hashes.SHA256()).hex()[:16]

    @cached_property
    def certificate_der(self) -> bytes:
        """Certificate in DER format, to compare with the certificate of a peer. It is not secret."""
        return self._certificate.public_bytes(serialization.Encoding.DER)

    @cached_property
    def client_and_server(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """TLS contexts of the connecting and the accepting end, shared by all connections.

        Callers must not change the contexts.
        """
        return self.client_context(), self.server_context()

    def server_context(self) -> ssl.SSLContext:
        """Make the TLS 1.3 context of the accepting end. The connecting end must prove that it has this key."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # sessions cannot be resumed, so that every connection proves the key
        return context

    def client_context(self) -> ssl.SSLContext:
        """Make the TLS 1.3 context of the connecting end. The accepting end must prove that it has this key."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate identifies the run, not the host
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self._certificate_pem.decode())
        descriptor = key_descriptor(self)
        try:
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")  # the ssl module reads certificates only from files
        finally:
            os.close(descriptor)
        return context

    @cached_property
    def _certificate_pem(self) -> bytes:
        return self._certificate.public_bytes(serialization.Encoding.PEM)


def own_key() -> RunKey | None:
    """Return the key that was passed to this process.

    PACELINE_KEY_FD is the number of an inherited descriptor, and PACELINE_KEY_FILE is the path of a file. If neither is
    set, the result is None.

    Raises:
        LaunchError: the key cannot be read, is not a key of paceline, or can be read by other users.
    """
    if descriptor := os.environ.get(KEY_FD):
        try:
            return _parsed(os.pread(int(descriptor), _PEM_LIMIT, 0))
        except (OSError, ValueError) as error:
            raise LaunchError(
                "key.descriptor_invalid",
                "{variable}={descriptor} does not refer to a descriptor that contains the run's key: {error}",
                variable=KEY_FD,
                descriptor=descriptor,
                error=error,
            ) from error
    return read_key(Path(path)) if (path := os.environ.get(KEY_FILE)) else None


@lru_cache(maxsize=1)  # ranks read the key in every generation, and the cached key keeps its TLS contexts
def _parsed(pem: bytes) -> RunKey:
    return RunKey.from_pem(pem)


def default_key_file() -> Path:
    """Return the default path of this user's own key."""
    return home_folder() / "key"


def key_descriptor(key: RunKey) -> int:
    """Make a descriptor of sealed memory that contains the key, for child processes to inherit.

    The caller closes the descriptor.
    """
    descriptor = os.memfd_create("paceline-key", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(descriptor, key.to_pem())
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write_key(key: RunKey, path: Path) -> None:
    """Write a key to a new file that only this user can read.

    Raises:
        LaunchError: `path` already exists, or cannot be created.
    """
    try:
        with create_private(path) as file:
            file.write(key.to_pem())
    except OSError as error:
        raise LaunchError(
            "key.unwritable",
            "{path}: the run's key cannot be written: {reason}. Name a new file.",
            path=path,
            reason=error.strerror,
        ) from error


def read_key(path: Path) -> RunKey:
    """Read the key from a file that only this user can read.

    Raises:
        LaunchError: the file cannot be read, is not a key of paceline, or another user owns or can read the file.
    """
    try:
        # Symbolic links are followed, because Kubernetes secrets are links. The owner of the opened file is checked.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise LaunchError(
            "key.unreadable",
            "{path}: the run's key cannot be read: {reason}. {advice}",
            path=path,
            reason=error.strerror,
            advice=_MAKE,
        ) from error
    try:
        if problem := _not_private(os.fstat(descriptor)):
            raise LaunchError(
                "key.exposed",
                "{path}: {problem}. Others may know this key, so create a new key. {advice}",
                path=path,
                problem=problem,
                advice=_MAKE,
            )
        pem = os.read(descriptor, _PEM_LIMIT)
    finally:
        os.close(descriptor)
    try:
        return RunKey.from_pem(pem)
    except LaunchError as error:
        raise LaunchError("key.file_invalid", "{path}: {error}", path=path, error=error) from None


def _not_private(about: os.stat_result) -> str | None:
    """Return the reason why a file is not private to this user, or None."""
    if not stat.S_ISREG(about.st_mode):
        return "is not a regular file"
    if about.st_uid not in (os.geteuid(), 0):
        return f"belongs to {user_name(about.st_uid)}"
    if about.st_mode & 0o077 and not _is_a_pods_secret(about):
        return f"can be read by other users (mode {stat.S_IMODE(about.st_mode):04o} instead of 0600)"
    return None


def _is_a_pods_secret(about: os.stat_result) -> bool:
    """Return True if Kubernetes mounts the file as a Secret for a container's group (`fsGroup`).

    Such a file belongs to root and has mode 0440, because otherwise a container that does not run as root could not
    read it. Only containers of the pod see this file system, so no other users are members of the group. On a host,
    however, a group may have many users.
    """
    only_read_by_group = about.st_uid == 0 and about.st_mode & 0o037 == 0
    ours = about.st_gid in (os.getegid(), *os.getgroups())
    return _IN_A_POD in os.environ and only_read_by_group and ours


_IN_A_POD = "KUBERNETES_SERVICE_HOST"  # Kubernetes sets this variable in every container
_MAKE = "`paceline key` makes one, for every host a copy."


def _no_key() -> LaunchError:
    return LaunchError("key.invalid", "this is not the key of a paceline run. {advice}", advice=_MAKE)


_PEER = struct.Struct("3i")  # process, user and group, as in SO_PEERCRED


def has_key(link: socket.socket, key: RunKey) -> bool:
    """Return True if the other end has proved this key in the TLS handshake."""
    return isinstance(link, ssl.SSLSocket) and link.getpeercert(binary_form=True) == key.certificate_der


def user_of_peer(link: socket.socket) -> int:
    """Return the user id that the kernel reports for a Unix socket's other end."""
    _, user, _ = _PEER.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(user)


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Yield a short path for a Unix socket. The kernel accepts paths of at most 107 bytes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def name_of(where: tuple[str, int] | Path) -> str:
    """Format an address for messages."""
    return str(where) if isinstance(where, Path) else f"{where[0]}:{where[1]}"
