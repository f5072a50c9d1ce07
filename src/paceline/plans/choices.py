"""Named choices of a plan, one definition of each: a type and a tuple.

The precisions are the job's: `paceline.job.job.Precision`; rules, codecs and transports have descriptions beside this
file.
"""

from __future__ import annotations

from typing import Literal, get_args

MemoryFormat = Literal["contiguous", "channels_last"]
Compile = Literal["off", "on", "reduce-overhead"]
Schedule = Literal["1f1b", "gpipe", "interleaved", "zero-bubble"]
Remat = Literal["none", "selective", "block"]
Balance = Literal["auto", "on", "off"]

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
REMATS: tuple[Remat, ...] = get_args(Remat)
# Stages on each rank of the pipeline: interleaved and zero-bubble cut the model twice as often.
STAGES_PER_RANK: dict[str, int] = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "zero-bubble": 2}
