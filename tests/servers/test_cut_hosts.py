"""Calls between emulated hosts, over TLS; and when a host is cut off."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hosts import Hosts
from paceline.errors import ChannelError, DeadlineError
from paceline.wire.key import RunKey, read_key, write_key
from paceline_server.client import Client
from remote_services import State, service

PORT = 4100
DEADLINE_S = 60.0


def serve_or_call(folder: str, address: str, cut: bool) -> Any:
    """Rank 0 serves until a client has left; rank 1 calls, and where it is cut off tells what it got."""
    place, key = Path(folder), read_key(Path(folder) / "key")
    if os.environ["RANK"] == "0":
        state = State()
        with service((address, PORT), key, state=state):
            with state.changed:
                assert state.changed.wait_for(lambda: bool(state.left), DEADLINE_S)
            state.open.set()
            return state.left
    with Client((address, PORT), key, name="client", deadline_s=DEADLINE_S) as client:
        sent = torch.rand(1_000_000)
        assert torch.equal(client.call("echo", sent), sent)
        if not cut:
            return None
        (place / "calls").touch()
        with pytest.raises(ChannelError) as lost:
            client.call("wait", deadline_s=10 * DEADLINE_S)
        assert not isinstance(lost.value, DeadlineError)
        return "lost"


@pytest.mark.needs_root
@pytest.mark.needs_iproute2
def test_tensors_go_between_hosts_over_tls(hosts: Hosts, tmp_path: Path) -> None:
    write_key(RunKey.make(), tmp_path / "key")
    emulated = hosts(2)
    address = emulated.emulation.hosts[0].address
    assert emulated.run(serve_or_call, str(tmp_path), address, False) == [["client"], None]


@pytest.mark.slow
@pytest.mark.needs_root
@pytest.mark.needs_iproute2
def test_both_ends_lose_the_connection_when_a_host_is_cut_off(hosts: Hosts, tmp_path: Path) -> None:
    write_key(RunKey.make(), tmp_path / "key")
    emulated = hosts(2)
    address = emulated.emulation.hosts[0].address

    def cut() -> None:
        until = time.monotonic() + DEADLINE_S
        while not (tmp_path / "calls").exists() and time.monotonic() < until:
            time.sleep(0.01)
        emulated.cut(1)

    cutting = threading.Thread(target=cut)
    cutting.start()
    found = emulated.run(serve_or_call, str(tmp_path), address, True, deadline_s=2 * DEADLINE_S)
    cutting.join()
    assert found == [["client"], "lost"]
