"""A Ray cluster of this test's own: a head without CPUs and nodes, each in a network namespace of its own."""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ENGINES = Path(__file__).parent.parent / "build" / "engines" / "bin"
_SUBNET = "10.83.0"
# Each has its own folder of temporary files, as on a host of its own: else all would show the logs of all.
_TEMPORARY = "/tmp/ray"
_START = f'mkdir -p {_TEMPORARY} && mount -t tmpfs none {_TEMPORARY} && exec ray start "$@"'


@dataclass(frozen=True)
class RayCluster:
    """A cluster under way; commands run in the head's namespace, with `environment`."""

    prefix: str
    environment: dict[str, str]

    def inside(self, number: int) -> list[str]:
        """Words to put before a command that runs on a host; 0 is the head."""
        return ["nsenter", f"--net=/run/netns/{self.prefix}{number}"]

    def start(self, number: int) -> None:
        """Start Ray on a host."""
        own = ["--num-cpus=1", f"--address={_SUBNET}.1:6379"] if number else ["--head", "--port=6379", "--num-cpus=0"]
        options = [
            f"--node-ip-address={_SUBNET}.{number + 1}",
            "--disable-usage-stats",
            "--object-store-memory=100000000",
        ]
        dashboard = [] if number else [f"--dashboard-host={_SUBNET}.1"]
        command = [*self.inside(number), "unshare", "--mount", "sh", "-c", _START, "sh", *own, *options, *dashboard]
        environment = os.environ | self.environment
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        assert ended.returncode == 0, ended.stdout + ended.stderr

    def kill(self, number: int) -> None:
        """End every process on a host at once."""
        found = subprocess.run(["ip", "netns", "pids", f"{self.prefix}{number}"], capture_output=True, text=True)
        for process in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)


_made = itertools.count()


@contextmanager
def ray_cluster(here: Path, nodes: int) -> Iterator[RayCluster]:
    """A cluster of so many nodes besides its head, ended with all that runs on it."""
    token = here / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(16))
    # one of its own for each cluster: links go with the last process of their host, which may be after the next begins
    prefix = f"pr{os.getpid() % 100_000}-{next(_made) % 10}"
    environment = {
        "TMPDIR": _TEMPORARY,
        "PATH": f"{ENGINES}:{os.environ['PATH']}",
        "PACELINE_HOST_DEVICES": "1",  # so that two ranks are on two hosts
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_API_SERVER_ADDRESS": f"http://{_SUBNET}.1:8265",
    }
    cluster, bridge = RayCluster(prefix, environment), f"{prefix}br"
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for number in range(nodes + 1):
            name = f"{prefix}{number}"
            _ip("netns", "add", name)
            _ip("link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"{name}v", "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"{_SUBNET}.{number + 1}/24", "dev", "eth0")
            for link in ("eth0", "lo"):
                _ip("-n", name, "link", "set", link, "up")
        for number in range(nodes + 1):
            cluster.start(number)
        yield cluster
    finally:
        for number in range(nodes + 1):
            cluster.kill(number)
            subprocess.run(["ip", "netns", "del", f"{prefix}{number}"], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)
