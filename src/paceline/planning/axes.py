"""The axes of a plan, and the values that its fields may take."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args


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


MemoryFormat = Literal["contiguous", "channels_last"]
Compile = Literal["off", "on", "reduce-overhead"]
Schedule = Literal["1f1b", "gpipe", "interleaved", "zero-bubble", "dualpipe"]
Remat = Literal["none", "selective", "block"]
Balance = Literal["auto", "on", "off"]

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
REMATS: tuple[Remat, ...] = get_args(Remat)
# Schedules whose stages go down through all ranks and up again: two on each rank, the first and the last on rank 0.
V_SCHEDULES = ("zero-bubble", "dualpipe")


def stages_per_rank(schedule: str, virtual: int = 2) -> int:
    """Number of stages on each rank of a pipeline.

    Args:
        virtual: that of interleaved stages, which is the plan's to choose.
    """
    return virtual if schedule == "interleaved" else 2 if schedule in V_SCHEDULES else 1
