"""Named choices of a plan, one definition of each: a type and a tuple.

The precisions are the job's: `paceline.job.job.Precision`; rules, codecs and transports have descriptions beside this
file.
"""

from __future__ import annotations

from typing import Literal, get_args

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
