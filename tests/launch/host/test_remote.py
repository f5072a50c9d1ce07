"""The coordinator prepares hosts that come back: each finds out whether it shares the run's folder."""

from __future__ import annotations

import select
from pathlib import Path
from typing import Any

import pytest

from paceline.engine.status import StatusBoard
from paceline.launch.host.messages import Begin, Ready
from paceline.launch.host.remote import RemoteRanks, RunFolder
from paceline.launch.signals import StopSignals


class BackHost:
    """A link to a host that has come back."""

    lost = None
    is_known_lost = False

    def __init__(self, number: int) -> None:
        self.number, self.sent, self.received = number, list[Any](), list[Any]()

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def waiting(self) -> list[Any]:
        received, self.received = self.received, []
        return received

    def watch(self, _: select.poll) -> None:
        return


class HostsAround:
    """The hosts of a run, some of which come back at once."""

    def __init__(self, back: list[BackHost]) -> None:
        self.returns, self._back = self, back

    def back(self) -> list[BackHost]:
        back, self._back = self._back, []
        return back

    def replace(self, _: BackHost) -> None:
        return


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_hosts_that_come_back_at_once_all_see_that_they_share_the_folder(
    order: tuple[int, int], tmp_path: Path
) -> None:
    back: list[Any] = [BackHost(1), BackHost(2)]
    around: Any = HostsAround(back)
    (tmp_path / "run").mkdir()
    board = StatusBoard.create(tmp_path / "status", 3, 0)
    remote = RemoteRanks(back, board, tmp_path, RunFolder(tmp_path / "run"), StopSignals(), select.poll(), around)
    remote._begin = Begin(0, [], {}, 1.0, True, spares_hosts=True, replica_ranks=1, places=["a", "b", "c"])
    remote._pulses = type("Silent", (), {"forget": lambda self, host: None})()
    assert remote.returned() == []
    tokens = [tmp_path / "run" / link.sent[0].token for link in back]
    for number in order:
        assert tokens[number].is_file(), "it would take the folder for another one"
        back[number].received.append(Ready())
        remote.turn()
    assert remote.returned() == [back[number] for number in order]
    assert not any((tmp_path / "run").iterdir())
    board.close()
