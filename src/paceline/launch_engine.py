"""Launch engines: what started this process, and which rank of a run it is."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

from paceline.errors import LaunchError
from paceline.extensions import ExtensionPoint
from paceline.rank_environment import RANK, RankEnvironment, is_our_rank


class LaunchEngine:
    """Starts the processes of a run: torchrun, MPI, a cluster's scheduler, or paceline itself."""

    def detect(self) -> bool:
        """True if this engine started this process, by the environment that it leaves."""
        raise NotImplementedError

    def place(self) -> RankEnvironment | None:
        """This process's rank and rendezvous; None where paceline starts the ranks.

        Raises:
            LaunchError: the environment is incomplete.
        """
        return None

    def tell_failure(self, text: str, time_s: float) -> None:
        """Report why this rank ends, in the engine's own form, if it has one. Raises OSError where it cannot."""


class Local(LaunchEngine):
    """Paceline's own launcher, `launch/local.py`, on this machine or on emulated hosts."""

    def detect(self) -> bool:
        return True


class Torchrun(LaunchEngine):
    """A torchrun, or whatever else sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

    def detect(self) -> bool:
        return RANK in os.environ and not is_our_rank()

    def place(self) -> RankEnvironment | None:
        return RankEnvironment.from_env()

    def tell_failure(self, text: str, time_s: float) -> None:
        if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            facts = {"py_callstack": text.splitlines()[0], "timestamp": str(int(time_s))}
            Path(report).write_text(json.dumps({"message": {"message": text, "extraInfo": facts}}))


ENGINES = ExtensionPoint(
    "launch engine", "paceline.engines", LaunchEngine, {"torchrun": Torchrun(), "local": Local()}, LaunchError
)


@cache
def own_engine() -> LaunchEngine:
    """The engine that started this process. Where that makes it a rank, its place is in the environment from here on.

    Raises:
        LaunchError: an engine of a package cannot be loaded, or its environment is incomplete.
    """
    engine = _detected()
    if RANK not in os.environ and (place := engine.place()) is not None:
        os.environ.update(place.to_env())
    return engine


def _detected() -> LaunchEngine:
    torchrun, local = ENGINES["torchrun"], ENGINES["local"]
    if RANK in os.environ:
        return torchrun if torchrun.detect() else local
    return next((engine for name in ENGINES.installed if (engine := ENGINES[name]).detect()), local)


def is_rank() -> bool:
    """True in a rank process, of paceline's launcher or another engine such as torchrun."""
    if RANK not in os.environ:
        own_engine()
    return RANK in os.environ
