"""A real sshd for tests: one process per connection, without a port, for hosts of any name."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

STRANGER = "stranger"  # a host whose key is not known


def ssh_to(folder: Path, hosts: dict[str, str]) -> str:
    """The command `ssh` by which hosts, of names and addresses, are this machine; all it needs is in `folder`."""
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True, timeout=60, stdin=subprocess.DEVNULL)
    server = [
        f"HostKey {folder}/host",
        f"AuthorizedKeysFile {folder}/user.pub",
        "StrictModes no",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "UsePAM no",
        "PermitRootLogin yes",
        "PrintMotd no",
    ]
    (folder / "sshd_config").write_text("\n".join(server) + "\n")
    (folder / "known").write_text(
        "".join(f"{name} {(folder / 'host.pub').read_text()}" for name in hosts if name != STRANGER)
    )
    serve = shlex.join([str(SSHD), "-i", "-f", str(folder / "sshd_config"), "-E", str(folder / "sshd.log")])
    if os.geteuid() == 0:  # sshd wants an empty folder there, which the service makes
        serve = shlex.join(
            ["unshare", "-m", "sh", "-c", f"mount -t tmpfs none /run && mkdir /run/sshd && exec {serve}"]
        )
    client = [
        *(line for name, address in hosts.items() for line in _named(name, address)),
        "Host *",
        f"  ProxyCommand {serve}",
        f"  IdentityFile {folder}/user",
        "  IdentitiesOnly yes",
        f"  UserKnownHostsFile {folder}/known",
        "  GlobalKnownHostsFile /dev/null",
        "  StrictHostKeyChecking yes",
        "  CheckHostIP no",
    ]
    (folder / "ssh_config").write_text("\n".join(client) + "\n")
    return shlex.join(["ssh", "-F", str(folder / "ssh_config")])


def _named(name: str, address: str) -> list[str]:
    return [f"Host {name}", f"  HostName {address}", f"  HostKeyAlias {name}"]
