"""Generations of a run as one of its processes sees them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from paceline.files import write_whole
from paceline.generation import Generation, next_number
from paceline.rank_environment import STORE, RankEnvironment
from paceline.wire.status import StatusBoard

_LOOK_S = 0.002


class Member:
    """This process among those of the run.

    Args:
        number: of the process, which it keeps, whatever its rank in a generation.
        folder: where the launcher puts the members of each generation.
    """

    def __init__(self, number: int, board: StatusBoard, folder: Path) -> None:
        self.number, self.board, self.folder = number, board, folder
        self.generation = Generation(-1, ())
        self._out_of = -1  # the newest generation that others entered without this process

    @classmethod
    def of_this_rank(cls) -> Member:
        """This process, whose launcher announces generations."""
        environment = RankEnvironment.from_env()
        assert environment.status_file is not None, "only ranks of our launcher take part in generations"
        return cls(environment.rank, StatusBoard.of_this_rank(), environment.status_file.parent)

    def is_over(self) -> bool:
        """True if another generation was begun."""
        return self.board.current_generation > self.generation.number

    def another_is_wanted(self) -> bool:
        """True if another generation is to be begun after this step."""
        return self.board.wanted_generation > self.generation.number

    def is_awaited(self) -> bool:
        """True if others wait for this process in a generation that was announced."""
        number = next_number(self.board.current_generation, self.board.wanted_generation, self.generation.number)
        generation = announced(self.folder, number) if number is not None else None
        return generation is not None and self.number in generation.members

    def next_generation(self) -> Generation:
        """Enter the next generation that this process is a member of, once there is one.

        One that is left out, since its replica has lost a rank, waits to join like a replacement; so do all while the
        coordinator is replaced, in a generation without members. The launcher ends who waits in vain.
        """
        told = False
        while True:
            number = next_number(self.board.current_generation, self.board.wanted_generation, self.generation.number)
            if number is not None and number > self._out_of:
                generation = announced(self.folder, number)
                if generation is None:
                    time.sleep(_LOOK_S)
                    continue
                if self.number in generation.members:
                    self.generation = generation
                    if (store := store_file(self.folder)).exists():
                        os.environ[STORE] = store.read_text()
                    self.board.enter(number)
                    return generation
                self.generation, self._out_of = Generation(-1, ()), number
            if self.generation.number < 0 and not told:
                told = True
                self.board.mark("joining", 0)
            time.sleep(_LOOK_S)


def announce(board: StatusBoard, folder: Path, current: Generation, newest: Generation) -> None:
    """Announce generations to the ranks at a launcher's status board, and forget older ones.

    Args:
        folder: of the board.
    """
    for generation in (current, newest):
        write_whole(_members_file(folder, generation.number), json.dumps(generation.members))
    board.announce(current.number, newest.number)
    for file in folder.glob(_members_file(folder, "*").name):
        if int(file.stem.partition("-")[2]) < current.number:
            file.unlink()


def announced(folder: Path, number: int) -> Generation | None:
    """A generation that was announced; None where a newer one has just been."""
    try:
        return Generation(number, tuple(json.loads(_members_file(folder, number).read_text())))
    except FileNotFoundError:
        return None


def _members_file(folder: Path, generation: int | str) -> Path:
    return folder / f"generation-{generation}.json"


def store_file(folder: Path) -> Path:
    """File in which a later launcher names the store where ranks meet."""
    return folder / "store-address"
