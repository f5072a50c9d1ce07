"""Epochs of a run as one of its processes sees them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from paceline.epoch import Epoch, next_number
from paceline.files import write_whole
from paceline.rank_environment import STORE, RankEnvironment
from paceline.wire.status import StatusBoard

_LOOK_S = 0.002


class Member:
    """This process among those of the run.

    Args:
        number: of the process, which it keeps, whatever its rank in an epoch.
        folder: where the launcher puts the members of each epoch.
    """

    def __init__(self, number: int, board: StatusBoard, folder: Path) -> None:
        self.number, self.board, self.folder = number, board, folder
        self.epoch = Epoch(-1, ())
        self._out_of = -1  # the newest epoch that others entered without this process

    @classmethod
    def of_this_rank(cls) -> Member:
        """This process, whose launcher announces epochs."""
        environment = RankEnvironment.from_env()
        assert environment.status_file is not None, "only ranks of our launcher take part in epochs"
        return cls(environment.rank, StatusBoard.of_this_rank(), environment.status_file.parent)

    def is_over(self) -> bool:
        """True if another epoch was begun."""
        return self.board.current_epoch > self.epoch.number

    def another_is_wanted(self) -> bool:
        """True if another epoch is to be begun after this step."""
        return self.board.wanted_epoch > self.epoch.number

    def is_awaited(self) -> bool:
        """True if others wait for this process in an epoch that was announced."""
        number = next_number(self.board.current_epoch, self.board.wanted_epoch, self.epoch.number)
        epoch = announced(self.folder, number) if number is not None else None
        return epoch is not None and self.number in epoch.members

    def next_epoch(self) -> Epoch:
        """Enter the next epoch that this process is a member of, once there is one.

        One that is left out, since its replica has lost a rank, waits to join like a replacement; so do all while the
        coordinator is replaced, in an epoch without members. The launcher ends who waits in vain.
        """
        told = False
        while True:
            number = next_number(self.board.current_epoch, self.board.wanted_epoch, self.epoch.number)
            if number is not None and number > self._out_of:
                epoch = announced(self.folder, number)
                if epoch is None:
                    time.sleep(_LOOK_S)
                    continue
                if self.number in epoch.members:
                    self.epoch = epoch
                    if (store := store_file(self.folder)).exists():
                        os.environ[STORE] = store.read_text()
                    self.board.enter(number)
                    return epoch
                self.epoch, self._out_of = Epoch(-1, ()), number
            if self.epoch.number < 0 and not told:
                told = True
                self.board.mark("joining", 0)
            time.sleep(_LOOK_S)


def announce(board: StatusBoard, folder: Path, current: Epoch, newest: Epoch) -> None:
    """Announce epochs to the ranks at a launcher's status board, and forget older ones.

    Args:
        folder: of the board.
    """
    for epoch in (current, newest):
        write_whole(_members_file(folder, epoch.number), json.dumps(epoch.members))
    board.announce(current.number, newest.number)
    for file in folder.glob(_members_file(folder, "*").name):
        if int(file.stem.partition("-")[2]) < current.number:
            file.unlink()


def announced(folder: Path, number: int) -> Epoch | None:
    """An epoch that was announced; None where a newer one has just been."""
    try:
        return Epoch(number, tuple(json.loads(_members_file(folder, number).read_text())))
    except FileNotFoundError:
        return None


def _members_file(folder: Path, epoch: int | str) -> Path:
    return folder / f"epoch-{epoch}.json"


def store_file(folder: Path) -> Path:
    """File in which a later launcher names the store where ranks meet."""
    return folder / "store-address"
