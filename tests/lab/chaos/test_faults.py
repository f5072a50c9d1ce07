"""Faults that hit several ranks at once, and hosts that are not all up."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.cluster.network import wires
from paceline_lab.chaos.faults import Links, Scene, inject
from paceline_lab.chaos.schedule import Fault

RANKS = 3


@pytest.fixture
def ranks() -> Iterator[list[subprocess.Popen[bytes]]]:
    with ExitStack() as held:
        processes = []
        for rank in range(RANKS):
            command = [f"paceline rank {rank} of {RANKS}", "600"]
            process = held.enter_context(subprocess.Popen(command, executable="/bin/sleep"))
            held.callback(process.kill)
            processes.append(process)
        for process in processes:  # Popen returns a moment before the kernel shows the new command line
            while not Path(f"/proc/{process.pid}/cmdline").read_bytes():
                pass
        yield processes


def scene(folder: Path, ranks: list[subprocess.Popen[bytes]], hosts: int = 0) -> Scene:
    return Scene(1, RANKS, hosts, lambda rank: [ranks[rank].pid], folder, folder, folder)


def test_all_ranks_but_one_are_killed(ranks: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    injected = inject(Fault("kill", 0.5, "others", 1), scene(tmp_path, ranks))
    assert injected is not None
    assert injected.hit == f"rank 0 (pid {ranks[0].pid}), rank 2 (pid {ranks[2].pid})"
    assert [ranks[0].wait(), ranks[1].poll(), ranks[2].wait()] == [-9, None, -9]


def test_all_ranks_are_stopped_and_go_on(ranks: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    def states() -> str:
        return "".join(Path(f"/proc/{rank.pid}/stat").read_text().split(") ")[1][0] for rank in ranks)

    injected = inject(Fault("stop", 0.5, "ranks"), scene(tmp_path, ranks))
    assert injected is not None
    while states() != "T" * RANKS:
        pass
    injected.undo()
    while states() != "S" * RANKS:
        pass


def test_several_ranks_are_hit_only_while_several_are_there(
    ranks: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    for rank in ranks[1:]:
        rank.kill()
        rank.wait()
    assert inject(Fault("kill", 0.5, "ranks"), scene(tmp_path, ranks)) is None
    assert ranks[0].poll() is None


def test_a_host_that_is_not_up_yet_is_not_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Links, "of", lambda launcher: Links("", wires(["", ""], [None, None])))
    assert inject(Fault("cut", 0.5, "host", 3), scene(tmp_path, [], hosts=4)) is None
