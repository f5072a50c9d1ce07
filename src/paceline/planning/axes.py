"""The axes of the device mesh: one table that every other part of paceline reads.

An axis is written in a plan as its degree, `tp=2`, and is the name of a dimension of the run's `DeviceMesh`.
"""

from __future__ import annotations

from typing import NamedTuple


class Axis(NamedTuple):
    """One axis of the device mesh.

    Attributes:
        name: the plan's key and the name of the mesh dimension.
        term: the field's word for it.
        reads_data: True if ranks along it read different samples, so that they multiply to the data-parallel ranks.
    """

    name: str
    term: str
    reads_data: bool = False


# In the mesh the last axis varies fastest: its ranks are neighbours, which communicate most.
MESH_AXES = (
    Axis("dp", "data parallel: replicas", reads_data=True),
    Axis("pp", "pipeline parallel: stages of layers"),
    Axis("fsdp", "fully sharded data parallel: parameters, gradients and optimizer state", reads_data=True),
    Axis("cp", "context parallel: the tokens of a sequence"),
    Axis("ep", "expert parallel: the experts of a mixture", reads_data=True),
    Axis("tp", "tensor parallel: the matrices of a layer"),
)
AXES = tuple(axis.name for axis in MESH_AXES)
DATA_AXES = tuple(axis.name for axis in MESH_AXES if axis.reads_data)
# The axes inside a replica, all but the first.
REPLICA = AXES[1:]
# In the order in which a plan writes them, and in which changes to it are tried.
DEGREES = ("dp", "fsdp", "tp", "pp", "cp", "ep")
assert set(DEGREES) == set(AXES)
