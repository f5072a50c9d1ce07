"""A rank's place on the mesh: the axes multiply to the world, and every group has the ranks that it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.comm import Group
from paceline.comm.backend import join
from paceline.errors import PlanError
from paceline.planning.plan import AXES, DATA_AXES, Plan
from paceline.split.mesh import Mesh
from ranks import Ranks
from refusals import raises


def places(plan: str) -> dict[str, Any]:
    group = join(deadline_s=30)
    mesh = Mesh.of(Plan.parse(plan), group)
    found: dict[str, Any] = {"place": mesh.place, "data_rank": mesh.data_rank, "hosts": mesh.data_rank_hosts}
    for axes in (*((axis,) for axis in AXES), DATA_AXES):
        total = torch.tensor([float(2**group.rank)])
        mesh.group(*axes).all_reduce(total)
        found["+".join(axes)] = int(total)
    return found


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_every_group_has_the_ranks_that_differ_along_its_axes_only(ranks: Ranks, backend: Any) -> None:
    """8 ranks; a group is told by the sum of 2**rank over its members."""
    found = ranks(8, places, "dp=2 fsdp=2 tp=2", backend=backend)
    assert [f["place"]["tp"] for f in found] == [0, 1] * 4, "neighbours share matrices"
    assert [f["data_rank"] for f in found] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [f["tp"] for f in found] == [0b11, 0b11, 0b1100, 0b1100, 0b110000, 0b110000, 0b11000000, 0b11000000]
    assert [f["dp"] for f in found] == [0b10001, 0b100010, 0b1000100, 0b10001000] * 2
    assert [f["dp+fsdp+ep"] for f in found] == [0b01010101, 0b10101010] * 4
    assert [f["pp"] for f in found] == [2**r for r in range(8)], "an axis of one rank is that rank alone"


def test_degrees_that_do_not_multiply_to_the_ranks_are_refused() -> None:
    with raises(PlanError, "plan.other_number_of_ranks", plan="dp=2 tp=2", ranks=4, started=1):
        Mesh.of(Plan.parse("dp=2 tp=2"), Group())
