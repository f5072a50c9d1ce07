"""The option --hosts names hosts and their devices, or says what is wrong with it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from paceline.elastic.ssh import NamedHost, read_hosts
from paceline.errors import LaunchError
from refusals import raises


def test_a_list_names_hosts_users_addresses_and_devices() -> None:
    assert read_hosts("a, me@b-1.lan:2,[fd00::2]:16,10.0.0.1") == [
        NamedHost("a"),
        NamedHost("me@b-1.lan", 2),
        NamedHost("[fd00::2]", 16),
        NamedHost("10.0.0.1"),
    ]


def test_a_file_has_a_host_on_each_line(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# the rack\na\n\nb:2  # half of it\n")
    assert read_hosts(str(tmp_path / "hosts")) == [NamedHost("a"), NamedHost("b", 2)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not a host. Write NAME"),
        ("a,", "is not a host. Write NAME"),
        ("-oProxyCommand=x", '"-oProxyCommand=x" is not a host'),
        ("a,-l", '"-l" is not a host'),
        ("me@-a", "is not a host"),
        ("a b", "is not a host"),
        ("a;reboot", "is not a host"),
        ("a:0", "is not a host"),
        ("a:two", "is not a host"),
        ("a:999999", "is not a host"),
        ("fd00::2", "is not a host"),
        ("a,b:1,a:2", "names a twice. To use two of its devices, write a:2"),
        ("localhost,127.0.0.1", "names this machine twice"),
        ("/nowhere/hosts", "the list of hosts cannot be read"),
    ],
)
def test_a_list_that_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(LaunchError) as refused:
        read_hosts(text)
    assert said in str(refused.value)


def test_a_file_without_hosts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# none yet\n")
    with raises(LaunchError, "ssh.no_hosts"):
        read_hosts(str(tmp_path / "hosts"))


def test_this_machine_is_known_by_its_own_names() -> None:
    own = socket.gethostname()
    assert [host.is_here for host in read_hosts(f"{own},b:2,127.0.0.2")] == [True, False, False]
