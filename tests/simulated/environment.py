"""Environment variables of processes that are to have the simulated accelerator."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from simulated import LOADED
from simulated.build import build

Order = Literal["late", "random", "eager"]

DEVICES, ORDER, SEED = "PACELINE_SIMULATED_DEVICES", "PACELINE_SIMULATED_ORDER", "PACELINE_SIMULATED_SEED"
MEMORY = "PACELINE_SIMULATED_MEMORY"
"""Bytes of each device; what more is asked for is an OutOfMemoryError."""
FLOAT64 = "PACELINE_SIMULATED_FLOAT64"
"""Set to 0: devices have no float64."""
TRACE_WAITS = "PACELINE_SIMULATED_TRACE_WAITS"
"""Set to 1: `torch.sim.wait_lines()` tells which line of Python made the host wait, and how often."""
INNER = "PACELINE_SIMULATED_INNER"
"""Process group that carries the bytes: shm (as without it), tcp or gloo."""
DELAY_MS = "PACELINE_SIMULATED_DELAY_MS"
"""`least:most` milliseconds from a collective's call until it begins by itself, if nobody waits for it earlier."""
FAULT = "PACELINE_SIMULATED_FAULT"
"""`kind:rank:number`, or several of them behind commas: faults of that rank's device, in the first attempt of a run.

Every process that takes the rank's place has them as well; with `kind:rank:number:once` only the first has them.

- `lost`, `ecc`, `failure`: at this launch the device is lost, has an uncorrectable error, or fails. Every later call
  raises an AcceleratorError.
- `memory`: the next allocation after this launch is an OutOfMemoryError.
- `hang`: the kernel of this launch never ends, and nothing behind it in its stream begins. No abort changes that.
- `slow`: matrix products take so many times as long.
- `wrong`: one bit of every matrix product of this number, and of its multiples, is wrong.
"""
TIMES_OUT = "PACELINE_SIMULATED_TIMES_OUT"
"""`rank:number`: that rank does not come to its collective or message of this number, in the first attempt."""
LINK = "PACELINE_SIMULATED_LINK"
"""`factor:milliseconds`: each collective takes `factor` times as long, and at least this time.

`factor:milliseconds:rank` slows only the collectives of this rank.
"""
INIT_MS = "PACELINE_SIMULATED_INIT_MS"
"""Milliseconds that the creation of each process group takes, as that of communicators does."""
LOG = "PACELINE_SIMULATED_LOG"
"""A folder: each process writes a line of JSON for every process group that it creates (`collectives.note`)."""


def simulated_environment(
    *,
    devices: int = 2,
    order: Order = "late",
    seed: int = 0,
    memory_bytes: int = 0,
    float64: bool = True,
    trace_waits: bool = False,
    inner: str = "shm",
    delay_ms: str = "",
    fault: str = "",
    times_out: str = "",
    link: str = "",
    init_ms: float = 0,
    log: str = "",
) -> dict[str, str]:
    """The variables for a process and those that it starts; builds the library first, unless that is done.

    The meaning of each is beside its name above. PYTHONPATH is this process's, with what loads the device in front.
    """
    build()
    tests = Path(__file__).parent.parent
    path = [str(tests), str(tests / "simulated" / "autoload"), *filter(None, [os.environ.get("PYTHONPATH")])]
    values = {
        DEVICES: str(devices),
        ORDER: order,
        SEED: str(seed),
        MEMORY: str(memory_bytes or ""),
        FLOAT64: "" if float64 else "0",
        TRACE_WAITS: "1" if trace_waits else "",
        INNER: inner,
        DELAY_MS: delay_ms,
        FAULT: fault,
        TIMES_OUT: times_out,
        LINK: link,
        INIT_MS: str(init_ms or ""),
        LOG: log,
    }
    return {LOADED: "1", "PYTHONPATH": os.pathsep.join(path)} | {name: text for name, text in values.items() if text}


class Simulated:
    """The fixture `simulated`.

    Args:
        run_on_ranks: as the fixture `ranks`.
    """

    environment = staticmethod(simulated_environment)

    def __init__(self, run_on_ranks: Callable[..., list[Any]]) -> None:
        self._run_on_ranks = run_on_ranks

    def ranks(
        self, size: int, function: Callable[..., Any], *args: Any, deadline_s: float = 60.0, **settings: Any
    ) -> list[Any]:
        """Call `function(*args)` on ranks that have an accelerator each, and are in a group of `simccl`.

        A rank is alone with its group at size 1. Its current device is the one with its number.

        Args:
            settings: as for `simulated_environment`.
        """
        variables = simulated_environment(**{"devices": max(1, size), **settings})
        with patch.dict(os.environ, variables):
            return self._run_on_ranks(size, function, *args, deadline_s=deadline_s, backend="simccl")
