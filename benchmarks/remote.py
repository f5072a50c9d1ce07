"""Speed of remote calls: the echo of a tensor of 1 KiB and of 16 MiB, beside torch's RPC, pyzmq and gRPC.

    python benchmarks/remote.py [--json] [--peers PYTHON]

PYTHON is an interpreter with torch, pyzmq and grpcio; without one only torch's RPC is compared. Between two processes
of this host; and, as root, over TLS between two emulated hosts, where gRPC's ends prove a certificate each as ours do.
torch's RPC and pyzmq have no TLS. Figures, the peer's time / ours, of neighbouring blocks of calls, the median of all:
- `small_to_torch_rpc`, `large_to_torch_rpc`: within the host, 1 KiB and 16 MiB; ours by shared memory. The same
  `…_to_pyzmq` and `…_to_grpc`.
- `tls_small_to_grpc_tls`, `tls_large_to_grpc_tls`: between the hosts.
- `remote_to_pipeline`: a model over both hosts, by pipeline parallel / by remote modules (`remote_two_hosts.py`).

All processes are there all the time, and take turns. An echo is held to what was sent before its time is taken.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import remote_two_hosts
from measure import environment_line, parser_of, print_figures
from paceline.cluster.emulate import Emulation
from paceline.cluster.host import Emulate
from paceline.stats import Interval, median_interval
from paceline.wire.key import RunKey, write_key

ENDS = str(Path(__file__).with_name("remote_ends.py"))
OURS = "paceline"
SMALL, LARGE = 2**10, 2**24  # bytes
NAMES = {SMALL: "small", LARGE: "large"}
Times = dict[tuple[str, int], list[float]]  # median seconds of a call, of each block, by system and bytes


def main() -> None:
    """Measure, print the tables, and with --json a last line for machines."""
    parser = parser_of(__doc__)
    parser.add_argument("--peers", metavar="PYTHON", help="interpreter with torch, pyzmq and grpcio")
    parser.add_argument("--blocks", type=int, default=9, help="of each system and size (default: 9)")
    parser.add_argument("--calls", type=int, default=300, help="of 1 KiB in a block; of 16 MiB a thirtieth")
    arguments = parser.parse_args()
    calls = {SMALL: arguments.calls, LARGE: max(3, arguments.calls // 30)}
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        within = [OURS, "torch_rpc", *(["pyzmq", "grpc"] if arguments.peers else [])]
        with callers(within, {"folder": folder}, arguments.peers, [None, None]) as ends:
            figures |= report("two processes of this host", blocks(ends, calls, arguments.blocks), "", "")
        if os.geteuid() == 0:
            with Emulation(Emulate(hosts=2)) as emulation:
                places = [host.namespace for host in emulation.hosts]
                settings = {"folder": folder, "address": emulation.hosts[0].address, **secrets(Path(folder))}
                systems = [OURS, *(["grpc"] if arguments.peers else [])]
                with callers(systems, settings, arguments.peers, places) as ends:
                    found = blocks(ends, calls, arguments.blocks)
                figures |= report("over TLS between two emulated hosts", found, "tls_", "_tls")
            figures |= remote_two_hosts.measured()
    print(environment_line())
    if arguments.json:
        print_figures(figures)


def report(where: str, times_s: Times, prefix: str, suffix: str) -> dict[str, float]:
    """Print a table; the figures by name."""
    figures = {}
    print(f"echo of a tensor, {where}: milliseconds a call, and times ours (95 % interval)")
    for (system, size), blocks_s in times_s.items():
        over = ratio(blocks_s, times_s[OURS, size])
        print(f"  {NAMES[size]:6} {system:10} {1000 * statistics.median(blocks_s):9.3f}   {over}")
        figures[f"{prefix}{NAMES[size]}_{system}_ms"] = round(1000 * statistics.median(blocks_s), 4)
        if system != OURS:
            figures[f"{prefix}{NAMES[size]}_to_{system}{suffix}"] = round(over.middle, 3)
    return figures


def ratio(blocks_s: Sequence[float], ours_s: Sequence[float]) -> Interval:
    """Their time / ours, of neighbouring blocks."""
    return median_interval([theirs / ours for theirs, ours in zip(blocks_s, ours_s, strict=True)])


def blocks(ends: dict[str, subprocess.Popen[str]], calls: dict[int, int], count: int) -> Times:
    """Times of all systems, which take turns."""
    found: Times = {(system, size): [] for size in calls for system in ends}
    for _ in range(count):
        for system, size in found:
            found[system, size].append(statistics.median(ask(ends[system], bytes=size, calls=calls[size])))
    return found


def ask(end: subprocess.Popen[str], **order: int) -> list[float]:
    """Seconds of each call."""
    assert end.stdin is not None
    end.stdin.write(json.dumps(order) + "\n")
    end.stdin.flush()
    took_s: list[float] = json.loads(line_of(end))
    return took_s


@contextmanager
def callers(
    systems: Sequence[str], settings: dict[str, Any], peers: str | None, places: Sequence[str | None]
) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """The calling end of each system, connected to its serving one."""
    with ExitStack() as held:
        found = {}
        for system in systems:
            python = peers if peers and system != OURS else sys.executable
            own = settings | {"store_port": free_port()}
            server = held.enter_context(process([python, ENDS, "serve", system, json.dumps(own)], places[0]))
            own["port"] = int(line_of(server))
            found[system] = held.enter_context(process([python, ENDS, "call", system, json.dumps(own)], places[1]))
            line_of(found[system])
        yield found


@contextmanager
def process(command: list[str], place: str | None) -> Iterator[subprocess.Popen[str]]:
    """A process in a network namespace, ended with its standard input."""
    entered = ["nsenter", f"--net={place}"] if place else []
    quiet = {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # torch's RPC has words for its own end
    running = subprocess.Popen(
        [*entered, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | quiet
    )
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


def line_of(end: subprocess.Popen[str]) -> str:
    """The next line that a process says."""
    assert end.stdout is not None
    if not (line := end.stdout.readline()):
        raise SystemExit(f"{' '.join(map(str, end.args))[:200]} ended with {end.wait()}")  # type: ignore[arg-type]
    return line


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def secrets(folder: Path) -> dict[str, str]:
    """Files with the run's key, and with a key and certificate of the same kind that has a name, for gRPC."""
    files = {name: str(folder / name) for name in ("key", "grpc_key", "grpc_certificate")}
    write_key(RunKey.make(), Path(files["key"]))
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "benchmark")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("benchmark")]), critical=False)
        .sign(private, hashes.SHA256())
    )
    encodings = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    Path(files["grpc_key"]).write_bytes(private.private_bytes(*encodings))
    Path(files["grpc_certificate"]).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return files


if __name__ == "__main__":
    main()
