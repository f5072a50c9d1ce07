"""The coordinator prepares hosts that come back, and sends requested files while it watches the run."""

from __future__ import annotations

import os
import queue
import select
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from paceline.elastic.failure import StopSignals
from paceline.elastic.hosts.files import receive
from paceline.elastic.hosts.hosts import RemoteRanks, RunFolder
from paceline.elastic.hosts.link import Link
from paceline.elastic.hosts.messages import (
    Begin,
    Fetch,
    Fetched,
    FromHost,
    Interrupted,
    Put,
    Ready,
    ToHost,
)
from paceline.wire.connection import Connection, connect
from paceline.wire.key import RunKey
from paceline.wire.listener import Listener
from paceline.wire.status import StatusBoard


class BackHost:
    """A link to a host that has come back."""

    lost = None
    is_known_lost = True

    def __init__(self, number: int) -> None:
        self.number, self.sent, self.received = number, list[Any](), list[Any]()

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def waiting(self) -> list[Any]:
        received, self.received = self.received, []
        return received

    def watch(self, _: select.poll) -> None:
        return

    def receive(self, _: float) -> None:
        return

    def unwatch(self) -> None:
        return


class HostsAround:
    """The hosts of a run, some of which come back at once."""

    def __init__(self, back: list[BackHost]) -> None:
        self.returns, self._back = self, back
        self.notices: dict[int, float] = {}

    def back(self) -> list[BackHost]:
        back, self._back = self._back, []
        return back

    def replace(self, _: BackHost) -> None:
        return

    def listener(self, messages: Any, on_message: Any) -> Listener:
        return Listener(("127.0.0.1", 0), RunKey.make(), messages, lambda _: None, on_message=on_message)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_hosts_that_come_back_at_once_all_see_that_they_share_the_folder(
    order: tuple[int, int], tmp_path: Path
) -> None:
    back: list[Any] = [BackHost(1), BackHost(2)]
    around: Any = HostsAround(back)
    (tmp_path / "run").mkdir()
    board = StatusBoard.create(tmp_path / "status", 3, 0)
    folder = RunFolder(tmp_path / "run")
    with RemoteRanks(back, board, tmp_path, folder, StopSignals(), select.poll(), around) as remote:
        remote.begin(Begin(0, [], {}, 1.0, True, spares_hosts=True, replica_ranks=1, places=["a", "b", "c"]))
        assert remote.returned() == []
        tokens = [tmp_path / "run" / link.sent[0].token for link in back]
        for number in order:
            assert tokens[number].is_file(), "it would take the folder for another one"
            back[number].received.append(Ready())
            remote.turn()
        assert remote.returned() == [back[number] for number in order]
        assert not any((tmp_path / "run").iterdir())
    board.close()


class Pairs:
    """Links to hosts; the test holds the other ends."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._held = folder, ExitStack()
        self._arrived: queue.Queue[Connection] = queue.Queue()
        listener = Listener(folder / "meeting", None, FromHost, self._arrived.put)
        self._held.callback(listener.close)

    def __enter__(self) -> Pairs:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def make(self, number: int) -> tuple[Link, Connection]:
        """A link, and its other end."""
        there = connect(self._folder / "meeting", None, ToHost, deadline_s=30)
        here = self._arrived.get(timeout=30)
        self._held.callback(here.close)
        self._held.callback(there.close)
        return Link(here, number, f"host-{number}", "", None), there  # type: ignore[arg-type]


def test_a_host_that_is_slow_to_take_a_checkpoint_holds_up_no_signal_and_no_loss(tmp_path: Path) -> None:
    shard = os.urandom(2**25)
    folder = tmp_path / "run" / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    (folder / "shard.safetensors").write_bytes(shard)
    (tmp_path / "copy").mkdir()
    board = StatusBoard.create(tmp_path / "status", 3, 0)
    signals = StopSignals()
    with Pairs(tmp_path) as pairs:
        (slow, at_slow), (other, at_other) = pairs.make(1), pairs.make(2)
        hosts: Any = HostsAround([])
        remote = RemoteRanks([slow, other], board, tmp_path, RunFolder(tmp_path / "run"), signals, select.poll(), hosts)
        at_slow.send(Fetch("checkpoints/step-00000001"))
        wait_for(lambda: remote.busy, remote)
        at_other.send(Interrupted("SIGTERM"))
        wait_for(lambda: hosts.notices, remote)
        assert hosts.notices.keys() == {2}
        assert remote.busy, "the host has read no part of the folder"
        while not isinstance(message := at_slow.take(), Fetched):
            remote.turn()
            if isinstance(message, Put):
                receive(message, tmp_path / "copy")
        assert not remote.busy
    board.close()
    assert (tmp_path / "copy" / "checkpoints" / "step-00000001" / "shard.safetensors").read_bytes() == shard


def wait_for(condition: Callable[[], object], remote: RemoteRanks) -> None:
    """Let the coordinator work until a condition is met."""
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        remote.turn()
        time.sleep(0.01)
