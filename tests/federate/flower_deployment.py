"""A SuperLink and SuperNodes of Flower as processes on this machine, which speak by TLS."""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

BIN = Path(__file__).parents[2] / "build" / "flower" / "bin"
DEADLINE_S = 120.0


class Deployment:
    """A SuperLink under way, and its nodes.

    Attributes:
        address: of the SuperLink.
        root_certificates: file of the authority that signed its certificate.
        nodes: process of each SuperNode, by the number of its client.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root_certificates, self._key = certificate(folder)
        self.nodes: list[psutil.Process] = []
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        certificates = ("--ssl-ca-certfile", self.root_certificates, "--ssl-certfile", self.root_certificates)
        self._start(
            "flower-superlink", "--host", "127.0.0.1", "--port", port, *certificates, "--ssl-keyfile", self._key,
            "--disable-runtime-dependency-installation",
        )  # fmt: skip
        wait_until_it_listens(port)

    def add_node(self, number: int) -> None:
        """Start the SuperNode of a client."""
        node = self._start(
            "flower-supernode", "--superlink", self.address, "--root-certificates", self.root_certificates,
            "--port", free_port(), "--node-config", f"partition-id={number}",
        )  # fmt: skip
        self.nodes.append(node)

    def _start(self, program: str, *words: object) -> psutil.Process:
        log = (self.folder / f"{program}-{len(self.nodes)}.log").open("w")
        with log:
            process = subprocess.Popen([BIN / program, *map(str, words)], cwd=self.folder, stdout=log, stderr=log)
        return psutil.Process(process.pid)


@contextmanager
def deployment(folder: Path, clients: int) -> Iterator[Deployment]:
    """A SuperLink with a node for each client; all processes end with the context."""
    before = set(psutil.Process().children(recursive=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("FLWR_HOME", str(folder / "flower"))
        patch.setenv("FLWR_TELEMETRY_ENABLED", "0")
        try:
            made = Deployment(folder)
            for number in range(clients):
                made.add_node(number)
            yield made
        finally:
            kill(set(psutil.Process().children(recursive=True)) - before)


def kill(processes: set[psutil.Process]) -> None:
    """Kill processes and all that they have started, and wait for their end."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            processes = processes | set(process.children(recursive=True))
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(list(processes), timeout=20)


def certificate(folder: Path) -> tuple[Path, Path]:
    """Files of a certificate for this machine that signs itself, and of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    here = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(here, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = folder / "certificate.pem", folder / "key.pem"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files


def free_port() -> int:
    """A port of this machine that nothing listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_until_it_listens(port: int) -> None:
    """Wait for a listener at a port of this machine."""
    until = time.monotonic() + DEADLINE_S
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        assert time.monotonic() < until, f"nothing listens at port {port}"
        time.sleep(0.1)
