"""A user who is not root emulates hosts in a user namespace, or is told why that is refused."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from commands import BIN, losses, paceline, write_job
from paceline.cluster import network as user_namespace
from paceline.cluster.network import become_root_of_own_namespace
from paceline.errors import ClusterError
from refusals import raises

REPOSITORY = Path(__file__).parents[2]
NOBODY = "setpriv --reuid=65534 --regid=65534 --clear-groups"


def closed_folder(path: Path) -> Path | None:
    """The uppermost folder on the way to a path that not everybody may enter; None without any."""
    return next((folder for folder in reversed(path.parents) if not folder.stat().st_mode & 0o001), None)


def as_nobody(*command: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as the user nobody, in a folder of theirs.

    What a folder of root's hides of Python is shown to it, in a mount namespace.
    """
    os.chown(folder, 65534, 65534)
    (folder / "hold").mkdir()
    lines = ["set -e", "mount --make-rprivate /", f"mount --bind {folder} /mnt"]
    base = Path(sys.base_prefix)
    if (closed := closed_folder(base)) is not None:
        assert not REPOSITORY.is_relative_to(closed), f"nobody cannot enter {closed}"
        lines += [f"mount --bind {base} /mnt/hold", f"mount -t tmpfs -o mode=755 none {closed}"]
        lines += [f"mkdir -p {base}", f"mount --bind /mnt/hold {base}", "umount /mnt/hold"]
    lines += ["cd /mnt", f'exec env HOME=/mnt TMPDIR=/mnt XDG_CACHE_HOME=/mnt/cache {NOBODY} "$@"']
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", "\n".join(lines), "sh", *map(str, command)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.needs_root
@pytest.mark.needs_iproute2
@pytest.mark.timeout(240)
def test_nobody_trains_on_emulated_hosts_what_root_trains_without(tmp_path: Path) -> None:
    folder = tmp_path / "nobody"
    folder.mkdir()
    job = write_job(folder / "job.yaml", stop={"steps": 5})
    (folder / "cluster.yaml").write_text("emulate: {hosts: 2, rate: 100mbit, delay_ms: 1}\n")
    command = ("train", "job.yaml", "--plan", "dp=2", "--cluster", "cluster.yaml", "--run", "run")
    outcome = as_nobody(BIN / "paceline", *command, folder=folder)
    assert outcome.returncode == 0, outcome.stderr
    assert (folder / "run").stat().st_uid == 65534
    assert paceline("train", job, "--plan", "dp=1", "--run", "alone", folder=tmp_path).code == 0
    assert losses(folder / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.needs_root
@pytest.mark.needs_iproute2
def test_nobody_is_told_that_their_hosts_cores_cannot_be_limited(tmp_path: Path) -> None:
    write_job(tmp_path / "job.yaml")
    (tmp_path / "cluster.yaml").write_text("emulate: {hosts: 2, cpu: 0.5}\n")
    command = ("train", "job.yaml", "--plan", "dp=2", "--cluster", "cluster.yaml", "--run", "run")
    outcome = as_nobody(BIN / "paceline", *command, folder=tmp_path)
    assert outcome.returncode == 1
    assert "Leave `cpu` out of `emulate`" in outcome.stderr


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("kernel/unprivileged_userns_clone", "0", "`sudo sysctl -w kernel.unprivileged_userns_clone=1`"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "apparmor_restrict_unprivileged_userns=0`"),
        ("user/max_user_namespaces", "0", "`sudo sysctl -w user.max_user_namespaces=10000`"),
        ("user/max_user_namespaces", "9", "Start the command with sudo, or in a container with --privileged"),
    ],
)
def test_where_the_kernel_refuses_the_setting_that_does_is_named(
    name: str, value: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(user_namespace, "call_libc", refuse)
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text(f"{value}\n")
    with raises(ClusterError, "emulate.user_namespace_refused", reason="Operation not permitted") as told:
        become_root_of_own_namespace(tmp_path)
    assert advice in str(told.value)
