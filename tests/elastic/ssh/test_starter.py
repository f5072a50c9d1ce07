"""--hosts starts a command on every host by a real ssh and sshd, and ends it everywhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from commands import DEADLINE_S, in_a_process
from paceline.elastic.ssh import read_hosts, run_on_hosts
from paceline.errors import LaunchError
from sshd import STRANGER, ssh_to

pytestmark = pytest.mark.needs_sshd
PROGRAM = Path(__file__).with_name("what_a_host_does.py")
STARTER = """
import sys
from paceline.elastic.ssh import read_hosts, run_on_hosts
hosts, spare = (read_hosts(text) if text else [] for text in sys.argv[1:3])
sys.exit(run_on_hosts(hosts, sys.argv[3:], spare))
"""
SILENT = """\
#!/bin/sh
case "$*" in *" -G "*) echo hostname 127.0.0.2; exit;; esac
touch {here}/asked
exec sleep 600
"""


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> str:
    return ssh_to(tmp_path_factory.mktemp("ssh"), {"b": "127.0.0.2", "c": "127.0.0.3", STRANGER: "127.0.0.4"})


@contextmanager
def starter(ssh: str, hosts: str, word: str, folder: Path, spare: str = "") -> Iterator[subprocess.Popen[str]]:
    """The starter of the test's program, under way in `folder`."""
    process = subprocess.Popen(
        [sys.executable, "-c", STARTER, hosts, spare, str(PROGRAM), word],
        cwd=folder,
        env={**os.environ, "PACELINE_SSH": ssh, "TMPDIR": str(folder)},  # what a killed one leaves is not the test's
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until, process.poll()
        time.sleep(0.01)


def told(folder: Path, number: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"host-{number}").read_text())
    return found


def signals(folder: Path, number: int) -> str:
    file = folder / f"host-{number}.signals"
    return file.read_text() if file.exists() else ""


def wait_until_all_run(number: int, process: subprocess.Popen[str]) -> None:
    """Wait for a line of each host: then the starter knows, too, that all have begun."""
    assert process.stdout is not None
    assert {process.stdout.readline() for _ in range(number)} == {f"out {i}\n" for i in range(number)}


def test_every_host_gets_its_place_and_the_key_that_nobody_else_sees(ssh: str, tmp_path: Path) -> None:
    with starter(ssh, "localhost,b:2,c", "end", tmp_path) as process:
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 7, err
    found = [told(tmp_path, number) for number in range(3)]
    assert [host["place"] for host in found] == [[number, 3, "127.0.0.1", "ssh"] for number in range(3)]
    assert [host["devices"] for host in found] == [None, "2", None]
    assert len({host["key"] for host in found}) == 1
    assert not any(host["secret_in_sight"] for host in found)
    assert sorted(out.split("\n")) == ["", "out 0", "out 1", "out 2"]
    # the login shells of this machine may have something to say
    assert sorted(line for line in err.split("\n") if line.startswith("err")) == ["err 0", "err 1", "err 2"]


def test_the_first_host_may_be_another_one(ssh: str, tmp_path: Path) -> None:
    with starter(ssh, "b,localhost", "end", tmp_path) as process:
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 7, err
    assert [told(tmp_path, number)["place"] for number in range(2)] == [
        [0, 2, "127.0.0.2", "ssh"],
        [1, 2, "127.0.0.2", "ssh"],
    ]


def test_ctrl_c_at_the_starter_reaches_host_0_once(ssh: str, tmp_path: Path) -> None:
    with starter(ssh, "b,localhost", "wait", tmp_path) as process:
        wait_until_all_run(2, process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 7, err
    assert signals(tmp_path, 0) == "SIGINT"
    assert signals(tmp_path, 1) == ""  # told by host 0


def test_sigterm_while_ssh_connects_ends_all_at_once(tmp_path: Path) -> None:
    silent = tmp_path / "ssh"
    silent.write_text(SILENT.format(here=tmp_path))
    silent.chmod(0o700)
    with starter(str(silent), "localhost,b", "wait", tmp_path) as process:
        wait_until((tmp_path / "asked").exists, process)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert "SIGTERM stopped the run before host b had started" in err


def test_hosts_end_when_their_starter_is_killed(ssh: str, tmp_path: Path) -> None:
    with starter(ssh, "localhost,b", "wait", tmp_path) as process:
        wait_until_all_run(2, process)
        process.kill()
        pids = [told(tmp_path, number)["pid"] for number in range(2)]
        wait_until(lambda: not any(map(_runs, pids)), process)
    assert "SIGTERM" in (signals(tmp_path, 0), signals(tmp_path, 1))


def test_a_host_whose_connection_is_lost_ends_and_is_named(ssh: str, tmp_path: Path) -> None:
    with starter(ssh, "localhost,b", "wait", tmp_path) as process:
        wait_until_all_run(2, process)
        [client] = [child for child in psutil.Process(process.pid).children() if child.name() == "ssh"]
        client.kill()
        wait_until(lambda: signals(tmp_path, 1), process)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert "the ssh connection to host b was lost" in err
    assert signals(tmp_path, 0) == "SIGTERM"


def test_spare_hosts_replace_a_failed_host_one_after_another(ssh: str, tmp_path: Path) -> None:
    with starter(ssh, "localhost,b", "wait", tmp_path, spare=f"{STRANGER},c") as process:
        wait_until_all_run(2, process)
        first = told(tmp_path, 1)
        os.kill(first["pid"], signal.SIGTERM)
        wait_until(lambda: told(tmp_path, 1)["pid"] != first["pid"], process)
        second = told(tmp_path, 1)
        assert (second["place"], second["key"]) == (first["place"], first["key"])
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 7, err
    assert signals(tmp_path, 0) == "SIGTERM"


def test_a_run_that_ends_starts_no_spare_host(ssh: str, tmp_path: Path) -> None:
    with starter(ssh, "localhost,b", "end", tmp_path, spare="c") as process:
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 7, err
    assert sorted(out.split("\n")) == ["", "out 0", "out 1"]


@pytest.mark.parametrize(
    ("hosts", "environment", "said"),
    [
        (
            STRANGER,
            {},
            ("host stranger cannot be reached by ssh", "Host key verification failed", "stranger true` must work"),
        ),
        (
            "b",
            {"PACELINE_REMOTE_PYTHON": "/nowhere/python"},
            ("did not start on host b (exit code 127)", "'/nowhere/python'"),
        ),
        ("b", {"PACELINE_SSH": "nossh"}, ("--hosts needs the program nossh",)),
        ("b,b", {}, ("names b twice",)),
        ("b", {"PACELINE_COORDINATOR": "a:99999"}, ('The port of host 0 is "99999"',)),
    ],
)
def test_a_host_that_cannot_be_started_on_is_named_with_the_reason(
    hosts: str, environment: dict[str, str], said: tuple[str, ...], ssh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PACELINE_SSH": ssh, **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError) as raised:
        run_on_hosts(read_hosts(hosts), [str(PROGRAM), "end"])
    assert all(text in str(raised.value) for text in said), raised.value


def test_hosts_of_another_engine_start_no_further_ones(tmp_path: Path) -> None:
    by_hand = {"PACELINE_HOSTS": "2", "PACELINE_HOST_NUMBER": "1", "PACELINE_COORDINATOR": "a"}
    outcome = in_a_process("links", "--hosts", "b,c", folder=tmp_path, **by_hand)
    assert "hosts has already started this command on every host. Leave out --hosts" in outcome.error


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
