"""What the launcher knows of a rank that it killed outlasts the time that the rank takes to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.elastic.recovery import Losses
from paceline.elastic.stall import Stall
from paceline.errors import LaunchError
from paceline.wire.status import RankStatus


@dataclass
class Process:
    pid: int


@dataclass
class Ranks:
    """Ranks of which those that are killed go on until they get another process."""

    processes: dict[int, Process] = field(default_factory=lambda: {0: Process(10), 1: Process(11)})
    killed: list[int] = field(default_factory=list)

    def __getitem__(self, number: int) -> Process:
        return self.processes[number]

    def ask_for_stacks(self, numbers: set[int]) -> None:
        pass

    def kill_hung(self, number: int, members: Sequence[int], stall: Stall | None) -> LaunchError:
        self.killed.append(self[number].pid)
        return LaunchError("launch.rank_hung", "rank {rank} hung", rank=number)


class Replacing(Losses):
    replaces = True


def test_a_hung_rank_that_takes_long_to_end_is_killed_once_and_its_next_process_as_well() -> None:
    ranks: Any = Ranks()
    losses, hung = Replacing(ranks), [RankStatus(1, 11, 0, "compute", 7, 0)]
    assert losses.end(hung, None)
    assert losses.end(hung, None)
    assert (ranks.killed, losses.dying) == ([11], {1})
    ranks.processes[1] = Process(12)
    assert losses.dying == set()
    assert losses.end(hung, None)
    assert ranks.killed == [11, 12]
